"""Measure methods on trees: choose each method's tree on some prompts, judge it on others.

A method's best tree on the prompts it is judged on looks better than it is. So every tree decodes
the choosing prompts once; the tree of the best block efficiency of each method then decodes the
judging prompts, several samples each. All methods see the same prompts and seeds, so their
differences are paired by prompt. Decoded in batches, because block efficiency does not depend on
them; the clock runs apart, one prompt at a time, methods in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider import verifiers
from outrider.cli.console import Show
from outrider.errors import ConfigurationError
from outrider.sampling.sampling_params import SamplingParams
from outrider.text.output_text import Stop
from outrider.text.speculator import Speculator
from outrider_lab.papers import record
from outrider_lab.papers.score_code import parses, similarity
from outrider_lab.papers.trees import PLAIN, Groups, TreeArm

Prompts = Sequence[dict[str, str]]


@dataclass(frozen=True)
class TreePlan:
    """How much is decoded."""

    prompts: int = 80  #: judging prompts
    choosing: int = 16  #: prompts on which trees are chosen, none of the above
    samples: int = 2  #: completions of each judging prompt
    new_tokens: int = 128
    temperature: float = 0.3  #: the paper's, for summaries and translation
    top_p: float = 1.0
    timed: int = 20  #: prompts under the clock; 0: no times
    rows: int = 16  #: rows of a batch
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """Raw counts: `every` and `chosen` by (group, method, tree), `times` by (group, method)."""

    every: dict[tuple[int, str, str], record.Row]
    chosen: dict[tuple[int, str, str], record.Row]
    times: dict[tuple[int, str], list[record.Row]]
    arms: dict[tuple[int, str], TreeArm]  #: the chosen one of each group and method


def measure(
    name: str,
    groups: Groups,
    pair: Speculator,
    prompts: Prompts,
    plan: TreePlan,
    out: Path,
    progress: Show,
) -> tuple[record.Store, Measured]:
    """Choose, judge, time. What a folder already holds is not measured again."""
    if len(prompts) < 2 or min(plan.prompts, plan.choosing) < 1:
        raise ConfigurationError(
            "trees are chosen on some prompts and judged on others; got "
            f"{len(prompts)} prompts, {plan.choosing} to choose and {plan.prompts} to judge on; "
            "give at least one of each"
        )
    settings = _settings(plan, pair, record.of_prompts(prompts))
    store = record.Store(out, name, settings)
    choosing, judging = split(prompts, plan)
    draft = record.draft_of(pair)
    jobs = [(group, arm) for group, arms in groups.items() for arm in arms]

    def using(arm: TreeArm) -> Speculator:
        return pair.using(arm.make(draft), verifiers.get(arm.rule))

    def decoded(arm: TreeArm, part: Prompts, seed: int) -> record.Row:
        return decode(using(arm), part, plan, seed)

    every = {}
    for number, (group, arm) in enumerate(jobs):
        progress(f"choosing: {arm.method} {arm.tree}", number, len(jobs))
        every[group, arm.method, arm.tree] = store.get(
            f"choose {group} {arm.method} {arm.tree}",
            decoded,
            arm,
            choosing,
            plan.seed,
        )
    arms = {(0, PLAIN.method): PLAIN} | best(jobs, every)
    judged = _verified(store, arms, decoded, judging, plan, progress)
    times = _times(store, arms, using, judging[: plan.timed], plan, progress)
    return store, Measured(every, judged, times, arms)


def split(prompts: Prompts, plan: TreePlan) -> tuple[Prompts, Prompts]:
    """Choosing prompts and judging prompts; a third chooses where there are too few for both."""
    few = min(plan.choosing, max(len(prompts) // 3, 1))
    return prompts[:few], prompts[few : few + plan.prompts]


def best(
    jobs: Sequence[tuple[int, TreeArm]], every: dict[tuple[int, str, str], record.Row]
) -> dict[tuple[int, str], TreeArm]:
    """The tree of the best block efficiency of each group and method."""
    found: dict[tuple[int, str], TreeArm] = {}
    reached: dict[tuple[int, str], float] = {}
    for group, arm in jobs:
        row = every[group, arm.method, arm.tree]
        tau = efficiency(row, range(len(row["steps"])))
        if tau > reached.get((group, arm.method), 0):
            found[group, arm.method], reached[group, arm.method] = arm, tau
    return found


def efficiency(row: record.Row, units: Sequence[int]) -> float:
    """Tokens per target call over some prompts: accepted ones and one more.

    A last block that the budget cuts counts in full, so the length of the texts does not matter
    (Wald: expected tokens = expected steps x expected tokens of a step).
    """
    steps = sum(row["steps"][u] for u in units)
    return float(1 + sum(row["accepted"][u] for u in units) / steps)


def decode(speculator: Speculator, prompts: Prompts, plan: TreePlan, seed: int) -> record.Row:
    """Counts and task scores of one completion per prompt."""
    stop = Stop(plan.new_tokens, token_ids=())
    found: dict[str, list[float]] = {n: [] for n in ("steps", "accepted", "parsed", "alike")}
    for start in range(0, len(prompts), plan.rows):
        part = prompts[start : start + plan.rows]
        how = [
            SamplingParams(plan.temperature, top_p=plan.top_p, seed=seed + start + i)
            for i in range(len(part))
        ]
        result = speculator.generate([p["prompt"].rstrip() for p in part], how, stop)
        for prompt, done in zip(part, result.completions, strict=True):
            found["steps"].append(done.stats.steps)
            found["accepted"].append(done.stats.accepted)
            found["parsed"].append(float(parses(prompt["prompt"].rstrip(), done.text)))
            found["alike"].append(similarity(done.text, prompt.get("reference", "")))
    return found | {"seed": seed}


def _verified(
    store: record.Store,
    arms: dict[tuple[int, str], TreeArm],
    decoded: Callable[[TreeArm, Prompts, int], record.Row],
    prompts: Prompts,
    plan: TreePlan,
    progress: Show,
) -> dict[tuple[int, str, str], record.Row]:
    """Counts per prompt, summed over its samples. One batch of prompts for all methods in turn."""
    names = ("steps", "accepted", "parsed", "alike")
    starts = range(0, len(prompts), plan.rows)
    work = [(sample, start) for sample in range(plan.samples) for start in starts]
    found = {
        (group, arm.method, arm.tree): {n: [0.0] * len(prompts) for n in names}
        for (group, _), arm in arms.items()
    }
    for number, (sample, start) in enumerate(work):
        part = prompts[start : start + plan.rows]
        seed = plan.seed + (sample + 1) * 10_000 + start
        for at, ((group, _), arm) in enumerate(arms.items()):
            done = number * len(arms) + at
            progress(f"judging: {arm.method} {arm.tree}", done, len(work) * len(arms))
            row = store.get(
                f"judge {group} {arm.method} {arm.tree} {sample} {start} {len(part)}",
                decoded,
                arm,
                part,
                seed,
            )
            sums = found[group, arm.method, arm.tree]
            for name in names:
                for i, value in enumerate(row[name], start=start):
                    sums[name][i] += value
    return {key: sums | {"samples": plan.samples} for key, sums in found.items()}


def _times(
    store: record.Store,
    arms: dict[tuple[int, str], TreeArm],
    using: Callable[[TreeArm], Speculator],
    prompts: Prompts,
    plan: TreePlan,
    progress: Show,
) -> dict[tuple[int, str], list[record.Row]]:
    """Milliseconds of each part per step, prompts outside and methods inside."""
    times: dict[tuple[int, str], list[record.Row]] = {key: [] for key in arms}
    warm: dict[tuple[int, str], Speculator] = {}

    def timed(key: tuple[int, str], number: int) -> record.Row:
        text = prompts[number]["prompt"].rstrip()
        if key not in warm:
            warm[key] = using(arms[key])
            warm[key].generate(
                text, SamplingParams(plan.temperature, top_p=plan.top_p, seed=0), Stop(8)
            )
        how = SamplingParams(plan.temperature, top_p=plan.top_p, seed=plan.seed + number)
        stats = warm[key].generate(text, how, Stop(plan.new_tokens, token_ids=())).stats
        return {
            "tokens": stats.new_tokens,
            "seconds": stats.seconds,
            "steps": stats.engine_steps,
            "models ms": stats.propose_ms + stats.score_ms,
            "outside ms": 1e3 * stats.seconds - stats.propose_ms - stats.score_ms,
        }

    total = len(prompts) * len(arms)
    for number in range(len(prompts)):
        for at, (key, arm) in enumerate(arms.items()):
            progress(f"timing: {arm.method} {arm.tree}", number * len(arms) + at, total)
            name = f"time {key[0]} {arm.method} {arm.tree} {number}"
            times[key].append(store.get(name, timed, key, number))
    return times


def _settings(plan: TreePlan, pair: Speculator, prompts: str) -> record.Row:
    """What a stored measurement depends on: more samples or times may join it later."""
    free = {"prompts", "samples", "timed", "rows"}
    kept = {k: v for k, v in asdict(plan).items() if k not in free}
    return kept | {"of": prompts} | record.of_pair(pair.notes)
