"""Every drafter on every prompt: times, texts, scores; in turn, one prompt after the other.

Times are those of whole calls, prompt included, as Spec-Bench has them. On one thread the clock is
that thread's CPU time, which other work on the machine does not disturb; else it is the wall's.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider import Engine, SamplingParams, StopConditions
from outrider.cli.console import Show
from outrider.drafters import ReferenceLookup
from outrider.text.speculator import Speculator
from outrider.text.tokens import encode
from outrider_lab.bench.measure import turns
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
    every = [
        (t, task, arm)
        for t in amount.temperatures
        for _, task, arm in turns(list(engines), len(tasks))
    ]
    found: dict[tuple[float, str], list[Row]] = {(t, a): [] for t, _, a in every}
    warm: set[str] = set()
    for done, (t, number, arm) in enumerate(every):
        task, engine = tasks[number], engines[arm]
        progress(f"{arm}, T = {t:g}", done, len(every))

        key = f"{arm}, T {t:g}, question {task.question_id}"
        if key not in store.rows and arm not in warm:
            warm.add(arm)
            _decode(base, engine, tasks[0], prompts[0], SamplingParams(t, seed=0), 8)
        found[t, arm].append(
            store.get(key, _answered, base, engine, task, prompts[number], t, amount)
        )
    progress("done", len(every), len(every))
    return TaskAnswers(list(tasks), list(engines), found)


def _answered(
    base: Speculator,
    engine: Engine,
    task: PromptTask,
    prompt: list[int],
    t: float,
    amount: TasksAmount,
) -> Row:
    """One answer, scored."""
    how = SamplingParams(t, seed=amount.seed + task.question_id)
    row = _decode(base, engine, task, prompt, how, amount.new_tokens)
    worth = {}
    if amount.scored:
        worth = scores.scores(task, row["text"], row["ids"], amount.run_code)
    return row | {"scores": worth, "finished": time.time()}


def _decode(
    base: Speculator,
    engine: Engine,
    task: PromptTask,
    prompt: list[int],
    how: SamplingParams,
    most: int,
) -> Row:
    """One answer, with its times and the tokens of each step."""
    copied = None
    if isinstance(engine.drafter, ReferenceLookup) and task.text:
        copied = [encode(base.tokenizer, task.text)]
    wall, cpu = time.perf_counter(), time.thread_time()
    going = engine.run([prompt], [how], [StopConditions(most, base.eos_ids)], references=copied)
    steps = [list(block.token_ids) for block in going]
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    ids = [token for step in steps for token in step]
    return {
        "text": base.tokenizer.decode(ids, skip_special_tokens=True),
        "ids": ids,
        "prompt tokens": len(prompt),
        "wall_time": wall,
        "cpu_time": cpu,
        "steps": going.stats.engine_steps,
        "accept_lengths": [len(step) for step in steps],
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
    return record.Store(out, "tasks", settings | more)
