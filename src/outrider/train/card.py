"""The README of a draft that was trained: what it is, what it was made of, how well it does."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.train.alpha import Alpha


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

{report.steps:,} steps, {report.epochs:.1f} times over the texts, {report.minutes:.0f} minutes.

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
        lines.append(
            f"| {temperature:g} | {' | '.join(figures)} | {speed:.2f} with {length} tokens |"
        )
    return "\n".join(lines)
