"""A row alone whose drafter foresees: what it may lose, how soon it copies, what it is spared."""

from collections.abc import Sequence

import pytest

from outrider import Engine, EngineRun, Root, SamplingParams, StopConditions
from outrider.costs import Costs
from outrider.drafters import Recall
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.engine.speculation_policy import Adaptive, BatchView, PlannedRow, StepReport
from outrider.engine.speculation_policy.adaptive import LONGEST_REST
from outrider.types import PLAIN, DraftShape
from tiny import PROMPTS, decode, pair

SHAPES = [*(DraftShape(depth, depth + 1, depth, True) for depth in (4, 3, 2, 1)), PLAIN]
COSTS = Costs.of({1: 10.0, 2: 11.3, 3: 13.5, 5: 17.6})
GUESS, COPY = (0.0, 0.3), (0.0, 0.9, 1.75, 2.5, 3.2)


def played(foreseen, kept, steps, costs=COSTS, planner=None):
    """Depths of a row's steps, and the plain steps by which drafts made it later than plain."""
    planner = Adaptive() if planner is None else planner
    state, depths, later = planner.open(SHAPES, costs), [], 0.0
    for at in range(steps):
        shape = PLAIN
        if not state.resting():
            row = PlannedRow(0, Request([1]), 1 + at, lambda at=at: foreseen(at))
            shape = planner.plan(state, BatchView([row]))
        depth = shape.max_depth
        right = min(kept(at), depth)
        took = costs.milliseconds(shape.max_nodes)
        block = StepOutput(0, [5] * (right + 1), right, None, depth)
        planner.learn(state, StepReport([block], shape.max_nodes, depth, took))
        depths.append(depth)
        later += took / costs.milliseconds(1) - (right + 1)
    return depths, later


@pytest.mark.parametrize(("foreseen", "first"), [(GUESS, 0.3), (COPY, 1.6)])
@pytest.mark.parametrize("steps", [30, 64, 400])
def test_a_text_that_refuses_all_loses_one_percent_and_one_bet(foreseen, first, steps):
    depths, later = played(lambda at: foreseen, lambda at: 0, steps)
    assert any(depths)
    assert later <= 0.01 * steps + first


def test_a_dear_guess_waits_until_steps_have_earned_it():
    """Four drafted tokens of a list, none kept, took 1.4 plain steps of 34."""
    dear = Costs.of({1: 1.0, 2: 1.25, 3: 1.5, 6: 2.45})
    told = (0.0, 0.7, 1.2, 1.5, 1.7)
    _, later = played(lambda at: told, lambda at: 0, 34, dear)
    assert later <= 0.03 * 34


def test_what_was_kept_pays_for_more():
    depths, later = played(lambda at: GUESS, lambda at: at % 3 == 0, 60)
    assert sum(depth > 0 for depth in depths) > 20
    assert later < -3


def test_a_sure_copy_is_drafted_whole_and_at_once():
    assert played(lambda at: COPY, lambda at: 4, 1)[0] == [4]
    nothing = (0.0,)
    depths, _ = played(lambda at: COPY if at >= 100 else nothing, lambda at: 4, 120)
    assert not any(depths[:100])
    assert depths[100 + LONGEST_REST :] == [4] * (20 - LONGEST_REST)


class Counted(Sequence):
    """Gains, and how many of them were looked at."""

    def __init__(self, gains):
        self.gains, self.most = gains, 0

    def __getitem__(self, at):
        self.most = max(self.most, at)
        return self.gains[at]

    def __len__(self):
        return len(self.gains)


@pytest.mark.parametrize(("gains", "most"), [((0.0, 0.1, 0.2, 0.3, 0.4), 1), (COPY, 4)])
def test_no_node_is_looked_for_that_cannot_pay(gains, most):
    told = Counted(gains)
    played(lambda at: told, lambda at: 4, 1)
    assert told.most == most


@pytest.mark.parametrize("dear", [False, True])
def test_a_planner_that_rests_is_told_of_every_step_and_texts_are_plain(dear):
    target, _ = pair()
    costs = Costs.of({1: 6.0, 2: 40.0, 17: 90.0} if dear else {1: 6.0, 2: 6.5, 17: 9.0})
    engine = Engine(target, Recall(16), None, Adaptive(), costs)
    how, ends = SamplingParams(0), StopConditions(60)
    expected, _ = decode(Engine(target, Root()), PROMPTS[:1], how, ends)
    run = EngineRun(engine, 1, 256)
    run.submit(Request(PROMPTS[0], how, ends))
    asked = 0
    while not run.done:
        run.step()
        asked += not run._rests
    stats = run.stats
    assert run._plan.steps == stats.engine_steps
    assert not run._plan.rows  # the last step's end was told
    assert decode(engine, PROMPTS[:1], how, ends)[0] == expected
    assert asked < 0.5 * stats.engine_steps if dear else asked > 0.5 * stats.engine_steps
