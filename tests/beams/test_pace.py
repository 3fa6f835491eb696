"""How far ahead a search scores follows what its calls have shown."""

import pytest

from outrider.engine.search.pace import AGAIN, FIRST, PROBES, Pace


def run(pace, answered, cost, calls=200):
    """Depths chosen when a call of depth d answers `answered(d)` steps and takes `cost(d)`."""
    depths = []
    for _ in range(calls):
        depth = pace.depth()
        depths.append(depth)
        pace.learn(depth, answered(depth), cost(depth))
    return depths


def test_ahead_as_far_as_it_pays():
    flat = run(Pace(4), lambda depth: depth + 1, lambda depth: 1 + 0.01 * depth)
    assert flat[2 * PROBES :].count(4) > 150  # always right, at no cost


def test_not_ahead_where_it_does_not_pay():
    depths = run(Pace(4), lambda depth: 1, lambda depth: 1 + 0.1 * depth)
    settled = depths[2 * PROBES :]
    assert settled.count(0) > 0.9 * len(settled)
    assert FIRST in settled[: AGAIN + 1]  # and now and then it looks again
    assert sum(1 + 0.1 * depth for depth in depths) < len(depths) / 0.97  # at a small price


def test_a_middle_depth():
    """Two steps ahead are always right, the third never."""
    depths = run(Pace(4), lambda depth: min(depth, 2) + 1, lambda depth: 1 + 0.2 * depth)
    assert depths[2 * PROBES :].count(2) > 150


def test_it_comes_back_when_it_pays_again():
    pace = Pace(4)
    run(pace, lambda depth: 1, lambda depth: 1 + 0.1 * depth)
    depths = run(pace, lambda depth: depth + 1, lambda depth: 1 + 0.1 * depth, 1000)
    assert depths[-100:].count(4) > 80


def test_expected_steps_of_smaller_depths():
    """Runs of 1, 4, 2 and 3 steps take 1, 2, 1 and 2 calls that look one step ahead.

    Two steps ahead they take 1, 4 / 3, 1 and 1: nothing ended the run of 4 but its call.
    """
    pace = Pace(3)
    for steps in (1, 4, 2, 3):
        pace.learn(3, steps, 1.0)
    assert [pace.expected(depth) for depth in range(4)] == pytest.approx([1, 10 / 6, 30 / 13, 2.5])


def test_what_was_never_tried_is_as_likely_as_what_was():
    pace = Pace(4)
    for steps in (2, 2, 1, 2):
        pace.learn(1, steps, 1.0)
    assert pace.expected(1) == pytest.approx(7 / 4)
    assert pace.expected(3) == pytest.approx(7 / 4 + 0.75**2 + 0.75**3)
