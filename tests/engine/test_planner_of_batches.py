"""Batches: no row pays for another, what is not read costs nothing, and what is told is shared."""

import random
import time
from itertools import count

import pytest
import torch

from outrider import DraftModel, Engine, PromptLookup, Root, SamplingParams, StopConditions
from outrider.costs import Costs, Curve
from outrider.engine.engine_run import EngineRun
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.engine.speculation_policy import (
    Adaptive,
    BatchView,
    PlannedRow,
    StepReport,
    measure,
)
from outrider.engine.speculation_policy.estimates import RowMemory
from outrider.types import PLAIN, DraftShape
from tiny import PROMPTS, decode, pair

COSTS = Costs.of({1: 6.0, 2: 8.0, 5: 14.6}).alone()
CHAIN = [*(DraftShape(depth, depth + 1, depth, True) for depth in (4, 3, 2, 1)), PLAIN]
MEASURED = measure.measured  # tests are given made-up costs: see conftest.py


def rows_of(count, budget=None, temperature=1.0):
    how = SamplingParams(temperature, seed=1)
    return [PlannedRow(n, Request([1], how, StopConditions(budget)), 1) for n in range(count)]


def played(state, view, kept, steps):
    """How deep each step drafted, if rows keep so many levels each at most.

    As a run does, a planner that rests is not asked while the rows are the same.
    """
    depths = []
    for _ in range(steps):
        same = [row.request_id for row in state.view.rows] == [row.request_id for row in view.rows]
        if same and state.rest:
            state.rest, shape = state.rest - 1, PLAIN
        else:
            shape = Adaptive().plan(state, view)
        depth = shape.max_depth
        blocks = [
            StepOutput(row.request_id, [5] * (min(most, depth) + 1), min(most, depth), None, depth)
            for row, most in zip(view.rows, kept, strict=True)
        ]
        took = state.costs.milliseconds(shape.max_nodes, len(view.rows))
        Adaptive().learn(state, StepReport(blocks, shape.max_nodes, depth, took))
        depths.append(depth)
    return depths


# ------------------------------------------------------- what a batch learns


def test_a_batch_knows_after_a_step_what_a_row_learns_in_several():
    many, one = (Adaptive().open(CHAIN, COSTS) for _ in range(2))
    together = played(many, BatchView(rows_of(12), 12), [0] * 12, 7)
    alone = played(one, BatchView(rows_of(1)), [0], 7)
    assert sum(map(bool, together)) == 1 < sum(map(bool, alone))


def test_a_batch_begins_with_what_an_earlier_one_has_shown():
    """Of its own kind, and only where no text depends on it."""
    planner = Adaptive()
    played(planner.open(CHAIN, COSTS), BatchView(rows_of(12), 12), [0] * 12, 7)

    def first(view):
        return planner.plan(planner.open(CHAIN, COSTS), view).max_depth

    assert first(BatchView(rows_of(12), 12)) == 0
    assert first(BatchView(rows_of(12, temperature=0.0), 12)) > 0
    assert first(BatchView(rows_of(12), 12, ignores_drafts=False)) > 0
    assert Adaptive().plan(Adaptive().open(CHAIN, COSTS), BatchView(rows_of(12), 12)).max_depth > 0


def test_nothing_is_weighed_anew_while_a_batch_rests(monkeypatch):
    state, view = Adaptive().open(CHAIN, COSTS), BatchView(rows_of(12), 12)
    played(state, view, [0] * 12, 12)
    asked = []
    gains = RowMemory.gains
    monkeypatch.setattr(RowMemory, "gains", lambda *given: asked.append(0) or gains(*given))
    depths = played(state, view, [0] * 12, 60)
    looks = sum(map(bool, depths))
    assert 0 < looks <= 3
    assert len(asked) <= 12 * looks
    played(state, view._replace(rows=view.rows[:-1]), [0] * 11, 1)  # a row has left
    assert len(asked) > 12 * looks


@pytest.mark.parametrize(
    ("rows", "gain", "asked"), [(12, 0.05, 10), (12, 0.32, 40), (4, 0.05, 20), (1, 0.05, 9)]
)
def test_who_foresees_far_too_little_for_a_batch_is_not_asked_in_every_step(rows, gain, asked):
    """After a step for every four rows. Nearly enough is weighed in every step; a row alone rests
    the longer the more looks were in vain."""
    state, counted = Adaptive().open(CHAIN, COSTS), []

    def foresee():
        counted.append(gain)
        return [0.0, gain]

    view = BatchView([row._replace(foresee=foresee) for row in rows_of(rows)], rows)
    assert not any(played(state, view, [0] * rows, 40))
    assert len(counted) == rows * asked
    if rows > 1:
        played(state, view, [0] * rows, 1)
        counted.clear()
        played(state, view._replace(rows=view.rows[1:]), [0] * (rows - 1), 1)
        assert len(counted) == rows - 1  # a row has left


def test_what_is_foreseen_is_weighed_as_soon_as_it_is_asked_for():
    state, worth = Adaptive().open(CHAIN, COSTS), [0.0, 0.0]
    view = BatchView([row._replace(foresee=lambda: worth) for row in rows_of(12)], 12)
    assert not any(played(state, view, [0] * 12, 10))
    worth[1] = 0.9
    depths = played(state, view, [1] * 12, 10)
    assert 1 in depths[:4]
    assert all(depths[4:])


# --------------------------------------------------------- what a step saves


def test_in_a_closed_batch_the_row_that_will_be_last_decides():
    """Eleven rows keep all, and are nearly done; without them the last one has a long way to go."""
    flat = Costs({1: {0: Curve.of({1: 6.0, 5: 10.0})}, 12: {0: Curve.of({1: 7.0, 5: 14.0})}})
    done, long = StopConditions(12), StopConditions(400)
    rows = [
        PlannedRow(n, Request([1], SamplingParams(0), long if n == 0 else done), 1)
        for n in range(12)
    ]
    last = {}
    for closed in (True, False):
        state = Adaptive().open(CHAIN, flat)
        last[closed] = played(state, BatchView(rows, 12, closed=closed), [0] + [4] * 11, 40)[20:]
    assert sum(map(bool, last[True])) < 5
    assert all(last[False])


def test_a_batch_is_closed_when_nobody_waits():
    target, small = pair()
    seen = []

    class Watching(Adaptive):
        def plan(self, state, view):
            seen.append((view.closed, len(view.rows)))
            return super().plan(state, view)

    run = EngineRun(Engine(target, DraftModel(small, (1, 1)), "match", Watching()), 2, 128)
    run.submit_all(
        [
            Request(p, SamplingParams(0), StopConditions(n))
            for p, n in zip(PROMPTS[:4], (9, 3, 3, 9), strict=True)
        ]
    )
    run.close()
    for _ in run:
        pass
    closed = [each for each, _ in seen]
    assert closed == sorted(closed)
    assert not closed[0]
    assert closed[-1]


# ------------------------------------------------- what a draft model reads


class Never(Adaptive):
    """Plain steps, however good drafts would be."""

    def plan(self, state, view):
        return PLAIN


class Always(Adaptive):
    """The deepest draft in every step."""

    def plan(self, state, view):
        super().plan(state, view)
        return state.drafts[-1]


class Later(Never):
    """Plain steps, and drafts from the ninth on."""

    def plan(self, state, view):
        super(Never, self).plan(state, view)
        return (
            PLAIN
            if max(row.length - len(row.request.prompt) for row in view.rows) < 9
            else (state.drafts[-1])
        )


def tokens_read(monkeypatch, model):
    """Counts the tokens that a model is fed from here on."""
    read, forward = [], model.forward

    def counted(cache, nodes, **how):
        read.append(nodes.tokens_BQ.numel())
        return forward(cache, nodes, **how)

    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, *a, **k: counted(*a, **k) if self is model else forward(*a, **k),
    )
    return read


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_never_asked_reads_nothing(temperature, monkeypatch):
    target, small = pair()
    read = tokens_read(monkeypatch, small)
    how = SamplingParams(temperature, seed=3)
    texts = {}
    for rule, planner in (("match", Never()), ("block", Never()), ("match", None)):
        read.clear()
        engine = Engine(target, DraftModel(small, (1, 1)), rule, planner)
        texts[rule, planner is None], _ = decode(engine, PROMPTS[:3], how, StopConditions(6))
        free = rule == "match" or temperature == 0
        assert (sum(read) == 0) == (free and planner is not None)
    assert texts["match", False] == texts["match", True]


def kept_of(planner):
    """How much of a target's own drafts is kept, and its text, with a newcomer on the way."""
    target, _ = pair()
    run = EngineRun(Engine(target, DraftModel(target, (1, 1, 1)), "match", planner), 4, 128)
    run.submit_all(
        [Request(prompt, SamplingParams(0), StopConditions(30)) for prompt in PROMPTS[:2]]
    )
    texts = {}
    for number in range(60):
        if number == 4:
            run.submit(Request(PROMPTS[2], SamplingParams(0), StopConditions(30)))
        for block in run.step():
            texts.setdefault(block.request_id, []).extend(block.token_ids)
    return run.stats.accepted / max(run.stats.drafted, 1), texts


def test_a_draft_model_reads_late_what_it_would_have_read_at_once(monkeypatch):
    target, _ = pair()
    expected, _ = decode(Engine(target, Root()), PROMPTS[:3], SamplingParams(0), StopConditions(30))
    kept, texts = kept_of(Later())
    assert [texts[row] for row in range(3)] == expected
    assert kept > 0.9
    monkeypatch.setattr("outrider.engine.step.unread", lambda context, draft: 9)  # nobody is told
    kept, texts = kept_of(Later())
    assert [texts[row] for row in range(3)] == expected
    assert kept < 0.8


def test_a_newcomer_is_read_at_once_where_others_are_drafted_for():
    target, small = pair()
    run = EngineRun(Engine(target, DraftModel(small, (1, 1)), "match", Always()), 4, 128)
    run.submit(Request(PROMPTS[0], SamplingParams(0), StopConditions(20)))
    run.step()
    assert run.batch.context.unread == 0
    run.submit(Request(PROMPTS[1], SamplingParams(0), StopConditions(20)))
    run.step()
    assert run.batch.rows == 2
    assert run.batch.context.unread == 0


READING = Costs(COSTS.times, {1: 1.0})


@pytest.mark.parametrize(
    ("usual", "budget", "unread", "drafts"),
    [
        (400, 20, 30, False),
        (20, 400, 30, False),  # a budget says nothing of how much is written
        (20, 400, 0, True),
        (400, 400, 30, True),
        (256, None, 30, True),
        (256, None, 400, False),
    ],
)
def test_what_is_read_first_has_to_be_worth_it(usual, budget, unread, drafts):
    view = BatchView(rows_of(4, budget), 4, unread=unread)
    state = Adaptive().open(CHAIN, READING)
    for _ in range(3):
        state.reading_budget.lengths.append(usual)
    assert (Adaptive().plan(state, view).max_depth > 0) == drafts


def test_a_look_that_loses_much_is_waited_for_longer():
    first = {}
    for unread in (0, 10):
        state = Adaptive().open(CHAIN, READING)
        played(state, BatchView(rows_of(4), 4), [0] * 4, 6)
        depths = played(state, BatchView(rows_of(3), 4, unread=unread), [0] * 3, 200)
        first[unread] = depths.index(1)
    assert first[0] < 30 < 80 < first[10]


# ------------------------------------------------------------ what is measured


def test_one_row_is_measured_behind_a_long_text_and_reading_by_tokens(monkeypatch):
    """By a clock that counts the tokens which the draft model is fed."""
    target, small = pair(vocab=64)
    read = tokens_read(monkeypatch, small)
    calls = count()
    monkeypatch.setattr(measure, "_clock", lambda device: 1e-3 * (next(calls) + sum(read)))
    monkeypatch.setattr(measure, "CONTEXTS", (8, 24))
    monkeypatch.setattr(measure, "ENOUGH", 1)
    engine = Engine(target, DraftModel(small, (1, 1)), None, "adaptive")
    costs = measure.whole(MEASURED(engine, 2))
    assert sorted(costs.times[2]) == [8]  # what a row adds by its length, it adds beside others
    assert sorted(measure.whole(MEASURED(engine, 1)).times[1]) == [8, 24]
    assert costs.reading == {2: pytest.approx(2.0)}
    copies = measure.whole(MEASURED(Engine(target, PromptLookup(2), None, "adaptive"), 2))
    assert copies.reading == {2: 0.0}
    assert Costs.parsed(costs.text()) == costs


def test_what_copies_take_by_chance_is_no_reading(monkeypatch):
    """A draft takes 40 microseconds, and a few more or less each time: nothing was read in them."""
    draws, spent = random.Random(0), [0.0]

    def clock(device):
        spent[0] += 4e-5 * draws.uniform(0.7, 1.3)
        return spent[0]

    monkeypatch.setattr(measure, "_clock", clock)
    monkeypatch.setattr(measure, "ENOUGH", 1)
    engine = Engine(pair(vocab=64)[0], PromptLookup(2), None, "adaptive")
    assert [measure.whole(MEASURED(engine, 1)).reading for _ in range(6)] == [{1: 0.0}] * 6


def test_others_at_work_on_the_cores_do_not_enter_what_steps_cost(monkeypatch):
    """The clock on the wall jumps by minutes, as if a process that waits for a core."""
    target, small = pair(vocab=64)
    jumps = count()
    wall = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: wall() + 60.0 * next(jumps))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(measure, "ENOUGH", 1)
    costs = measure.whole(MEASURED(Engine(target, DraftModel(small, (1, 1)), None, "adaptive"), 2))
    assert all(max(curve.times) < 30_000 for curve in costs.times[2].values())
    assert costs.reading[2] < 1_000
