"""What recent steps correct: a size that takes longer than the table says, and no noise."""

import random

import pytest

from outrider.costs import Costs, Curve
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.engine.speculation_policy import Adaptive, BatchView, PlannedRow, StepReport
from outrider.engine.speculation_policy.prices import CostModel
from outrider.types import PLAIN, DraftShape

COSTS = Costs.of({1: 20.0, 3: 23.0, 5: 26.0})
DRAFTS = [DraftShape(depth, depth + 1, depth, True) for depth in (2, 4)]
SIZES = (PLAIN.max_nodes, *(shape.max_nodes for shape in DRAFTS))


def corrected(slower, noise, bursts=False, steps=400):
    """Prices of a plain step and the drafts, behind steps whose times vary by so much."""
    draws, pricing, slow = random.Random(3), CostModel(COSTS, DRAFTS), 1.0
    for number in range(steps):
        nodes = SIZES[number % 3] if number % 2 else draws.choice(SIZES)
        if bursts and draws.random() < 0.02:
            slow = draws.choice((1.0, 1.6))
        factor = slow * slower.get(nodes, 1.0) * draws.uniform(1 - noise, 1 + noise)
        pricing.observe(nodes, 1, 0, factor * COSTS.milliseconds(nodes))
    plain, more = pricing.of(1, 0, corrected=True)[:2]
    return [plain, *(plain + one for one in more)]


@pytest.mark.parametrize("bursts", [False, True])
def test_times_that_vary_correct_little(bursts):
    told = [COSTS.milliseconds(nodes) for nodes in SIZES]
    assert corrected({}, 0.3, bursts) == pytest.approx(told, rel=0.05)


def test_a_few_steps_that_agree_correct_a_table_that_says_too_little():
    """What one text needs to see that its drafts cost an eighth more, as steps vary at rest."""
    plain, three, _ = corrected({3: 1.12}, 0.12, steps=80)
    assert three / plain > 1.06 * 23 / 20


@pytest.mark.parametrize("bursts", [False, True])
def test_a_size_that_takes_longer_is_corrected_beside_the_others(bursts):
    plain, two, four = corrected({5: 1.3}, 0.1, bursts)
    assert two / plain == pytest.approx(23 / 20, rel=0.08)
    assert 1.1 < four / two / (26 / 23) < 1.4


def test_a_machine_that_is_slow_for_all_sizes_corrects_none():
    slow = dict.fromkeys(SIZES, 2.0)
    assert corrected(slow, 0.05) == [COSTS.milliseconds(nodes) for nodes in SIZES]


def test_a_step_that_only_read_tells_nothing():
    pricing = CostModel(COSTS, DRAFTS)
    for _ in range(40):
        pricing.observe(3, 1, 0, 0.0)
    assert pricing.of(1, 0, corrected=True) == pricing.of(1, 0)


@pytest.mark.parametrize(("slow", "other"), [(1, 16), (16, 1)])
def test_what_a_size_takes_of_few_rows_says_nothing_of_many(slow, other):
    """A server's last rows draft, its sixteen rows should not, and the other way round."""
    pricing = CostModel(COSTS, DRAFTS)
    for number in range(120):
        nodes, rows = SIZES[number % 3], (slow, other)[number // 3 % 2]
        factor = 1.4 if nodes == 5 and rows == slow else 1.0
        pricing.observe(nodes, rows, 0, factor * pricing.step(nodes, rows, 0))
    assert pricing.step(5, slow, 0, corrected=True) > 1.2 * pricing.step(5, slow, 0)
    assert pricing.step(5, other, 0, corrected=True) < 1.1 * pricing.step(5, other, 0)


LONG = Costs({1: {64: Curve.of({1: 20.0, 5: 22.0}), 2048: Curve.of({1: 24.0, 5: 40.0})}})


def test_nodes_that_are_nearly_free_behind_a_short_text_are_dear_behind_a_long_one():
    """On the line through both lengths, and on it behind the longer one."""
    pricing = CostModel(LONG, DRAFTS)
    for length in (64, 1088, 2048, 16448):
        assert pricing.of(1, length).more[-1] == pytest.approx(2 + 14 * (length - 64) / 1984)
    state = Adaptive().open([*DRAFTS, PLAIN], LONG)
    told = [0.0, 0.3, 0.5, 0.65, 0.75]

    def depth(length):
        row = PlannedRow(0, Request([1] * length), length, lambda: told)
        return Adaptive().plan(state, BatchView([row])).max_depth

    assert [depth(length) for length in (64, 16384)] == [4, 0]


def test_rows_that_were_measured_at_one_length_add_what_one_adds_alone():
    four = Costs({4: {64: Curve.of({1: 30.0, 5: 50.0})}})
    both = LONG.merged(four)
    assert both.milliseconds(5, 4, 64) == 50.0
    assert both.milliseconds(5, 4, 2048) == pytest.approx(50.0 + 4 * 18.0)
    assert both.milliseconds(1, 4, 2048) == pytest.approx(30.0 + 4 * 4.0)
    assert four.milliseconds(5, 4, 2048) == 50.0  # nothing is known of it
    assert Costs.parsed(both.text()).milliseconds(1, 4, 2048) == both.milliseconds(1, 4, 2048)


def test_what_runs_show_of_prices_counts_for_the_next_and_fades():
    """Requests of few steps, of whose table five nodes take a third longer than it says."""
    planner, row = Adaptive(), PlannedRow(0, Request([1]), 1)
    factors = []
    for _ in range(12):
        state = planner.open([*DRAFTS, PLAIN], COSTS)
        factors.append(state.prices.step(5, 1, 0, corrected=True) / COSTS.milliseconds(5))
        for nodes in (1, 5, 1, 3) * 2:
            planner.plan(state, BatchView([row]))
            took = (4 / 3 if nodes == 5 else 1) * COSTS.milliseconds(nodes)
            state.prices.observe(nodes, 1, 0, took)
    assert factors[0] == 1.0
    assert 1.15 < factors[-1] < 1.36  # beside steps of which a quarter are slow themselves
    for _ in range(31):  # nobody asks for five nodes any more
        state = planner.open([*DRAFTS, PLAIN], COSTS)
    assert state.prices.step(5, 1, 0, corrected=True) == COSTS.milliseconds(5)
    other = planner.open([*DRAFTS, PLAIN], COSTS.merged(LONG))
    assert other.prices.of(1, 64, corrected=True) == other.prices.of(1, 64)


def test_what_one_text_has_shown_is_no_reason_for_a_dear_draft_in_the_next_one():
    """Behind a long text: five nodes take 3 plain steps, and the text before kept them all."""
    costs = Costs.of({1: 1.0, 2: 1.4, 5: 3.0})
    planner = Adaptive()
    drafts = [DraftShape(depth, depth + 1, depth, True) for depth in (4, 3, 2, 1)]

    def depths(kept, steps):
        state, found = planner.open([*drafts, PLAIN], costs), []
        for _ in range(steps):
            shape = planner.plan(state, BatchView([PlannedRow(0, Request([1]), 1)]))
            depth = shape.max_depth
            block = StepOutput(0, [5] * (1 + min(kept, depth)), min(kept, depth), None, depth)
            planner.learn(state, StepReport([block], shape.max_nodes, depth))
            found.append(depth)
        return found

    good = depths(4, 60)
    assert good[-1] == 4
    bad = depths(0, 30)
    lost = sum(0.4 * depth for depth in bad)  # plain steps: 0.17 of them if nothing held it back
    assert lost <= 0.06 * len(bad)
    again = depths(4, 60)
    assert 4 in again[:20]  # and one that repeats itself is soon drafted for as before
