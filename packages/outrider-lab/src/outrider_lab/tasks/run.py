"""Every drafter on every prompt: times, texts, scores; in turn, one batch after the other.

A machine's pace changes with what else it does, so one call beside another says little about a few
percent: with more `rounds` drafters take turns on a prompt, and the fastest call of each counts.

Times are those of whole calls, prompt included, as Spec-Bench has them; an answer of a batch has
the part of its call that it has of the tokens. On one thread the clock is that thread's CPU time,
which other work on the machine does not disturb; else it is the wall's.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from outrider import Engine, SamplingParams, StopConditions
from outrider.cli.console import Show
from outrider.drafters import ReferenceLookup
from outrider.stats import RequestStats
from outrider.text.prompts import encode
from outrider.text.speculator import Speculator
from outrider_lab.certify.report import Row
from outrider_lab.papers import record
from outrider_lab.tasks import scores
from outrider_lab.tasks.prompts import PromptTask, token_ids


@dataclass(frozen=True)
class TasksAmount:
    """How much is measured."""

    new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.7)
    seed: int = 0
    run_code: bool = True  #: whether tests of code are run
    scored: bool = True  #: whether answers are
    rows: int = 1  #: prompts that are decoded together
    rounds: int = 1  #: times that each is decoded, of which the fastest counts


@dataclass(frozen=True)
class TaskAnswers:
    """What came of every (temperature, arm), one row for each prompt."""

    tasks: list[PromptTask]
    arms: list[str]
    rows: dict[tuple[float, str], list[Row]]


def run(
    base: Speculator,
    engines: dict[str, Engine],
    tasks: Sequence[PromptTask],
    amount: TasksAmount,
    store: record.Store,
    progress: Show,
) -> TaskAnswers:
    """Measure what the store does not have yet."""
    prompts = [token_ids(base.tokenizer, task.turns) for task in tasks]
    batches = [range(len(tasks))[at : at + amount.rows] for at in range(0, len(tasks), amount.rows)]
    every = [
        (t, number, batch) for t in amount.temperatures for number, batch in enumerate(batches)
    ]
    found: dict[tuple[float, str], list[Row]] = {(t, a): [] for t, *_ in every for a in engines}
    warm: set[str] = set()
    for done, (t, number, batch) in enumerate(every):
        keys = {
            (arm, at): f"{arm}, T {t:g}, question {tasks[at].question_id}"
            for arm in engines
            for at in batch
        }
        left = {
            arm: some
            for arm in engines
            if (some := [at for at in batch if keys[arm, at] not in store.rows])
        }
        made: dict[tuple[str, int], Row] = {}
        for place in range(amount.rounds * len(left)):
            turn, of = divmod(place, len(left))
            arm = list(left)[(number + turn + of) % len(left)]
            progress(f"{arm}, T = {t:g}", done, len(every))
            if arm not in warm:
                warm.add(arm)
                short = replace(amount, new_tokens=8)
                _decode(base, engines[arm], [tasks[0]], [prompts[0]], t, short)
            some = left[arm]
            asked = [tasks[at] for at in some], [prompts[at] for at in some]
            for at, row in zip(some, _decode(base, engines[arm], *asked, t, amount), strict=True):
                made[arm, at] = _faster(row, made.get((arm, at)))
        for arm, at in keys:
            own = partial(_scored, tasks[at], amount, made.get((arm, at), {}))
            found[t, arm].append(store.get(keys[arm, at], own))
    progress("done", len(every), len(every))
    return TaskAnswers(list(tasks), list(engines), found)


def _faster(row: Row, before: Row | None) -> Row:
    """An answer with the least of its times: what other work on the machine added is not its."""
    if before is not None:
        row |= {clock: min(row[clock], before[clock]) for clock in ("cpu_time", "wall_time")}
    return row


def _scored(task: PromptTask, amount: TasksAmount, row: Row) -> Row:
    """An answer with what it is worth."""
    worth = {}
    if amount.scored:
        worth = scores.scores(task, row["text"], row["ids"], amount.run_code)
    return row | {"scores": worth, "finished": time.time()}


def _decode(
    base: Speculator,
    engine: Engine,
    tasks: Sequence[PromptTask],
    prompts: Sequence[list[int]],
    t: float,
    amount: TasksAmount,
) -> list[Row]:
    """The answers of one batch, each with its part of the time and the tokens of each step."""
    copied = None
    if isinstance(engine.drafter, ReferenceLookup):
        copied = [encode(base.tokenizer, task.text) if task.text else [] for task in tasks]
    how = [SamplingParams(t, seed=amount.seed + task.question_id) for task in tasks]
    ends = StopConditions(amount.new_tokens, base.eos_ids)
    wall, cpu = time.perf_counter(), time.thread_time()
    going = engine.run(prompts, how, ends, references=copied)
    steps: list[list[list[int]]] = [[] for _ in tasks]
    for block in going:
        steps[block.request_id].append(list(block.token_ids))
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    total = sum(len(step) for row in steps for step in row)
    return [
        _row(base, prompt, row, (cpu / total, wall / total), counts)
        for prompt, row, counts in zip(prompts, steps, going.requests, strict=True)
    ]


def _row(
    base: Speculator,
    prompt: list[int],
    steps: list[list[int]],
    each: tuple[float, float],
    counts: RequestStats,
) -> Row:
    """One answer; `each`: seconds a token, of the processor and by the clock."""
    ids = [token for step in steps for token in step]
    return {
        "text": base.tokenizer.decode(ids, skip_special_tokens=True),
        "ids": ids,
        "prompt tokens": len(prompt),
        "wall_time": each[1] * len(ids),
        "cpu_time": each[0] * len(ids),
        "steps": counts.steps,
        "accept_lengths": [len(step) for step in steps],
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "overlap": counts.overlap,
        "overlaps": counts.overlaps,
    }


def clock(base: Speculator) -> str:
    """Which of a row's times counts."""
    alone = base.notes.threads == 1 and torch.device(base.notes.device).type == "cpu"
    return "cpu_time" if alone else "wall_time"


def store_of(out: Path, base: Speculator, amount: TasksAmount, more: Row) -> record.Store:
    """The store of these answers; more prompts or drafters go on from what is there."""
    settings = record.of_pair(base.notes) | {
        "prompts": "six kinds, shipped",
        "chat template": base.tokenizer.chat_template is not None,
        "new tokens": amount.new_tokens,
        "seed": amount.seed,
        "code is run": amount.run_code,
        "clock": clock(base),
    }
    if amount.rows > 1:
        settings["rows"] = amount.rows
    if amount.rounds > 1:
        settings["rounds"] = amount.rounds
    return record.Store(out, "tasks", settings | more)
