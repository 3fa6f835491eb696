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
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from planner_replay import DEEPEST, FIXED, Goal, prompts, replay

import outrider
from outrider import DraftModel, Engine, Root, SamplingParams, Stop, StopConditions
from outrider.costs import Costs, Curve
from outrider.drafters import DRAFTERS
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

PIECE = 8  #: tokens of a row between two arms' turns


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
