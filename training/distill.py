"""Distil a draft from a target, for acceptance: forward KL first, then -log of the overlap.

    python -m training.distill --data corpus --target runs/target/last.pt --layers 0,23 \\
        --out runs/draft --tokens 8e6

The draft begins as the target's embedding and chosen layers (`--layers`) or as another draft
(`--initial`). In the second stage part of every batch is text the target wrote itself, because
that is what a draft meets in use. The target has many more layers than the draft, so its reading of
a text is kept in memory (2 bytes x width for each token) and the text used `--times` times.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training import loop, parallel
from training.heldout_loss import windows
from training.model import Llama, from_state, load
from training.muon import Optimiser, Rates
from training.overlap import forward_kl, overlap, overlap_loss
from training.rollout import continue_text, prompts_from
from training.schedule import Schedule
from training.tokens import read_mixture, read_tokens
from training.train import my_share

PROMPT = 128  # corpus tokens before the target writes on
WRITING_TEMPERATURES = (1.0, 0.6)  # in turn; the ones that the result is measured at
OWN_TIMES = 6  # how often one of them is used: writing is dearer than reading


class Reading(NamedTuple):
    """Texts `[rows, context]` and the target's last hidden states for them."""

    texts: Tensor
    hidden: Tensor


class DraftJob:
    """Bring the draft's law close to the target's, on the corpus and on the target's own text."""

    def __init__(
        self, draft: Llama, target: Llama, data: Path, args: argparse.Namespace, steps: int
    ):
        self.model, self.target, self.args = draft, target, args
        self.device = draft.cos.device
        self.kl_until = int(args.kl * steps)
        self.fresh_steps = math.ceil(steps / args.times)
        self.windows = read_mixture(data, args.context, args.seed)
        self.heldout = read_tokens(data / "heldout.bin")
        pieces = args.batch // (args.rows * parallel.count())
        own_used = (steps - self.kl_until) * pieces * args.own
        self.own_pools = math.ceil(own_used / (OWN_TIMES * args.pool))
        self._kept: dict[tuple[str, int], Reading] = {}
        self._kl = torch.compile(kl_from_hidden, dynamic=False)
        self._overlap = torch.compile(overlap_from_hidden, dynamic=False)
        for layer in [*draft.model.layers, *target.model.layers]:
            layer.compile(dynamic=False)

    def losses(self, step: int) -> Iterable[loop.Term]:
        late = step >= self.kl_until
        pieces = list(my_share(step % self.fresh_steps, self.args.batch, self.args.rows))
        for place, (numbers, weight) in enumerate(pieces):
            texts, hidden = self._corpus(numbers)
            if late and self.args.own > 0:
                used = (step - self.kl_until) * len(pieces) + place
                own = self._own(used * self.args.own)
                texts = torch.cat([texts[: -self.args.own], own.texts])
                hidden = torch.cat([hidden[: -self.args.own], own.hidden])
            compute = self._overlap if late else self._kl
            loss = compute(
                hidden,
                self.target.model.embed_tokens.weight,
                self.model.body(texts),
                self.model.model.embed_tokens.weight,
            )
            yield loop.Term(loss, weight)

    def _corpus(self, numbers: range) -> Reading:
        """Windows of the corpus, as the target reads them."""
        key = ("corpus", numbers.start)
        if key not in self._kept:
            texts, _ = self.windows.batch(numbers, self.args.library_share)
            reading = self._read(texts.to(self.device))
            if self.args.times == 1:
                return reading
            self._kept[key] = reading
        return self._kept[key]

    def _own(self, first: int) -> Reading:
        """The next texts the target wrote; which they are depends on `first` alone."""
        number, place = divmod(first % (self.own_pools * self.args.pool), self.args.pool)
        key = ("own", number)
        if key not in self._kept:
            seed = parallel.seed_of(self.args.seed, number)
            temperature = WRITING_TEMPERATURES[number % len(WRITING_TEMPERATURES)]
            source = (self.windows.corpus, self.windows.library)[number // 2 % 2]
            prompts = prompts_from(source.tokens, self.args.pool, PROMPT, seed)
            length = self.args.context - PROMPT
            texts = continue_text(self.target, prompts, length, temperature, seed)
            parts = [self._read(part) for part in texts.split(self.args.rows)]
            self._kept[key] = Reading(*(torch.cat(column) for column in zip(*parts, strict=True)))
        return Reading(*(part[place : place + self.args.own] for part in self._kept[key]))

    @torch.no_grad()
    def _read(self, texts: Tensor) -> Reading:
        return Reading(texts, self.target.body(texts))

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Alpha on held-out text at three temperatures."""
        found: dict[str, list[float]] = {}
        for inputs, _ in windows(
            self.heldout, self.args.context, self.args.rows, self.args.evaluate_share
        ):
            inputs = inputs.to(self.device)
            target_logits, draft_logits = self.target(inputs), self.model(inputs)
            for t in (1.0, 0.6, 0.0):
                value = overlap(target_logits, draft_logits, t).mean().item()
                found.setdefault(f"alpha T={t:g}", []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}


def kl_from_hidden(
    target_hidden: Tensor, target_embedding: Tensor, hidden: Tensor, embedding: Tensor
) -> Tensor:
    """`forward_kl` from last hidden states, in one piece for the compiler."""
    return forward_kl(F.linear(target_hidden, target_embedding), F.linear(hidden, embedding))


def overlap_from_hidden(
    target_hidden: Tensor, target_embedding: Tensor, hidden: Tensor, embedding: Tensor
) -> Tensor:
    """`overlap_loss` at T = 1 and 0.6 from last hidden states."""
    logits = F.linear(target_hidden, target_embedding), F.linear(hidden, embedding)
    return overlap_loss(*logits, temperatures=[1.0, 0.6])


def from_layers(target: Llama, layers: list[int]) -> Llama:
    """A shallow model made of some of the target's layers and its embedding.

    Starting here rather than from noise is worth about 0.2 of alpha in the same time.
    """
    state = {k: v for k, v in target.state_dict().items() if ".layers." not in k}
    for place, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        for name, value in target.state_dict().items():
            if name.startswith(prefix):
                state[f"model.layers.{place}.{name.removeprefix(prefix)}"] = value
    return from_state(replace(target.shape, layers=len(layers)), state)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with *.bin")
    parser.add_argument("--target", type=Path, required=True, help="checkpoint (.pt or folder)")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    begin = parser.add_mutually_exclusive_group(required=True)
    begin.add_argument("--initial", type=Path, help="draft to continue from (.pt or folder)")
    begin.add_argument("--layers", help="target layers to copy, e.g. 0,23")
    parser.add_argument("--tokens", type=float, required=True, help="length of the run")
    parser.add_argument("--kl", type=float, default=0.3, help="share of the run with forward KL")
    parser.add_argument("--times", type=int, default=4, help="how often a window is used")
    parser.add_argument("--library-share", type=float, default=0.5, help="of the windows")
    parser.add_argument("--own", type=int, default=2, help="own texts among each --rows windows")
    parser.add_argument("--pool", type=int, default=32, help="own texts written at a time")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="windows in a step, all processes")
    parser.add_argument("--rows", type=int, default=8, help="windows computed at once")
    parser.add_argument("--muon-rate", type=float, default=0.01)
    parser.add_argument("--adam-rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--flat", type=float, default=0.4, help="share of the run before the fall")
    parser.add_argument("--save-every", type=int, default=25, help="steps")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps")
    parser.add_argument("--evaluate-share", type=int, default=16, help="use each n-th window")
    parser.add_argument("--float32", action="store_true", help="compute in float32, not bf16")
    parser.add_argument("--seed", type=int, default=2)
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """Refuse before the first step what would go wrong later."""
    loop.check_split(args.batch, args.rows)
    loop.check_length(args.tokens, args.batch * args.context)
    if args.times < 1:
        raise SystemExit(f"--times must be 1 or more; got {args.times}")
    if not args.own:
        return
    if args.context <= PROMPT:
        raise SystemExit(
            f"own texts follow prompts of {PROMPT} tokens; got --context {args.context}; lengthen "
            "it or give --own 0"
        )
    if args.own >= args.rows or args.pool % args.own or args.pool % args.rows:
        raise SystemExit(
            f"--own {args.own} must be less than --rows {args.rows}, and both must divide "
            f"--pool {args.pool}"
        )


def main() -> None:
    args = arguments()
    device = parallel.start()
    check(args)
    dtype = torch.float32 if args.float32 else torch.bfloat16
    target = load(args.target, args.context).to(device).eval().requires_grad_(False)
    if args.initial:
        draft = load(args.initial, args.context).to(device)
    else:
        draft = from_layers(target, [int(n) for n in args.layers.split(",")]).to(device)
    optimiser = Optimiser(draft, Rates(args.muon_rate, args.adam_rate))
    target.to(dtype)
    draft.to(dtype).requires_grad_(True)
    steps = int(args.tokens / (args.batch * args.context))
    schedule = Schedule(steps, args.warmup, args.flat)
    job = DraftJob(draft, target, args.data, args, steps)
    loop.report(f"{steps} steps, {sum(p.numel() for p in draft.parameters()):,} parameters")
    pace = loop.Pace(args.out, args.save_every, 10, args.evaluate_every)
    loop.train(job, optimiser, schedule, pace)
    parallel.stop()


if __name__ == "__main__":
    main()
