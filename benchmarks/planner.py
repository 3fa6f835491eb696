"""The planner against plain decoding and against every fixed length.

    python benchmarks/planner.py replay                # texts are recorded once, costs are charged
    python benchmarks/planner.py live                  # arms interleaved, each thread's own time
    python benchmarks/planner.py batches               # 8 and 16 rows of copies
    python benchmarks/planner.py lanes [--rows 1 8] [--lanes tree] [--temperatures 0]
                                                       # chain, tree, lookup by number of rows
    python benchmarks/planner.py decision              # what a decision costs

`replay` decodes the shipped pair's held-out prompts once at each temperature with the target's
noise keyed by position, so that the text does not depend on what is drafted, and notes at every
position how many of twelve drafted tokens are right. Planners and fixed lengths are then charged
the measured milliseconds of whole steps, in four scenarios: the shipped draft; a dear one, whose
every token takes 0.3 of a plain step more; a bad one, each of whose right tokens is made wrong
with a chance of 0.35; and one that is both. With --quick everything is small. The last lines say
which goals hold, and so does the exit status.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import outrider
from outrider import DraftModel, Engine, Root, SamplingParams, Stop, StopConditions
from outrider.costs import Costs, Curve
from outrider.drafters import DRAFTERS
from outrider.engine.batch import begin
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.engine.speculation_policy import (
    Adaptive,
    BatchView,
    FixedLength,
    PlannedRow,
    StepReport,
)
from outrider.shipped import shipped
from outrider.types import PLAIN, DraftShape

DEEPEST = 12
FIXED = (1, 2, 3, 4, 6, 8, 12)
DEAR, BAD = 0.3, 0.35
PIECE = 8  #: tokens of a row between two arms' turns
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


# ------------------------------------------------------------------- replay


def recorded(pair: Any, count: int, tokens: int, temperature: float) -> list[list[int]]:
    """For each prompt and position: how many of the draft's next tokens are the text's own."""
    target, draft = pair.engine.target, pair.engine.drafter.model
    texts = [pair.tokenizer(prompt)["input_ids"] for prompt in prompts(count)]
    rows = [SamplingParams(temperature, seed=row) for row in range(count)]
    whole = [list(ids) for ids in texts]
    run = Engine(target, Root(), "match").run(texts, rows, StopConditions(tokens + DEEPEST))
    for block in run:
        whole[block.row] += block.token_ids
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


# --------------------------------------------------------------------- live


Arm = Callable[[str, SamplingParams, Stop], float]


def timed(speculator: Any) -> Arm:
    """Thread seconds of a call."""

    def call(prompt: str, how: SamplingParams, stop: Stop) -> float:
        started = time.thread_time()
        speculator.generate(prompt, how, stop)
        return time.thread_time() - started

    return call


def interleaved(
    arms: dict[str, Arm], texts: Sequence[str], how: SamplingParams, stop: Stop
) -> dict[str, list[float]]:
    """Every arm on every prompt, in another order each time."""
    draws, times = random.Random(0), {name: [] for name in arms}
    for arm in arms.values():
        arm(texts[0], how, Stop(8))
    for number, text in enumerate(texts):
        order = list(arms)
        draws.shuffle(order)
        for name in order:
            seeded = replace(how, seed=number) if how.temperature else how
            times[name].append(arms[name](text, seeded, stop))
    return times


def live(given: argparse.Namespace) -> list[Goal]:
    """The shipped pair, a bad and dear draft, and copies, each beside plain decoding."""
    count, tokens = (4, 64) if given.quick else (given.count, given.tokens)
    texts, stop = prompts(count), Stop(tokens, token_ids=())
    about: dict[str, Any] = {"dtype": given.dtype, "threads": 1, "pack_weights": True}
    pair = outrider.load(**about)
    draft = pair.engine.drafter.model  # type: ignore[attr-defined]
    deeper = {
        f"planner to {d}": timed(
            outrider.load(num_speculative_tokens=d, planner="adaptive", **about)
        )
        for d in given.depths
    }
    goals = []
    for temperature, least in ((0.0, 1.03), (1.0, 1.0)):
        how = SamplingParams(temperature)
        arms = {f"chain {d}": timed(pair.using(DraftModel(draft, (1,) * d))) for d in FIXED[1::1]}
        arms = {"planner": timed(pair), "plain": timed(pair.plain())} | deeper | arms
        times = interleaved(arms, texts, how, stop)
        told(f"shipped pair, T = {temperature:g}", times)
        best = min((n for n in times if n.startswith("chain")), key=lambda n: sum(times[n]))
        over = sum(times[best]) / sum(times["planner"])
        goals.append(Goal(f"pair, T = {temperature:g}: planner over {best}", over, least))
    others = {
        "layers 0, 7 of the target": outrider.load(shipped("target"), draft_layers=(0, 7), **about),
        "prompt_lookup": outrider.load(shipped("target"), drafter="prompt_lookup", **about),
    }
    for name, speculator in others.items():
        for temperature in (0.0, 1.0):
            arms = {"planner": timed(speculator), "plain": timed(speculator.plain())}
            times = interleaved(arms, texts, SamplingParams(temperature), stop)
            told(f"{name}, T = {temperature:g}", times)
            ratios = [p / t for p, t in zip(times["plain"], times["planner"], strict=True)]
            total = sum(times["plain"]) / sum(times["planner"])
            named = f"{name}, T = {temperature:g}: planner over plain"
            goals.append(Goal(f"{named}, median", statistics.median(ratios), 0.98))
            goals.append(Goal(f"{named}, sum", total, 0.97))
    return goals


def told(name: str, times: dict[str, list[float]]) -> None:
    """Speeds over plain decoding."""
    plain = sum(times["plain"])
    speeds = ", ".join(f"{arm} {plain / sum(each):.2f}" for arm, each in times.items())
    print(f"{name}: {speeds}", flush=True)


# ------------------------------------------------------------------ batches


def batches(given: argparse.Namespace) -> list[Goal]:
    """Many rows of copies, where scoring more tokens is dear."""
    rows, tokens = ((8,), 48) if given.quick else ((8, 16), given.tokens)
    target = given.target or shipped("target")
    goals = []
    for drafter in [name for name in ("prompt_lookup", "recall") if name in DRAFTERS]:
        planner = outrider.load(
            target, drafter=drafter, dtype=given.dtype, threads=1, pack_weights=True
        )
        plain, fixed_ones = planner.plain(shared_noise=True), {}
        if drafter == "prompt_lookup":
            fixed_ones = {"8 copied": planner.using(outrider.PromptLookup(8), "match")}
        for size in rows:
            how = [SamplingParams(0.7, seed=row) for row in range(size)]
            arms = {"planner": planner, "plain": plain} | fixed_ones
            times: dict[str, list[float]] = {name: [] for name in arms}
            for turn in range(1 + (1 if given.quick else 6)):
                for name in list(arms)[:: 1 if turn % 2 else -1]:
                    started = time.thread_time()
                    arms[name].generate(prompts(size), how, Stop(tokens, token_ids=()))
                    if turn:
                        times[name].append(time.thread_time() - started)
            told(f"{drafter}, {size} rows, T = 0.7", times)
            turns = zip(times["plain"], times["planner"], strict=True)
            over = statistics.median(plain / planned for plain, planned in turns)
            goals.append(Goal(f"{drafter}, {size} rows: planner over plain", over, 0.97))
    return goals


# -------------------------------------------------------------------- lanes


def lanes(given: argparse.Namespace) -> list[Goal]:
    """Each lane with so many rows: the planner beside plain decoding and each depth of the lane.

    All are coupled, as seeded requests are on a server: every arm writes the same texts. A depth
    that is far behind the lane's best one is timed once.
    """
    tokens, turns = (32, 3) if given.quick else (64, 5)
    pair = outrider.load(dtype=given.dtype, threads=1, pack_weights=True)
    arms = {"plain": Engine(pair.engine.target, Root(), "match")}
    for lane in given.lanes:
        arms |= {f"{lane} {name}": engine for name, engine in lane_arms(pair, lane).items()}
    goals = []
    for rows in given.rows:
        texts = [pair.tokenizer(text)["input_ids"] for text in prompts(max(rows, 8))]
        for temperature in given.temperatures:
            for engine in arms.values():  # measures what steps cost, and what drafts are like
                side_by_side({"": engine}, texts[:1], rows, temperature, 16)
            times = [side_by_side(arms, texts, rows, temperature, tokens)]
            some = {name: arms[name] for name in arms if hopeful(name, times[0])}
            for _ in range(turns - 1):
                times.append(side_by_side(some, texts, rows, temperature, tokens))
            for lane in given.lanes:
                goals += lane_goals(f"{lane}, {rows} rows, T = {temperature:g}", lane, times)
    return goals


def lane_arms(pair: Any, lane: str) -> dict[str, Engine]:
    """The planner, and the drafter's depths."""
    target, draft = pair.engine.target, pair.engine.drafter.model
    drafter: Any = {
        "chain": DraftModel(draft, (1,) * DEEPEST, shared_noise=True),
        "tree": DraftModel(draft, (3, 2, 1, 1), shared_noise=True),
        "lookup": outrider.PromptLookup(DEEPEST),
    }[lane]
    depths = [shape.max_depth for shape in drafter.shapes if shape.max_depth in (1, 2, 4, 8, 12)]
    fixed_ones = {f"depth {d}": Engine(target, drafter, "match", FixedLength(d)) for d in depths}
    return {"planner": Engine(target, drafter, "match", Adaptive())} | fixed_ones


def hopeful(name: str, times: dict[str, list[float]]) -> bool:
    """Whether an arm may yet be the best depth of its lane, or is none."""
    lane, _, depth = name.partition(" depth ")
    best = min((sum(t) for n, t in times.items() if n.startswith(f"{lane} depth ")), default=0.0)
    return not depth or sum(times[name]) < 1.1 * best


def lane_goals(named: str, lane: str, turns: Sequence[dict[str, list[float]]]) -> list[Goal]:
    """A lane's line of speeds over plain decoding, and its goals: medians of the turns' ratios.

    Not the least time of every piece: a planner's pieces end elsewhere in every turn, so that the
    shortest of each would add up to fewer tokens than were written.
    """
    told(f"{named}, first turn", {n: t for n, t in turns[0].items() if n == "plain" or lane in n})
    ours = f"{lane} planner"
    over = {
        name: statistics.median(sum(turn[name]) / sum(turn[ours]) for turn in turns)
        for name in turns[-1]
        if name == "plain" or f"{lane} d" in name
    }
    best = min(over, key=over.__getitem__)
    return [
        Goal(f"{named}: planner over plain", over["plain"], 0.97),
        Goal(f"{named}: over {best}", over[best], 0.95),
    ]


def side_by_side(
    arms: dict[str, Engine], texts: Sequence[list[int]], rows: int, temperature: float, tokens: int
) -> dict[str, list[float]]:
    """Thread seconds of each arm for all texts, so many at a time, piece by piece.

    Arms take turns after every piece, as a machine's pace changes from second to second.
    """
    took: dict[str, list[float]] = {name: [] for name in arms}
    going = {name: pieces(arms[name], texts, rows, temperature, tokens) for name in arms}
    while going:
        for name in list(going):
            more = next(going[name], None)
            if more is None:
                del going[name]
            else:
                took[name].append(more)
    return took


def pieces(
    engine: Engine, texts: Sequence[list[int]], rows: int, temperature: float, tokens: int
) -> Iterator[float]:
    """Thread seconds of an engine for all texts, about `PIECE` tokens of each row at a time."""
    requests = [
        Request(ids, SamplingParams(temperature, seed=at), StopConditions(tokens))
        for at, ids in enumerate(texts)
    ]
    for first in range(0, len(requests), rows):
        started = time.thread_time()
        run = outrider.EngineRun(engine, rows, 512)
        run.submit_all(requests[first : first + rows])
        run.close()
        while not run.done:
            wrote = 0
            while wrote < PIECE * rows and not run.done:
                wrote += sum(len(block.token_ids) for block in run.step())
            yield time.thread_time() - started
            started = time.thread_time()


# ----------------------------------------------------------------- decision


def decision(given: argparse.Namespace) -> list[Goal]:
    """Microseconds of a decision, the 99th percentile; and of one that stays at nothing."""
    curve = Curve.of({1: 6.0, 5: 9.0, 17: 16.0})
    costs = Costs({rows: {64: curve, 448: curve} for rows in (1, 2, 4, 8)})
    shapes = [*(DraftShape(d, d + 1, d, True) for d in range(16, 0, -1)), PLAIN]
    steps, goals = (500 if given.quick else 3000), []
    for rows in (1, 4, 8):
        planner, session = Adaptive(), Adaptive().open(shapes, costs)
        draws, lengths = random.Random(0), [1] * rows
        took = []
        for _ in range(steps):
            request = Request([1], SamplingParams(), StopConditions(1 << 20))
            view = BatchView(
                [PlannedRow(n, request, lengths[n]) for n in range(rows)], rows, True, True
            )
            started = time.thread_time()
            shape = planner.plan(session, view)
            took.append(1e6 * (time.thread_time() - started))
            blocks = []
            for row in range(rows):
                got = next((at for at in range(shape.max_depth) if draws.random() > 0.8), 16)
                got = min(got, shape.max_depth)
                lengths[row] += got + 1
                blocks.append(StepOutput(row, [1] * (got + 1), got, None, shape.max_depth))
            planner.learn(session, StepReport(blocks, shape.max_nodes, shape.max_depth, 6.0))
        slow = sorted(took)[int(0.99 * len(took))]
        print(f"{rows} rows: median {statistics.median(took):.0f} us, 99 % {slow:.0f} us")
        goals.append(Goal(f"{rows} rows: bound over 99 %", (50 + 3 * (rows > 1) * rows) / slow, 1))
    return goals


WORK = {
    "replay": replay,
    "live": live,
    "batches": batches,
    "lanes": lanes,
    "decision": decision,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=WORK)
    parser.add_argument("--count", type=int, default=32, help="prompts")
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", help="of batches; default: the shipped one")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--lanes", nargs="+", default=["chain", "tree", "lookup"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--depths", type=int, nargs="*", default=[], help="of live: more planners")
    parser.add_argument("--keep", help="file of recorded texts, to replay them again")
    parser.add_argument("--quick", action="store_true", help="few prompts and short texts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    goals = WORK[given.work](given)
    print(*goals, sep="\n")
    sys.exit(any(goal.value < goal.least for goal in goals))


if __name__ == "__main__":
    main()
