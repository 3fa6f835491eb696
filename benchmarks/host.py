"""Milliseconds per step outside the models: the engine around models that answer at once.

    python benchmarks/host.py [--vocab 4096] [--steps 300]

Thread CPU time, so that a busy neighbour core does not count; the minimum over five rounds.
"""

import argparse
import os
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from outrider import Limits, Sampling, verifiers
from outrider.drafters import Beam, DraftModel, HubTree, Paths, PromptLookup, Root
from outrider.engine import step
from outrider.engine.request import Request
from outrider.models.cache import SlotCache
from outrider.types import Nodes, Output

torch.set_num_threads(1)


class Instant:
    """A language model whose logits are ready: rows of one fixed table."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab_size, self.context, self.device = vocab, 1 << 20, torch.device("cpu")
        draw = torch.Generator().manual_seed(0)
        noise = torch.Generator().manual_seed(seed)
        shape = (1, 64, vocab)
        table = 3 * torch.randn(shape, generator=draw) + 0.7 * torch.randn(shape, generator=noise)
        self.table = table.bfloat16().float()  # as a CPU model in half precision answers

    def width(self, slots: int) -> int:
        return -(-slots // 128) * 128

    def open(self, rows: int, capacity: int, inputs: Any = None) -> SlotCache:
        return SlotCache(1, rows, capacity)

    def forward(self, cache: Any, nodes: Nodes, *, last: Any = None, taps: Any = ()):
        queries = nodes.tokens_BQ.shape[1]
        return Output(self.table[:, : queries if last is None else min(last, queries)])

    def keep(self, cache: Any, first_B: Any, path_BD: Any) -> None:
        """There is nothing in the cache."""


def time_step(
    drafter: Any, target: Instant, rule: Any, temperature: float, steps: int
) -> dict[str, float]:
    spent = {"propose": 0.0, "score": 0.0, "verify": 0.0, "commit": 0.0}
    batch = step.begin(
        target,
        drafter,
        [Request([1, 2, 3], Sampling(temperature, seed=1), Limits(1 << 19, (0,)))],
        steps * 8 + 256,
    )
    clock = time.thread_time
    for number in range(steps + 20):
        if number == 20:
            spent = dict.fromkeys(spent, 0.0)
        a = clock()
        draft = step.propose(drafter, batch)
        b = clock()
        scores = step.score(target, batch, draft)
        c = clock()
        verdict = step.verify(rule, batch, draft, scores)
        d = clock()
        batch, _ = step.commit(target, drafter, batch, draft, scores, verdict)
        e = clock()
        batch = batch._replace(
            reason_B=torch.zeros_like(batch.reason_B),
            context=batch.context._replace(bound=int(batch.context.length_B.max())),
        )
        for name, took in zip(spent, (b - a, c - b, d - c, e - d), strict=True):
            spent[name] += took
    return {name: 1e3 * total / steps for name, total in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    target, model = Instant(given.vocab, 1), Instant(given.vocab, 2)
    arms = {
        "root": Root(),
        "chain 4": DraftModel(model, (1,) * 4),
        "chain 5": DraftModel(model, (1,) * 5),
        "chain 5 coupled": DraftModel(model, (1,) * 5, coupled=True),
        "tree 3-2-1": DraftModel(model, (3, 2, 1)),
        "tree 3-2-2-1": DraftModel(model, (3, 2, 2, 1)),
        "RSD-S 3x4": Beam(model, 3, 4),
        "hub 3-2-2-1": HubTree(model, (3, 2, 2, 1)),
        "paths 3x4": Paths(model, 3, 4),
        "lookup 8": PromptLookup(8),
    }
    print(
        f"{'drafter':16} {'rule':12} {'T':>3}  propose  score  verify  commit   "
        f"sum (ms, V={given.vocab})"
    )
    for name, drafter in arms.items():
        for temperature in (0.0, 1.0):
            rule = (
                verifiers.get("match")
                if temperature == 0
                else verifiers.default(drafter.kinds, drafter.shapes[0].is_chain)
            )
            rounds = [time_step(drafter, target, rule, temperature, given.steps) for _ in range(5)]
            best = {key: min(r[key] for r in rounds) for key in rounds[0]}
            line = "  ".join(f"{best[key]:6.3f}" for key in best)
            print(
                f"{name:16} {rule.name:12} {temperature:3.0f}  {line}  {sum(best.values()):6.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
