"""Texts that are recorded once and charged the costs of steps: what `planner.py replay` does."""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import outrider
from outrider import DraftModel, Engine, Root, SamplingParams, StopConditions
from outrider.costs import Costs, Curve
from outrider.engine.batch import begin
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.engine.speculation_policy import Adaptive, BatchView, PlannedRow, StepReport
from outrider.shipped import shipped
from outrider.types import PLAIN, DraftShape

DEEPEST = 12
FIXED = (1, 2, 3, 4, 6, 8, 12)
DEAR, BAD = 0.3, 0.35
CHAIN = [*(DraftShape(d, d + 1, d, True) for d in range(DEEPEST, 0, -1)), PLAIN]


class Goal(NamedTuple):
    """Something to reach."""

    name: str
    value: float
    least: float

    def __str__(self) -> str:
        holds = "holds" if self.value >= self.least else "is missed"
        return f"{self.name}: {self.value:.3f}, at least {self.least:g}: {holds}"


def prompts(count: int) -> list[str]:
    """Held-out prompts of the shipped pair."""
    lines = shipped("heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"].rstrip() for line in lines][:count]


def recorded(pair: Any, count: int, tokens: int, temperature: float) -> list[list[int]]:
    """For each prompt and position: how many of the draft's next tokens are the text's own."""
    target, draft = pair.engine.target, pair.engine.drafter.model
    texts = [pair.tokenizer(prompt)["input_ids"] for prompt in prompts(count)]
    rows = [SamplingParams(temperature, seed=row) for row in range(count)]
    whole = [list(ids) for ids in texts]
    run = Engine(target, Root(), "match").run(texts, rows, StopConditions(tokens + DEEPEST))
    for block in run:
        whole[block.request_id] += block.token_ids
    drafter = DraftModel(draft, (1,) * DEEPEST, shared_noise=True)
    requests = [Request(ids, how, StopConditions()) for ids, how in zip(texts, rows, strict=True)]
    capacity = -(-(max(map(len, whole)) + 2 * DEEPEST) // 128) * 128
    right: list[list[int]] = [[] for _ in texts]
    with torch.inference_mode():
        batch = begin(target, drafter, requests, capacity)
        context = batch.context
        for row, ids in enumerate(whole):
            context.tokens_BL[row, : len(ids)] = torch.tensor(ids)
        for ahead in range(tokens):
            here = context._replace(length_B=context.length_B + ahead, bound=context.bound + ahead)
            drafted = drafter.propose(batch.memory, here, drafter.shapes[0]).tokens_BN[:, 1:]
            for row, guesses in enumerate(drafted.tolist()):
                start = len(texts[row]) + ahead
                true = whole[row][start : start + DEEPEST]
                if len(true) == DEEPEST:  # a text may have come to the end of the context
                    right[row].append(kept(guesses, true))
    return right


def kept(guesses: Sequence[int], true: Sequence[int]) -> int:
    """How many guesses are right before the first that is not."""
    wrong = (at for at, (a, b) in enumerate(zip(guesses, true, strict=True)) if a != b)
    return next(wrong, len(true))


def worse(right: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same of a draft whose right tokens are wrong with a chance of BAD."""
    draws = random.Random(1)

    def thinned(count: int) -> int:
        return next((at for at in range(count) if draws.random() < BAD), count)

    return [[thinned(count) for count in row] for row in right]


def dearer(costs: Costs) -> Costs:
    """The same where every drafted token costs DEAR plain steps more."""

    def more(curve: Curve) -> Curve:
        plain = curve.times[0]
        each = zip(curve.at, curve.times, strict=True)
        return Curve(curve.at, tuple(ms + DEAR * plain * (n - 1) for n, ms in each))

    times = {rows: {at: more(c) for at, c in by.items()} for rows, by in costs.times.items()}
    return replace(costs, times=times)


def fixed(right: Sequence[int], costs: Costs, depth: int, start: int) -> float:
    """Milliseconds of a text with as many drafted tokens in every step."""
    at, took = 0, 0.0
    while at < len(right):
        took += costs.milliseconds(depth + 1, 1, start + at)
        at += min(right[at], depth) + 1
    return took


def planned(right: Sequence[int], costs: Costs, start: int, sizes: dict[int, int]) -> float:
    """Milliseconds of a text that the planner sizes the drafts of."""
    planner, at, took = Adaptive(), 0, 0.0
    session = planner.open(CHAIN, costs)
    request = Request([1] * start, SamplingParams(0), StopConditions(len(right)))
    while at < len(right):
        shape = planner.plan(session, BatchView([PlannedRow(0, request, start + at)]))
        sizes[shape.max_depth] = sizes.get(shape.max_depth, 0) + 1
        took += costs.milliseconds(shape.max_nodes, 1, start + at)
        got = min(right[at], shape.max_depth)
        block = StepOutput(0, [1] * (got + 1), got, None, shape.max_depth)
        session = planner.learn(session, StepReport([block], shape.max_nodes, shape.max_depth))
        at += got + 1
    return took


def replay(given: argparse.Namespace) -> list[Goal]:
    """Every scenario at both temperatures."""
    count, tokens = (6, 96) if given.quick else (given.count, given.tokens)
    pair = outrider.load(dtype=given.dtype, threads=1, pack_weights=True)
    measured = pair.engine.costs
    assert measured is not None
    starts = [len(pair.tokenizer(prompt)["input_ids"]) for prompt in prompts(count)]
    goals: list[Goal] = []
    keep = None if given.keep is None else Path(given.keep)
    texts: dict[str, list[list[int]]] = {}
    if keep is not None and keep.exists():
        texts = json.loads(keep.read_text())
    for temperature in (0.0, 1.0):
        name = f"T = {temperature:g}, {count} prompts of {tokens} tokens"
        if name not in texts:
            texts[name] = recorded(pair, count, tokens, temperature)
            if keep is not None:
                keep.write_text(json.dumps(texts))
        right = texts[name]
        for scenario in ("shipped", "dear", "bad", "bad and dear"):
            some = worse(right) if "bad" in scenario else right
            costs = dearer(measured) if "dear" in scenario else measured
            goals += scored(f"{name}, {scenario}", some, costs, starts)
    return goals


def scored(
    name: str, right: Sequence[Sequence[int]], costs: Costs, starts: Sequence[int]
) -> list[Goal]:
    """One scenario: a line of speeds over plain decoding, and its goals."""
    each = list(zip(right, starts, strict=True))
    plain = [fixed(row, costs, 0, start) for row, start in each]
    lengths = {d: [fixed(row, costs, d, start) for row, start in each] for d in FIXED}
    sizes: dict[int, int] = {}
    ours = [planned(row, costs, start, sizes) for row, start in each]
    best = min(lengths, key=lambda depth: sum(lengths[depth]))
    total = sum(plain) / sum(ours)
    hindsight = [min(plain[at], *(t[at] for t in lengths.values())) for at in range(len(plain))]
    share = statistics.mean(h / t for h, t in zip(hindsight, ours, strict=True))
    worst = min(p / t for p, t in zip(plain, ours, strict=True))
    yard = sum(plain) / sum(lengths[best])
    speeds = ", ".join(f"{d}: {sum(plain) / sum(t):.2f}" for d, t in lengths.items())
    print(f"{name}\n  fixed {speeds}\n  planner {total:.3f}, worst prompt {worst:.3f}", end="")
    print(f", of the best length of each prompt {share:.3f}; drafted {dict(sorted(sizes.items()))}")
    least = 0.97 if "bad" in name else 1.0
    over = total / max(yard, 1.0) if "bad" in name else total / yard
    return [
        Goal(f"{name}: worst prompt over plain", worst, 0.97),
        Goal(f"{name}: sum over fixed {best}", over, least),
        Goal(f"{name}: mean share of the best length of each prompt", share, 0.97),
    ]
