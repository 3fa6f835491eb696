"""What recent steps correct: a size that takes longer than the table says, and no noise."""

import random

import pytest

from outrider.costs import Costs
from outrider.engine.speculation_policy.estimates import CostModel
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
        pricing.took(nodes, 1, 0, factor * COSTS.milliseconds(nodes))
    plain, more = pricing.of(1, 0, corrected=True)
    return [plain, *(plain + one for one in more)]


@pytest.mark.parametrize("bursts", [False, True])
def test_times_that_vary_correct_nothing(bursts):
    assert corrected({}, 0.3, bursts) == [COSTS.milliseconds(nodes) for nodes in SIZES]


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
        pricing.took(3, 1, 0, 0.0)
    assert pricing.of(1, 0, corrected=True) == pricing.of(1, 0)


@pytest.mark.parametrize(("slow", "other"), [(1, 16), (16, 1)])
def test_what_a_size_takes_of_few_rows_says_nothing_of_many(slow, other):
    """A server's last rows draft, its sixteen rows should not, and the other way round."""
    pricing = CostModel(COSTS, DRAFTS)
    for number in range(120):
        nodes, rows = SIZES[number % 3], (slow, other)[number // 3 % 2]
        factor = 1.4 if nodes == 5 and rows == slow else 1.0
        pricing.took(nodes, rows, 0, factor * pricing.step(nodes, rows, 0))
    assert pricing.step(5, slow, 0, corrected=True) > 1.2 * pricing.step(5, slow, 0)
    assert pricing.step(5, other, 0, corrected=True) < 1.1 * pricing.step(5, other, 0)
