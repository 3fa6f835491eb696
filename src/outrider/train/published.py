"""The two ends of a training that touch `load`: the target as it comes, the draft as it goes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider.costs import Costs
from outrider.engine.speculation_policy import measure
from outrider.errors import ConfigurationError
from outrider.loading import load
from outrider.models.placement import usable
from outrider.models.sources import ModelSource
from outrider.text.speculator import Speculator
from outrider.train.features import DEPTH, TEMPERATURES, Alpha
from outrider.train.job import Result
from outrider.train.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The README of a draft that was trained: what it is, what it was made of, how well it does.


@dataclass(frozen=True)
class TrainReport:
    """What a training came to."""

    of: str  #: the target's name
    kind: str
    before: Alpha  #: on held-out texts, untrained
    after: Alpha
    speed: Mapping[float, tuple[float, int]]  #: by temperature: over plain, with so many tokens
    megabytes: float
    vocab_size: int  #: tokens that it proposes
    learnt: Mapping[str, int]  #: tokens by file, "answers" being the target's own
    epochs: float
    minutes: float
    steps: int


def card(report: TrainReport, folder: Path) -> str:
    """The card as Markdown."""
    name = folder.resolve().name
    sources = "\n".join(f"| {file} | {count:,} |" for file, count in report.learnt.items())
    return f"""# {name}

A draft for `{report.of}` ({report.kind}), made by `outrider train-draft`.

```python
import outrider

speculator = outrider.load("{report.of}", draft="{name}")
```

It proposes {report.vocab_size:,} tokens and has {report.megabytes:.1f} MB of weights of its own; \
embedding and output rows are lent by the target. Every rule stays exact whatever it proposes.

## Acceptance on held-out texts

Chance that drafted token 1, 2, 3, 4 is accepted where those before it are the text's own; \
{report.after.places:,} places.

| temperature | before training | after | expected speed of plain decoding |
|---|---|---|---|
{_rows(report)}

At temperature 0: share of places where both have the same likeliest token; otherwise the sum of \
min(p, q). Speed is tokens of a step over its cost as measured where it was trained.

## Training

{report.steps:,} steps, {report.epochs:.1f} times over the texts, {report.minutes:.1f} minutes.

| source | tokens |
|---|---|
{sources}
"""


def _rows(report: TrainReport) -> str:
    lines = []
    for temperature, after in report.after.by_temperature.items():
        before = report.before.by_temperature[temperature]
        figures = (" ".join(f"{alpha:.3f}" for alpha in each) for each in (before, after))
        speed, length = report.speed[temperature]
        drafts = f"{length} token{'s' if length > 1 else ''}"
        does = "" if speed > 1 else ", which does not pay"
        lines.append(
            f"| {temperature:g} | {' | '.join(figures)} | {speed:.2f} with {drafts}{does} |"
        )
    return "\n".join(lines)


def opened(
    target: str, device: str | None, dtype: str, threads: int | None, trust: bool = False
) -> "tuple[Speculator, PreTrainedModel]":
    """The target to run, and the model of transformers whose weights those are.

    Its dtype is the checkpoint's where none is asked for. Raises ConfigurationError and its kin.
    """
    source = ModelSource(target, "target", trust=trust)
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    place = usable(device or usual)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ConfigurationError(
            f"texts need a tokenizer; got {target!r}, which has none beside its weights; put one "
            "there"
        )
    model = source.dense(source.checkpoint_dtype() if dtype == "auto" else dtype, place)
    all_threads = torch.get_num_threads()
    speculator = load(model, drafter="none", tokenizer=tokenizer, threads=threads or "auto")
    if place.type == "cpu":  # one step of one text is fastest on few; batches take all there are
        torch.set_num_threads(threads or all_threads)
    return speculator, model


def publish(result: Result, task: Task) -> str:
    """Write the card; returns it. The draft is loaded and its steps are timed for that."""
    speculator = load(
        task.target, task.out, num_speculative_tokens=DEPTH, trust_remote_code=task.trust
    )
    costs = measure.whole(measure.measured(speculator.engine, 1))
    speed = {each: _speed(result.after, each, costs) for each in TEMPERATURES}
    weights = sum(path.stat().st_size for path in task.out.glob("*.safetensors"))
    learnt = sum(result.learnt.values())
    text = card(
        TrainReport(
            of=task.target,
            kind=task.kind,
            before=result.before,
            after=result.after,
            speed=speed,
            megabytes=weights / 1e6,
            vocab_size=len(result.student.ids_K),
            learnt=result.learnt,
            epochs=result.progress.tokens / max(learnt, 1),
            minutes=result.progress.seconds / 60,
            steps=result.progress.step,
        ),
        task.out,
    )
    (task.out / "README.md").write_text(text, encoding="utf-8")
    return text


def _speed(after: Alpha, temperature: float, costs: Costs) -> tuple[float, int]:
    """Speed over plain decoding by the best chain, and its length: tokens of a step over its cost.

    What a step costs is measured whole, drafting and host included.
    """
    plain = costs.milliseconds(1)
    gains = [
        after.tokens(temperature, drafted) * plain / costs.milliseconds(1 + drafted)
        for drafted in range(1, DEPTH + 1)
    ]
    return max(gains), 1 + gains.index(max(gains))
