"""Planners choose what is drafted, and texts do not change: greedy, coupled, and in law."""

from functools import partial

import pytest

from outrider import (
    DraftModel,
    Engine,
    Root,
    SamplingParams,
    StopConditions,
    drafters,
    testing,
    verifiers,
)
from outrider.costs import Costs
from outrider.drafters import Suffix
from outrider.drafters.recipes import DraftOptions
from outrider.engine.engine_run import EngineRun
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.engine.speculation_policy import (
    PLANNERS,
    Adaptive,
    BatchView,
    FixedLength,
    PlannedRow,
    PlanReport,
    StepReport,
    chosen,
    measure,
    named,
)
from outrider.errors import ConfigurationError, UnknownName
from outrider.testing import text_law
from outrider.types import PLAIN, DraftShape
from tiny import DRAFTERS, PROMPTS, Mislabelled, decode, llama, pair

COSTS = Costs.of({1: 6.0, 2: 8.0, 5: 14.6})
MEASURED = measure.measured  # tests are given made-up costs: see conftest.py
CHAIN = [*(DraftShape(depth, depth + 1, depth, True) for depth in (4, 3, 2, 1)), PLAIN]


def block(row, accepted, drafted):
    return StepOutput(row, [5] * (accepted + 1), accepted, None, drafted)


def rows_of(count, seeds=(None,), budget=None):
    limits = StopConditions(budget)
    return [
        PlannedRow(n, Request([1], SamplingParams(seed=seeds[n % len(seeds)]), limits), 1)
        for n in range(count)
    ]


def step(state, view, kept):
    """One step of rows that keep at most so many levels each; the depths that they were given."""
    shape = Adaptive().plan(state, view)
    most = [shape.max_depth] * len(view.rows) if shape.most_B is None else shape.most_B.tolist()
    blocks = [
        block(row.request_id, min(each, depth), depth)
        for row, each, depth in zip(view.rows, kept, most, strict=True)
    ]
    took = state.costs.milliseconds(shape.max_nodes, len(view.rows), 1)
    Adaptive().learn(state, StepReport(blocks, shape.max_nodes, shape.max_depth, took))
    return most


def promised(kept, steps=64):
    """Plain decoding's time over that of a row whose drafts are foreseen to bring 9/20."""
    costs = Costs.of({1: 10.0, 2: 13.0})
    state, took, wrote = Adaptive().open(CHAIN[3:], costs), 0.0, 0
    row = rows_of(1)[0]._replace(foresee=lambda: (0.0, 0.45))
    for at in range(steps):
        shape = Adaptive().plan(state, BatchView([row]))
        depth = shape.max_depth
        took += costs.milliseconds(shape.max_nodes)
        said = block(0, kept(at) if depth else 0, depth)
        wrote += len(said.token_ids)
        Adaptive().learn(state, StepReport([said], shape.max_nodes, depth))
    return wrote * costs.milliseconds(1) / took


def test_a_drafter_that_promises_more_than_it_brings_is_believed_less():
    """The best of many guesses seldom is as good as it looks; believed, a step loses a tenth."""
    assert promised(lambda at: at % 5 == 4) > 0.97
    assert promised(lambda at: at % 5 == 4, steps=400) > 0.98
    assert promised(lambda at: at % 20 < 9) > 1.1  # one that keeps its word is
    assert promised(lambda at: at > 200 and at % 10 < 9, steps=800) > 1.2  # and one that comes to


def played(acceptance, steps, costs=COSTS):
    """The depths of a row whose drafts are kept to at most `acceptance` levels in each step."""
    state, view = Adaptive().open(CHAIN, costs), BatchView(rows_of(1))
    return [step(state, view, [acceptance])[0] for _ in range(steps)]


def test_good_drafts_become_deep_and_bad_ones_are_switched_off():
    assert played(4, 20)[-1] == 4
    bad = played(0, 400)
    assert sum(bad[:60]) <= 30
    assert sum(depth > 0 for depth in bad[200:]) == 3  # one look in 64 steps
    assert max(bad[60:]) == 1


def test_drafts_that_become_good_are_taken_up_again():
    state, view = Adaptive().open(CHAIN, COSTS), BatchView(rows_of(1))
    for _ in range(60):
        step(state, view, [0])
    assert Adaptive().plan(state, view) == PLAIN
    assert [step(state, view, [4]) for _ in range(400)][-1] == [4]


def test_a_draft_that_costs_as_much_as_it_saves_is_not_used():
    dear = Costs.of({1: 6.0, 2: 13.0, 5: 34.0})
    assert sum(played(4, 60, dear)) <= 4
    assert sum(depth > 0 for depth in played(4, 60, dear)) <= 3  # after 8, 16 and 32 steps


def test_a_draft_reaches_no_further_than_the_budget():
    state = Adaptive().open(CHAIN, COSTS)
    for _ in range(20):
        step(state, BatchView(rows_of(1, budget=100)), [4])
    depths = [
        Adaptive().plan(state, BatchView(rows_of(1, budget=left))).max_depth
        for left in (1, 2, 3, 9)
    ]
    assert depths == [0, 1, 2, 4]


def test_what_a_drafter_foresees_is_what_counts():
    state = Adaptive().open(CHAIN, COSTS)
    seen = [
        Adaptive().plan(state, BatchView([row._replace(foresee=partial(list, gains))])).max_depth
        for row in rows_of(1)
        for gains in ((0.0,), (0.0, 0.9), (0.0, 0.9, 1.8, 2.6, 3.3), (0.0, 0.05, 0.1, 0.1, 0.1))
    ]
    assert seen == [0, 1, 4, 0]
    assert state.backoff.over() is False  # who foresees needs no looks


def test_rows_of_a_batch_are_planned_together_where_no_text_depends_on_it():
    state, view = Adaptive().open(CHAIN, COSTS), BatchView(rows_of(4), max_num_seqs=4)
    for _ in range(200):
        depths = step(state, view, [4, 0, 0, 0])
    assert len(set(depths)) == 1


@pytest.mark.parametrize("others", [4, 0])
def test_rows_for_which_nothing_is_found_do_not_pay_for_one_that_copies(others):
    """All drafts are right; a step takes longer as soon as one row has one."""
    costs = Costs.of({1: 6.0, 2: 7.5, 5: 12.0})
    state, view = Adaptive().open(CHAIN, costs), BatchView(rows_of(4), max_num_seqs=4)
    asked = 0
    for _ in range(100):
        shape = Adaptive().plan(state, view)
        there = [min(shape.max_depth, most) for most in (4, others, others, others)]
        blocks = [block(row, depth, depth) for row, depth in enumerate(there)]
        took = state.costs.milliseconds(max(there) + 1, 4, 1)
        Adaptive().learn(state, StepReport(blocks, max(there) + 1, shape.max_depth, took))
        asked += shape.max_depth > 0
    assert asked == 100 if others else 0 < asked < 10


def alone_and_beside(planner_view, kept):
    """The depths of row 0 alone, and beside neighbours."""
    one, all_of = Adaptive().open(CHAIN, COSTS), Adaptive().open(CHAIN, COSTS)
    rows = planner_view.rows
    alone = [step(one, planner_view._replace(rows=rows[:1]), kept[:1])[0] for _ in range(60)]
    beside = [step(all_of, planner_view, kept)[0] for _ in range(60)]
    return alone, beside


@pytest.mark.parametrize("kept", [[4, 0, 0], [0, 4, 4], [2, 0, 4]])
def test_a_row_whose_text_depends_on_the_plan_is_planned_by_itself(kept):
    """Neighbours may share its seed: their verdicts tell its noise."""
    alone, beside = alone_and_beside(
        BatchView(rows_of(3, (7,)), max_num_seqs=3, ignores_drafts=False), kept
    )
    assert alone == beside
    together = alone_and_beside(
        BatchView(rows_of(3, (7,)), max_num_seqs=3, ignores_drafts=True), kept
    )
    assert together[0] != together[1]  # what the comparison would show


def test_measured_times_correct_the_table_only_where_no_text_depends_on_it():
    """Steps with drafts take twice what the table says; plain ones as long as it says."""
    depths = {}
    for free in (True, False):
        state, view = Adaptive().open(CHAIN, COSTS), BatchView(rows_of(1), ignores_drafts=free)
        depths[free] = 0
        for number in range(200):
            shape = Adaptive().plan(state, view)
            depths[free] += shape.max_depth
            took = COSTS.milliseconds(shape.max_nodes) * (1 if number % 2 else 3.5)
            nodes = 1 if number % 2 else shape.max_nodes
            blocks = [block(0, min(3, shape.max_depth), shape.max_depth)]
            Adaptive().learn(state, StepReport(blocks, nodes, shape.max_depth, took))
    assert 0 < depths[True] < 0.6 * depths[False]


def test_rows_that_are_ended_from_outside_are_forgotten():
    run = EngineRun(Engine(pair(0.4)[0], Suffix(8), None, Adaptive(), COSTS), 2, 128)
    for _ in range(40):
        number = run.submit(Request([1, 2, 3, 1, 2], SamplingParams(0), StopConditions(50)))
        run.step()
        run.step()
        run.end(number, "stop")
        run.release(number)
    assert len(run._plan.rows) <= 4


def test_why_nothing_is_drafted_is_told():
    state, view = Adaptive().open(CHAIN, COSTS), BatchView(rows_of(1))
    for _ in range(400):
        step(state, view, [0])
    predicted, why = Adaptive().report(state)
    assert predicted == pytest.approx(COSTS.milliseconds(1) * 400, rel=0.1)
    assert why.startswith("the smallest draft costs")
    assert " 0% of drafted tokens" in why


@pytest.mark.parametrize(
    ("costs", "steps", "says"),
    [
        ({1: 6.0, 2: 12.0}, 7, False),  # too few to tell
        ({1: 6.0, 2: 12.0}, 9, True),
        ({1: 6.0, 2: 6.06}, 9, False),  # 1% of a plain step is no reason
    ],
)
def test_why_is_left_out_where_it_would_be_none(costs, steps, says):
    state, view = Adaptive().open(CHAIN[3:], Costs.of(costs)), BatchView(rows_of(1))
    for _ in range(steps):
        Adaptive().plan(state, view)
        Adaptive().learn(state, StepReport([block(0, 0, 0)], 1, 0, 6.0))
    assert bool(Adaptive().report(state).why_plain) == says


class Turns:
    """Three plain steps behind every proposal."""

    def open(self, shapes, costs):
        return shapes, 0

    def plan(self, state, view):
        shapes, at = state
        return PLAIN if at % 4 else shapes[0]

    def learn(self, state, step):
        return state[0], state[1] + 1

    def report(self, state):
        return PlanReport()


def kept_and_drafted(name):
    target, _ = pair()
    engine = Engine(target, DRAFTERS[name](target), "match", Turns())
    texts, run = decode(engine, PROMPTS[:3], SamplingParams(0), StopConditions(31))
    expected, _ = decode(Engine(target, Root()), PROMPTS[:3], SamplingParams(0), StopConditions(31))
    assert texts == expected
    return run.stats.accepted_per_position


@pytest.mark.parametrize("name", ["chain", "tree", "paths"])
def test_a_draft_model_reads_what_plain_steps_have_emitted(name):
    """The target drafts for itself: all of it is kept."""
    kept = kept_and_drafted(name)
    assert len(set(kept[:3])) == 1, kept
    assert kept[0] > 6


def test_a_draft_model_that_does_not_read_them_is_caught(monkeypatch):
    monkeypatch.setattr("outrider.engine.step.unread", lambda context, draft: 0)
    kept = kept_and_drafted("chain")
    assert kept[2] < 0.8 * 3 * 31 / 8


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_and_coupled_texts_are_plain_decodings(name):
    target, small = pair(0.4)
    drafter = DRAFTERS[name](small)
    for how in (SamplingParams(0), SamplingParams(1.0, seed=4)):
        rule = "match" if how.temperature else None
        if rule and not verifiers.supports(verifiers.get(rule), drafter.kinds, False):
            continue
        engine = Engine(target, drafter, rule, Adaptive(), COSTS)
        texts, _ = decode(engine, PROMPTS, how, StopConditions(24))
        assert texts == decode(Engine(target, Root(), "match"), PROMPTS, how, StopConditions(24))[0]


def chance(drafter, target):
    exact = text_law(llama(vocab_size=4), (1, 3, 2), 3)
    engine = Engine(target, drafter, "block", Adaptive(), COSTS.alone())
    return testing.p_value(engine, exact, (1, 3, 2), 3, 3000)[0]


@pytest.mark.exhaustive
def test_the_law_is_the_targets_and_a_mistake_in_it_is_caught():
    target, small = pair(0.4, 4)
    drafter = DraftModel(small, (1, 1))
    assert chance(drafter, target) > 1e-3
    assert chance(Mislabelled(drafter), target) < 1e-12


def first_text(engine, others):
    """What the first of some requests of one seed writes, and in steps of which sizes."""
    run = EngineRun(engine, 3, 256)
    for prompt in PROMPTS[: 1 + others]:
        run.submit(Request(prompt, SamplingParams(1.0, seed=7), StopConditions(60)))
    run.close()
    return [block.token_ids for block in run if block.request_id == 0]


def test_a_text_that_depends_on_the_plan_does_not_depend_on_its_neighbours(monkeypatch):
    target, small = pair(0.2)
    costs = Costs.of({1: 6.0, 2: 7.0, 5: 11.0}).alone()
    engine = Engine(target, DraftModel(small, (1, 1, 1, 1)), "block", Adaptive(), costs)
    alone = first_text(engine, 0)
    assert len({len(ids) for ids in alone}) > 2
    assert first_text(engine, 2) == first_text(engine, 1) == alone
    monkeypatch.setattr(EngineRun, "_ignores_drafts", lambda run, requests: True)
    assert first_text(engine, 2) != first_text(engine, 0)  # planned together it would


def test_by_name_and_what_is_refused():
    target, small = pair()
    drafter = DraftModel(small, (1,))
    assert isinstance(Engine(target, drafter, planner="adaptive").planner, Adaptive)
    assert isinstance(Engine(target, Root(), planner="adaptive").planner, FixedLength)
    with pytest.raises(UnknownName, match="adaptive"):
        named("clever")
    assert set(PLANNERS) == {"fixed", "adaptive"}
    with pytest.raises(ConfigurationError, match="got no costs"):
        Adaptive().open(CHAIN, None)


@pytest.mark.parametrize(
    ("options", "planner", "depth"),
    [
        (DraftOptions(), "adaptive", 24),
        (DraftOptions(3), "fixed", 3),
        (DraftOptions(branching=(2, 1)), "fixed", None),
    ],
)
def test_who_gives_no_size_gets_the_planner(options, planner, depth):
    made, deep = chosen(None, drafters.get("draft_model"), options)
    assert isinstance(made, PLANNERS[planner])
    assert deep.num_speculative_tokens == depth
    fixed, same = chosen("fixed", drafters.get("draft_model"), options)
    assert isinstance(fixed, FixedLength)
    assert same == options


def test_a_fixed_depth_is_one_that_the_drafter_has():
    target, small = pair()
    engine = Engine(target, DraftModel(small, (1, 1, 1)), planner=FixedLength(2))
    _, run = decode(engine, PROMPTS[:1], SamplingParams(0), StopConditions(12))
    assert run.stats.drafted == 2 * run.stats.steps
    with pytest.raises(ConfigurationError, match=r"one that the drafter has, .*; got 9"):
        decode(
            Engine(target, engine.drafter, planner=FixedLength(9)),
            PROMPTS[:1],
            SamplingParams(0),
            StopConditions(2),
        )


def test_a_row_s_own_shape_does_not_hang_on_what_a_step_took():
    """A first step that reads prompts besides has no time to tell; a row's text may not change."""
    asked = []
    for took, late in ((3.0, False), (None, False), (None, True)):
        state = Adaptive().open(CHAIN, COSTS)
        Adaptive().plan(state, BatchView(rows_of(1), ignores_drafts=False))
        memory = state.rows[0]
        memory.shape = CHAIN[0]
        step = StepReport([block(0, 1, 1)], CHAIN[0].max_nodes, CHAIN[0].max_depth, took, late)
        Adaptive().learn(state, step)
        asked.append(state.rows[0].budget)
    assert asked[0] == asked[1] != asked[2]
