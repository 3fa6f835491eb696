"""Train the target on the corpus, from scratch or from a checkpoint.

    python -m training.train --data corpus --out runs/target --tokens 60e6
    torchrun --nproc-per-node 2 -m training.train ...          # one process per core

A run is planned in tokens, not in time, so pausing it changes nothing. Started again with the
same arguments it continues from `<out>/last.pt`. The same seed and number of processes give the
same weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training import loop, parallel
from training.heldout_loss import mean_loss
from training.model import Llama, Shape, load
from training.muon import Optimiser, Rates
from training.own_loops import LENGTH, own_loops
from training.rollout import continue_text, prompts_from
from training.schedule import Schedule
from training.tokens import read_mixture, read_tokens
from training.unloop import Loops, anchored, loops, unlikelihood, written_loops

SIZES = ("layers", "width", "heads", "inner", "vocabulary")  # options that shape a new model
PROMPT, CONTINUATION, LOOP_TEXTS = 96, 160, 24  # of the greedy texts that are searched for loops


class TargetJob:
    """Next-token loss on the corpus and, late in the run, unlikelihood of loops."""

    def __init__(self, model: Llama, data: Path, args: argparse.Namespace, schedule: Schedule):
        self.model, self.args, self.schedule = model, args, schedule
        self.device = next(model.parameters()).device
        self.reference: Llama | None = None
        if args.unloop and args.unloop_reference:
            reference = load(args.unloop_reference, model.shape.context).to(self.device)
            if reference.shape.vocabulary != model.shape.vocabulary:
                raise SystemExit(
                    f"--unloop-reference {args.unloop_reference} has a vocabulary of "
                    f"{reference.shape.vocabulary}, the model {model.shape.vocabulary}; give one "
                    "with the same tokenizer"
                )
            self.reference = reference.to(model.model.norm.weight.dtype).requires_grad_(False)
        context = model.shape.context
        self.windows = read_mixture(data, context, args.seed)
        self.heldout = read_tokens(data / "heldout.bin")
        self.unloop_from = int(args.unloop_from * schedule.steps)
        self._penalty = 0.0
        self._own: Loops | None = None
        self.newlines = read_tokens(data / "newlines.bin")
        self._loss = torch.compile(next_token_loss, dynamic=False)
        models = [model, self.reference] if self.reference else [model]
        for layer in [layer for each in models for layer in each.model.layers]:
            # One layer compiled serves all of them: seconds to compile, not minutes.
            layer.compile(dynamic=False)

    def losses(self, step: int) -> Iterable[loop.Term]:
        for numbers, weight in my_share(step, self.args.batch, self.args.rows):
            # What is learned last is remembered best, and the library is the text in question.
            late = step >= self.schedule.fall_from
            inputs, targets = self.windows.batch(numbers, self.args.library_share * late)
            hidden = self.model.body(inputs.to(self.device))
            embedding = self.model.model.embed_tokens.weight
            yield loop.Term(self._loss(hidden, embedding, targets.to(self.device)), weight)
        if self.args.unloop > 0 and step >= self.unloop_from:
            yield self._unloop(step)

    def _unloop(self, step: int) -> loop.Term:
        """A few texts that loop; their gradient is held to a share of the corpus's."""
        looping = Loops(*(part.to(self.device) for part in self._looping(step)))
        logits = self.model(looping.texts[:, :-1])
        if self.reference is None:
            penalty = unlikelihood(logits, *looping)
        else:
            with torch.no_grad():
                wanted = self.reference(looping.texts[:, :-1])
            penalty = anchored(logits, wanted, *looping)
        self._penalty += 0.05 * (penalty.item() - self._penalty)
        return loop.Term(penalty, self.args.unloop, relative=True)

    def _looping(self, step: int) -> Loops:
        """The model's own, as far as there are any; else written ones."""
        args = self.args
        seed = parallel.seed_of(args.seed, step)
        # Written anew after each checkpoint, so that a run that was stopped has the same texts.
        if self._own is None or step % args.save_every == 0:
            source = (self.windows.corpus, self.windows.library)[step // args.save_every % 2]
            count = args.unloop_texts
            self._own = own_loops(self.model, source.tokens, self.newlines, count, seed)
        found, rows = len(self._own.texts), args.unloop_rows
        own = [(step * rows + row) % found for row in range(min(rows, found))]
        parts = [Loops(self._own.texts[own], self._own.marks[own])]
        if len(own) < rows:
            missing = rows - len(own)
            lines = self.windows.corpus.tokens
            parts += [written_loops(lines, self.newlines, missing, LENGTH, seed)]
        return Loops(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def evaluate(self) -> dict[str, float]:
        context = self.model.shape.context
        rows, every = self.args.rows, self.args.evaluate_share
        loss = mean_loss(self.model, self.heldout, context, rows, every, self.device)
        if not self.args.unloop:
            return {"loss": loss}
        prompts = prompts_from(self.heldout, LOOP_TEXTS, PROMPT, seed=0)
        texts = continue_text(self.model, prompts, CONTINUATION, temperature=0)
        looping = [loops(row[PROMPT:].tolist()) for row in texts]
        return {
            "loss": loss,
            "greedy texts that loop": sum(looping) / len(looping),
            "penalty": self._penalty,
        }


def next_token_loss(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy from the last hidden states, compiled as one piece."""
    logits = F.linear(hidden, embedding).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten())


def my_share(step: int, batch: int, rows: int) -> Iterator[tuple[range, float]]:
    """This process's window numbers in a step, `rows` at a time, each with its share of them."""
    each = batch // parallel.count()
    first = step * batch + parallel.rank() * each
    for start in range(first, first + each, rows):
        piece = range(start, min(start + rows, first + each))
        yield piece, len(piece) / each


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with *.bin")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    # Not `--start`: torchrun would take it for an abbreviation of its `--start-method`.
    parser.add_argument("--initial", type=Path, help="checkpoint (.pt or folder) to begin with")
    for size in SIZES:
        parser.add_argument(f"--{size}", type=int, help=f"{getattr(Shape(), size)} if not given")
    parser.add_argument("--context", type=int, default=Shape().context)
    parser.add_argument("--tokens", type=float, required=True, help="length of the run")
    parser.add_argument("--batch", type=int, default=16, help="windows in a step, all processes")
    parser.add_argument("--rows", type=int, default=8, help="windows computed at once")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=30, help="steps")
    parser.add_argument("--flat", type=float, default=0.7, help="share of the run before the fall")
    parser.add_argument(
        "--unloop", type=float, default=0.0, help="loop penalty's gradient to the corpus's"
    )
    parser.add_argument("--unloop-from", type=float, default=0.7, help="share of the run before it")
    parser.add_argument("--library-share", type=float, default=0.5, help="in the fall")
    parser.add_argument("--unloop-rows", type=int, default=4, help="looping texts in a step")
    parser.add_argument(
        "--unloop-texts", type=int, default=80, help="greedy texts searched for them at each save"
    )
    parser.add_argument(
        "--unloop-reference", type=Path, help="checkpoint whose law says what comes instead"
    )
    parser.add_argument("--save-every", type=int, default=25, help="steps")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps")
    parser.add_argument("--evaluate-share", type=int, default=8, help="use each n-th window")
    parser.add_argument("--float32", action="store_true", help="compute in float32, not bf16")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def shape(args: argparse.Namespace) -> Shape:
    """The sizes asked for, and of those not named the usual ones."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    return Shape(context=args.context, **given)


def check(args: argparse.Namespace) -> None:
    """Refuse before the first step what would go wrong hours later."""
    sized = [f"--{name}" for name in SIZES if getattr(args, name) is not None]
    if args.initial and sized:
        raise SystemExit(
            f"{' '.join(sized)} does nothing with --initial, whose checkpoint has its sizes "
            "already; leave one of the two out"
        )
    loop.check_split(args.batch, args.rows)
    loop.check_length(args.tokens, args.batch * args.context)
    if args.unloop_reference and not args.unloop:
        raise SystemExit("--unloop-reference does nothing without --unloop; give both or neither")
    if not args.unloop:
        return
    if min(args.unloop_rows, args.unloop_texts) < 1:
        raise SystemExit(
            f"--unloop needs texts; got --unloop-rows {args.unloop_rows} and --unloop-texts "
            f"{args.unloop_texts}; give 1 or more"
        )
    if args.context < PROMPT + CONTINUATION:
        raise SystemExit(
            f"--unloop needs texts of {PROMPT + CONTINUATION} tokens; got --context "
            f"{args.context}; lengthen it or leave --unloop out"
        )


def main() -> None:
    args = arguments()
    device = parallel.start()
    check(args)
    torch.manual_seed(args.seed)
    model = (load(args.initial, args.context) if args.initial else Llama(shape(args))).to(device)
    optimiser = Optimiser(model, Rates(args.muon_rate, args.adam_rate))
    model.to(torch.float32 if args.float32 else torch.bfloat16)
    steps = int(args.tokens / (args.batch * model.shape.context))
    schedule = Schedule(steps, args.warmup, args.flat)
    job = TargetJob(model, args.data, args, schedule)
    pace = loop.Pace(args.out, args.save_every, 10, args.evaluate_every)
    loop.report(f"{steps} steps, {sum(p.numel() for p in model.parameters()):,} parameters")
    loop.report(str(model.shape))
    loop.train(job, optimiser, schedule, pace)
    parallel.stop()


if __name__ == "__main__":
    main()
