"""The training loop that target and draft share: accumulate, average, step, save, report."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from training import parallel
from training.model import Llama, Shape
from training.muon import Optimiser
from training.schedule import Schedule


class Term(NamedTuple):
    """A part of a step's loss: the step's gradient is that of the sum of `weight * loss`.

    The gradient of a relative term (last in its step) is scaled down to at most `weight` times the
    length of what was summed before; it is left out of the reported loss.
    """

    loss: Tensor
    weight: float
    relative: bool = False


class Job(Protocol):
    """What is trained and on what; the loop knows nothing else about it."""

    model: Llama

    def losses(self, step: int) -> Iterable[Term]:
        """The terms of one step; each is differentiated before the next is computed."""

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out text."""


@dataclass(frozen=True)
class Pace:
    """Where a run keeps its state, and how often it saves, reports and evaluates (in steps)."""

    out: Path
    save_every: int = 25
    report_every: int = 10
    evaluate_every: int = 100


def train(job: Job, optimiser: Optimiser, schedule: Schedule, pace: Pace) -> None:
    """Run to the end of the schedule, from the last checkpoint in `pace.out` if there is one."""
    pace.out.mkdir(parents=True, exist_ok=True)
    last = pace.out / "last.pt"
    first_step = resume(optimiser, job.model, last) if last.exists() else 0
    quiet = parallel.rank() > 0 or not sys.stderr.isatty()
    mean, since = 0.0, time.monotonic()
    for step in tqdm(range(first_step, schedule.steps), disable=quiet, unit="step"):
        if step == schedule.fall_from:
            save(optimiser, job.model, step, pace.out / "before_fall.pt")
        loss = take_step(job, optimiser, step, schedule.scale(step))
        mean = loss if step == first_step else 0.95 * mean + 0.05 * loss
        done = step + 1
        if done % pace.report_every == 0 or done - first_step <= 3:
            pause = (time.monotonic() - since) / (done - first_step)
            report(f"step {done}/{schedule.steps} loss {mean:.4f} seconds/step {pause:.2f}")
        if done % pace.save_every == 0 or done == schedule.steps:
            save(optimiser, job.model, done, last)
        if done % pace.evaluate_every == 0 or done == schedule.steps:
            figures = " ".join(f"{k} {v:.4f}" for k, v in job.evaluate().items())
            report(f"held out after {done}: {figures}")


def check_split(batch: int, rows: int) -> None:
    """Every process must have the same number of full pieces: one compiled shape, equal weights."""
    if batch % (rows * parallel.count()):
        raise SystemExit(
            f"--batch {batch} is no multiple of {parallel.count()} processes x --rows {rows}; "
            "change one of them"
        )


def check_length(tokens: float, step: int) -> None:
    """A run must have a step; `step` is its tokens."""
    if tokens < step:
        raise SystemExit(f"--tokens {tokens:g} is less than one step of {step}; give more")


def take_step(job: Job, optimiser: Optimiser, step: int, scale: float) -> float:
    """One optimiser step; returns this process's loss."""
    gradients = {name: torch.zeros_like(w) for name, w in optimiser.weights.items()}
    total = 0.0
    for loss, weight, relative in job.losses(step):
        loss.backward()
        if not math.isfinite(loss.item()):
            raise SystemExit(f"step {step}: the loss is {loss.item()}; not saved; lower the rates")
        found = {n: p.grad for n, p in optimiser.model.items() if p.grad is not None}
        if relative:
            weight *= min(1.0, length(gradients) / (length(found) + 1e-12))
        else:
            total += weight * loss.item()
        # Sum in float32: bf16 would lose the later, smaller contributions.
        for name, gradient in found.items():
            gradients[name].add_(gradient, alpha=weight)
            optimiser.model[name].grad = None
    parallel.average(gradients)
    optimiser.step(gradients, scale)
    return total


def length(gradients: dict[str, Tensor]) -> float:
    """The Euclidean length of all of them together."""
    squares = [gradient.float().square().sum() for gradient in gradients.values()]
    return float(torch.stack(squares).sum().sqrt())


def save(optimiser: Optimiser, model: Llama, step: int, file: Path) -> None:
    """Write a checkpoint that appears whole or not at all."""
    if parallel.rank() > 0:
        return
    partial = file.with_suffix(".partial")
    torch.save({"step": step, "shape": model.shape, "optimiser": optimiser.state()}, partial)
    os.replace(partial, file)


def resume(optimiser: Optimiser, model: Llama, file: Path) -> int:
    """Restore a checkpoint; the number of steps already done."""
    with torch.serialization.safe_globals([Shape]):
        saved = torch.load(file, weights_only=True, map_location="cpu")
    if saved["shape"] != model.shape:
        raise SystemExit(
            f"{file} holds {saved['shape']}, but this run is for {model.shape}; "
            "give the same sizes or another --out"
        )
    optimiser.restore(saved["optimiser"])
    report(f"resumed {file} at step {saved['step']}")
    return saved["step"]


def report(line: str) -> None:
    """One line in the log, from the first process only."""
    if parallel.rank() == 0:
        tqdm.write(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stdout)
        sys.stdout.flush()
