"""What a step takes outside the models.

    python benchmarks/host.py [--vocab 4096] [--steps 300]   # around models that answer at once
    python benchmarks/host.py share [--rows 1 8 16]          # its share, around the shipped pair
    python benchmarks/host.py recall SMOLLM2 [--rows 1 8]    # what `recall` adds to a plain step
    python benchmarks/host.py layers SMOLLM2 [--rows 1 8]    # all layers as one call or in parts

Thread CPU time, so that a busy neighbour core does not count; the minimum over several rounds.
"""

import argparse
import contextlib
import copy
import json
import os
import time
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import outrider
from outrider import Engine, SamplingParams, StopConditions, verifiers
from outrider.drafters import Beam, DraftModel, HubTree, Paths, PromptLookup, Root
from outrider.engine import step
from outrider.engine.request import Request
from outrider.engine.speculation_policy import Adaptive, FixedLength
from outrider.models.cache import SlotCache
from outrider.models.prefill import causal
from outrider.shipped import shipped
from outrider.types import Nodes, Output

torch.set_num_threads(1)
STEPS, MANY = 24, StopConditions(256)  #: of the shipped pair, in each round


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

    def forward(self, cache: Any, nodes: Nodes, *, last: Any = None, aux_layers: Any = ()):
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
        [Request([1, 2, 3], SamplingParams(temperature, seed=1), StopConditions(1 << 19, (0,)))],
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


def share(rows: int, temperature: float, depth: int, rounds: int = 5) -> None:
    """A line: milliseconds of a step of the shipped pair, and its share outside both models' calls.

    The step that reads the prompts is left out, and rows are all under way in every other.
    """
    pair = outrider.load(
        dtype="bfloat16", threads=1, pack_weights=True, num_speculative_tokens=depth
    )
    requests = begun(pair, rows, temperature)
    whole, inside = min(spent(pair.engine, requests) for _ in range(rounds))
    print(
        f"{rows:2d} rows, chain of {depth}, T = {temperature:g}: {whole:.2f} ms a step, "
        f"{whole - inside:.2f} of them outside both models: {1 - inside / whole:.1%}",
        flush=True,
    )


def above_plain(target: str, rows: int, rounds: int = 7) -> None:
    """A line for each temperature: milliseconds of a step outside a model, plain and with `recall`.

    Arms take turns; "at rest" is a planner that never drafts, which reads and keeps all the same.
    """
    recall = outrider.load(target, drafter="recall", dtype="bfloat16", threads=1, pack_weights=True)
    model, drafter, costs = recall.engine.target, recall.engine.drafter, recall.engine.priced(rows)
    arms = {
        "plain": Engine(model, Root(), "match"),
        "recall": Engine(model, drafter, "match", Adaptive(), costs=costs),
        "at rest": Engine(model, drafter, "match", FixedLength(0)),
    }
    for temperature in (0.0, 0.7):
        requests = begun(recall, rows, temperature)
        outside = dict.fromkeys(arms, 1e9)
        for _ in range(rounds):
            for name, engine in arms.items():
                whole, inside = spent(engine, requests)
                outside[name] = min(outside[name], whole - inside)
        plain = outside.pop("plain")
        told = ", ".join(f"{name} {took - plain:.2f} more" for name, took in outside.items())
        print(
            f"{rows:2d} rows, V = {model.vocab_size}, T = {temperature:g}: {plain:.2f} ms a step "
            f"outside the model, {told}",
            flush=True,
        )


def layers(target: str, rows: int, rounds: int = 24) -> None:
    """A line: milliseconds of a model's call behind 200 tokens, by turns as one and in parts."""
    model = outrider.load(target, drafter="none", threads=1).engine.target
    apart = copy.copy(model)
    apart.runner = copy.copy(model.runner)
    apart.runner.whole = None
    at = torch.arange(201).expand(rows, -1)
    least = {"as one call": 1e9, "one by one": 1e9}
    with torch.inference_mode():
        cache = model.open(rows, 512)
        model.forward(cache, causal(at[:, :200] + 5, at[:, :200], 256), last=1)
        nodes = causal(at[:, 200:] + 5, at[:, 200:], 256)
        for _ in range(rounds):
            for name, each in zip(least, (model, apart), strict=True):
                started = time.thread_time()
                for _ in range(4):
                    each.forward(cache, nodes)
                least[name] = min(least[name], 1e3 * (time.thread_time() - started) / 4)
    told = ", ".join(f"{name} {took:.2f} ms" for name, took in least.items())
    print(f"{rows:2d} rows, {model.runner.layers} layers {told}", flush=True)


def begun(speculator: Any, rows: int, temperature: float) -> list[Request]:
    """Requests that begin with held-out prompts of the shipped pair."""
    prompts = [json.loads(line)["prompt"] for line in shipped("heldout_prompts.jsonl").open()]
    return [
        Request(
            speculator.tokenizer(text)["input_ids"][:64],
            SamplingParams(temperature, seed=row),
            MANY,
        )
        for row, text in enumerate(prompts[:rows])
    ]


def spent(engine: Engine, requests: list[Request]) -> tuple[float, float]:
    """Milliseconds of a step, and those of them inside the calls of its models."""
    called = 0.0

    def clocked(forward: Any) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            nonlocal called
            started = time.thread_time()
            try:
                return forward(*given, **named)
            finally:
                called += time.thread_time() - started

        return timed

    models = {type(engine.target)}
    if isinstance(engine.drafter, DraftModel):
        models.add(type(engine.drafter.model))
    with contextlib.ExitStack() as patches:
        for kind in models:
            patches.enter_context(mock.patch.object(kind, "forward", clocked(kind.forward)))
        run = outrider.EngineRun(engine, len(requests), 512)
        run.submit_all(requests)
        run.step()
        called, started = 0.0, time.thread_time()
        for _ in range(STEPS):
            run.step()
        return 1e3 * (time.thread_time() - started) / STEPS, 1e3 * called / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", nargs="?", choices=["steps", "share", "recall", "layers"], default="steps"
    )
    parser.add_argument("target", nargs="?", help="of recall and layers: a folder or a file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    if given.what == "share":
        for rows in given.rows:
            for temperature in (0.0, 1.0):
                share(rows, temperature, given.depth)
        return
    if given.what in ("recall", "layers"):
        for rows in given.rows:
            (above_plain if given.what == "recall" else layers)(given.target, rows)
        return
    target, model = Instant(given.vocab, 1), Instant(given.vocab, 2)
    arms = {
        "none": Root(),
        "chain 4": DraftModel(model, (1,) * 4),
        "chain 5": DraftModel(model, (1,) * 5),
        "chain 5 coupled": DraftModel(model, (1,) * 5, shared_noise=True),
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
