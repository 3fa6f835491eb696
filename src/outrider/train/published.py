"""The two ends of a training that touch `load`: the target as it comes, the draft as it goes."""

from typing import TYPE_CHECKING

import torch

from outrider.costs import Costs
from outrider.engine.speculation_policy import measure
from outrider.errors import ConfigurationError
from outrider.loading import load
from outrider.models.sources import ModelSource, usable
from outrider.text.speculator import Speculator
from outrider.train.alpha import DEPTH, TEMPERATURES, Alpha
from outrider.train.card import TrainReport, card
from outrider.train.job import Result
from outrider.train.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    speculator = load(model, drafter="root", tokenizer=tokenizer, threads=threads or "auto")
    if place.type == "cpu":  # one step of one text is fastest on few; batches take all there are
        torch.set_num_threads(threads or all_threads)
    return speculator, model


def publish(result: Result, task: Task) -> str:
    """Write the card; returns it. The draft is loaded and its steps are timed for that."""
    speculator = load(
        task.target, task.out, num_speculative_tokens=DEPTH, trust_remote_code=task.trust
    )
    costs = measure.measured(speculator.engine, 1)
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
