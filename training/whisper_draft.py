"""Distil a draft for Whisper from recorded laws: `python -m training.whisper_draft`.

    python -m training.whisper_draft --model whisper-base --data work/whisper/spoken \\
        --ids work/whisper/ids.safetensors --out work/whisper/draft --minutes 60

Forward KL first, then -log of the overlap at temperatures 1 and 0.5 as in `training.distill`. The
learning rate falls to nothing at the end of `--minutes` (or `--steps`), of this and earlier runs
together: a run that was stopped goes on from its checkpoint, with other ids if they were changed.
Shards that appear meanwhile are read.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from training.muon import Optimiser, Rates
from training.whisper_laws import Spoken, windows
from training.whisper_model import Draft, load_weights, save

OVERLAPS = (1.0, 0.5)  # temperatures of the second part


class Shards:
    """The windows of a folder, in a new random order each time round."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.dice = folder, random.Random(seed)
        self.read: dict[Path, list[Spoken]] = {}
        self.update()

    def update(self) -> None:
        for shard in sorted(self.folder.glob("*.safetensors")):
            if shard not in self.read:
                self.read[shard] = list(windows(shard))

    def __iter__(self) -> Iterator[Spoken]:
        while True:
            self.update()
            spoken = [window for part in self.read.values() for window in part]
            self.dice.shuffle(spoken)
            yield from spoken


def loss_of(draft: Draft, window: Spoken, late: bool) -> Tensor:
    """Mean over the positions of a window's transcripts."""
    own = draft(window.tokens_N, window.position_N, window.row_N, window.states_SD)
    own_CK = draft.logits(own[window.counted_N]).float()
    target_CK = draft.logits(window.hidden_ND[window.counted_N].to(own.dtype)).float()
    total_C1 = window.total_N[window.counted_N, None]
    if not late:
        # The target's law over all ids: positions whose ids the head lacks weigh less.
        return -((target_CK - total_C1).exp() * own_CK.log_softmax(-1)).sum(-1).mean()
    losses = []
    for temperature in OVERLAPS:
        law = (target_CK / temperature).softmax(-1)
        overlap = torch.minimum(law, (own_CK / temperature).softmax(-1)).sum(-1)
        losses.append(-overlap.clamp_min(1e-6).log().mean())
    return torch.stack(losses).mean()


def take_step(
    draft: Draft, optimiser: Optimiser, batch: list[Spoken], scale: float, late: bool
) -> float:
    """One step on some windows; their mean loss."""
    total = 0.0
    with torch.autocast("cpu", torch.bfloat16):  # one context: weights are cast once a step
        for window in batch:
            loss = loss_of(draft, window, late) / len(batch)
            loss.backward()
            total += loss.item()
    gradients = {name: p.grad for name, p in optimiser.model.items() if p.grad is not None}
    length = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    for gradient in gradients.values():
        gradient.mul_(1 / length.clamp_min(1.0))
    optimiser.step(gradients, scale)
    draft.zero_grad()
    return total


def train(draft: Draft, shards: Shards, args: argparse.Namespace) -> None:
    rates = Rates(muon=args.muon_rate, adam=args.adam_rate, weight_decay=0.01)
    optimiser = Optimiser(draft, rates)
    checkpoint = args.out / "last.pt"
    spent, step, mean, shown = 0.0, 0, None, time.monotonic()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        optimiser.restore(saved["optimiser"])
        spent, step = saved["seconds"], saved["step"]
    stream, started, kept = iter(shards), time.monotonic() - spent, time.monotonic()
    while (share := run_share(args, time.monotonic() - started, step)) < 1:
        scale = min(1.0, (step + 1) / 20, (1 - share) / (1 - args.flat))
        batch = [next(stream) for _ in range(args.batch)]
        loss = take_step(draft, optimiser, batch, scale, late=share > args.kl)
        mean = loss if mean is None else 0.95 * mean + 0.05 * loss
        step += 1
        now = time.monotonic()
        if now - shown > 60:
            count = sum(map(len, shards.read.values()))
            print(
                f"{time.strftime('%H:%M:%S')} step {step} loss {mean:.3f} of {count} windows, "
                f"{share:.0%}",
                flush=True,
            )
            shown = now
        if now - kept > 240:
            keep(draft, optimiser, now - started, step, args)
            kept = now
    keep(draft, optimiser, time.monotonic() - started, step, args)
    print(f"{step} steps")


def run_share(args: argparse.Namespace, seconds: float, step: int) -> float:
    """How much of the run is over."""
    return step / args.steps if args.steps else seconds / (60 * args.minutes)


def keep(
    draft: Draft, optimiser: Optimiser, seconds: float, step: int, args: argparse.Namespace
) -> None:
    """A checkpoint to go on from, and the draft as it is."""
    partial = args.out / "last.partial"
    torch.save({"optimiser": optimiser.state(), "seconds": seconds, "step": step}, partial)
    partial.replace(args.out / "last.pt")
    save(draft, args.of, {}, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="the target's folder")
    parser.add_argument("--of", default="openai/whisper-base", help="the target's name")
    parser.add_argument("--data", type=Path, required=True, help="shards of whisper_record")
    parser.add_argument("--ids", type=Path, required=True, help="what whisper_head wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", default="0,5", help="of the target's decoder")
    parser.add_argument("--start", type=Path, help="a draft whose weights to begin with")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, help="in all, instead of minutes")
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--muon-rate", type=float, default=0.01)
    parser.add_argument("--adam-rate", type=float, default=1e-3)
    parser.add_argument("--flat", type=float, default=0.3, help="share before the rate falls")
    parser.add_argument("--kl", type=float, default=0.7, help="share trained by forward KL")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    target = WhisperForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32)
    layers = [int(layer) for layer in args.layers.split(",")]
    draft = Draft(target, layers, load_file(args.ids)["ids"])
    if args.start:
        load_weights(draft, args.start)
    del target
    draft.train()
    train(draft, Shards(args.data, args.seed), args)


if __name__ == "__main__":
    main()
