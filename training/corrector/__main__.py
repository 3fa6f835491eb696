"""Train the corrector for so many minutes of one core.

    python -m training.corrector --data work/corpus --out work/runs/corrector --minutes 80

`--data` is a folder of `training.corpus`; the tokenizer is the shipped pair's. Started again with
the same arguments it goes on from `last.pt`; minutes count what was trained, over all starts.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from training.corrector.model import T5, Shape
from training.corrector.pairs import Batch, Batches, Pairs, read_texts
from training.loop import Term, report, take_step
from training.muon import Optimiser, Rates

TOKENIZER = Path("src/outrider/pair/target/tokenizer.json")


@dataclass(frozen=True)
class Fall:
    """The rate over a run that ends by the clock: rise by steps, stay, fall to zero."""

    seconds: float
    warmup: int
    flat: float

    def scale(self, step: int, seconds: float) -> float:
        """The rate after so many steps and seconds, as a share of its peak.

        >>> [Fall(100, 2, 0.5).scale(s, t) for s, t in ((0, 1), (9, 40), (20, 75), (30, 101))]
        [0.5, 1.0, 0.5, 0.0]
        """
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        left = (1 - seconds / self.seconds) / (1 - self.flat)
        return rise * min(1.0, max(0.0, left))


class Job:
    """What a step learns from: one batch; and figures on documents never trained on."""

    def __init__(self, model: T5, held_out: list[Batch]) -> None:
        self.model = model
        self.batch = held_out[0]
        self._held_out = held_out

    def losses(self, step: int) -> Iterator[Term]:
        yield Term(self._loss(self.batch), 1.0)

    def _loss(self, batch: Batch) -> torch.Tensor:
        logits = self.model(batch.sources_BS, batch.inputs_BT)
        targets = batch.targets_BT.flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=-100)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss, and the share of tokens and of whole texts that are right after right ones."""
        loss = tokens = right = texts = whole = 0.0
        for batch in self._held_out:
            asked = batch.targets_BT >= 0
            logits = self.model(batch.sources_BS, batch.inputs_BT).float()
            wrong = (logits.argmax(-1) != batch.targets_BT) & asked
            loss += F.cross_entropy(logits[asked], batch.targets_BT[asked], reduction="sum").item()
            tokens += asked.sum().item()
            right += (asked & ~wrong).sum().item()
            texts += len(wrong)
            whole += (~wrong.any(-1)).sum().item()
        return {"loss": loss / tokens, "tokens right": right / tokens, "texts right": whole / texts}


@dataclass
class Progress:
    """Where a run stands; with the optimiser's state all that a checkpoint holds."""

    pool: int = 0
    step: int = 0
    seconds: float = 0.0


def save(optimiser: Optimiser, shape: Shape, progress: Progress, file: Path) -> None:
    """Write a checkpoint that appears whole or not at all."""
    partial = file.with_suffix(".partial")
    state = {"progress": vars(progress), "shape": shape, "optimiser": optimiser.state()}
    torch.save(state, partial)
    os.replace(partial, file)


def resume(optimiser: Optimiser, shape: Shape, file: Path) -> Progress:
    """Restore a checkpoint."""
    with torch.serialization.safe_globals([Shape]):
        saved = torch.load(file, weights_only=True)
    if saved["shape"] != shape:
        raise SystemExit(
            f"{file} holds {saved['shape']}, but this run is for {shape}; "
            "give the same sizes or another --out"
        )
    optimiser.restore(saved["optimiser"])
    progress = Progress(**saved["progress"])
    report(f"resumed {file} at step {progress.step}, after {progress.seconds:.0f} seconds")
    return progress


def train(job: Job, optimiser: Optimiser, batches: Batches, fall: Fall, args) -> None:
    """Run until the time is over; checkpoints come at the ends of pools."""
    last = args.out / "last.pt"
    args.out.mkdir(parents=True, exist_ok=True)
    progress = resume(optimiser, job.model.shape, last) if last.exists() else Progress()
    started = time.monotonic() - progress.seconds
    saved = evaluated = time.monotonic()
    mean = math.nan
    while True:
        for batch in batches.of_pool(progress.pool):
            progress.seconds = time.monotonic() - started
            job.batch = batch
            loss = take_step(
                job, optimiser, progress.step, fall.scale(progress.step, progress.seconds)
            )
            mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
            progress.step += 1
            if progress.step % args.report_every == 0:
                report(f"step {progress.step} loss {mean:.4f} after {progress.seconds:.0f} seconds")
        progress.pool += 1
        done = progress.seconds >= fall.seconds
        now = time.monotonic()
        if done or now - evaluated > 60 * args.evaluate_minutes:
            figures = " ".join(f"{k} {v:.4f}" for k, v in job.evaluate().items())
            report(f"held out after {progress.step}: {figures}")
            evaluated = time.monotonic()
        if done or now - saved > 60 * args.save_minutes:
            progress.seconds = time.monotonic() - started
            save(optimiser, job.model.shape, progress, last)
            saved = time.monotonic()
        if done:
            return


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of training.corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--minutes", type=float, required=True, help="length of the run")
    for size, usual in vars(Shape()).items():
        parser.add_argument(f"--{size}", type=int, default=usual)
    parser.add_argument("--batch", type=int, default=4096, help="target tokens in a step")
    parser.add_argument("--pool", type=int, default=512, help="pairs sorted by length together")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=30, help="steps")
    parser.add_argument("--flat", type=float, default=0.4, help="share of the run before the fall")
    parser.add_argument("--report-every", type=int, default=20, help="steps")
    parser.add_argument("--save-minutes", type=float, default=3)
    parser.add_argument("--evaluate-minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    shape = Shape(**{size: getattr(args, size) for size in vars(Shape())})
    model = T5(shape)
    optimiser = Optimiser(model, Rates(args.muon_rate, args.adam_rate))
    model.to(torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    sets = {
        split: Batches(Pairs(read_texts(args.data, split), args.seed), tokenizer, args.batch, size)
        for split, size in (("train", args.pool), ("heldout", min(args.pool, 256)))
    }
    report(f"{sum(p.numel() for p in model.parameters()):,} parameters, {shape}")
    fall = Fall(60 * args.minutes, args.warmup, args.flat)
    job = Job(model, sets["heldout"].of_pool(0))
    train(job, optimiser, sets["train"], fall, args)


if __name__ == "__main__":
    main()
