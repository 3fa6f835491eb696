"""How far ahead a search scores follows what its calls have shown."""

import pytest

from outrider.engine.beam_search.lookahead import (
    KEPT,
    SHARE,
    LookaheadDepth,
    LookaheadDepths,
)


def run(pace, answered, cost, calls=200):
    """Depths chosen when a call of depth d answers `answered(d)` steps and takes `cost(d)`."""
    depths = []
    for _ in range(calls):
        depth = pace.depth()
        depths.append(depth)
        pace.learn(depth, answered(depth), cost(depth))
    return depths


def test_ahead_as_far_as_it_pays():
    flat = run(LookaheadDepth(4), lambda depth: depth + 1, lambda depth: 1 + 0.01 * depth)
    assert flat.count(4) > 150  # always right, at no cost


@pytest.mark.parametrize("dear", [0.1, 1.0, 6.0])
def test_not_ahead_where_it_does_not_pay(dear):
    depths = run(LookaheadDepth(4), lambda depth: 1, lambda depth: 1 + dear * depth)
    assert depths.count(0) > 0.85 * len(depths)
    first, *later = [at for at, depth in enumerate(depths) if depth]
    assert first == 1
    assert later or dear > 1  # now and then it looks again
    spent = len(depths) + dear * sum(depths)
    assert spent <= len(depths) + SHARE * spent + max(dear, 1)  # at a small price


def test_what_comes_before_the_first_call_ahead_counts():
    """Calls ahead answer two steps in nearly the time of one, but the first of a search comes
    behind a wait as long as nine calls: that pays in long searches."""
    chosen = {}
    for steps in (8, 400):
        pace = LookaheadDepth(1)
        for _ in range(4000 // steps):
            pace.begin(steps)
            made, ready = 0, False
            while made < steps:
                depth = pace.depth(ready)
                wait = 0.0 if ready else 9.0 * depth
                pace.learn(depth, 1 + depth, 1.0 + 0.2 * depth, 0.0, wait)
                made, ready = made + 1 + depth, ready or depth > 0
        chosen[steps] = pace.chosen
        assert pace.lost <= SHARE * pace.spent + 12
    assert chosen == {8: 0, 400: 1}


def test_searches_go_on_with_what_others_of_their_kind_have_learned():
    paces = LookaheadDepths()
    with paces.lent(4, 5, 1) as pace:
        pace.learn(0, 1, 1.0)
        with paces.lent(4, 5, 1) as other:  # at the same time
            assert other.calls == 0
    for kind, calls in (((4, 5, 1), 1), ((4, 2, 1), 0), ((4, 5, 2), 0)):
        with paces.lent(*kind) as pace:
            assert pace.calls == calls


def test_a_middle_depth():
    """Two steps ahead are always right, the third never."""
    depths = run(LookaheadDepth(4), lambda depth: min(depth, 2) + 1, lambda depth: 1 + 0.2 * depth)
    assert depths.count(2) > 150


def test_it_stops_soon_where_it_no_longer_pays():
    pace = LookaheadDepth(4)
    run(pace, lambda depth: depth + 1, lambda depth: 1 + 0.6 * depth)
    assert pace.chosen == 4
    depths = run(pace, lambda depth: 1, lambda depth: 1 + 0.6 * depth, 32)
    assert not any(depths[20:24])
    assert len(pace.answered) == KEPT


def test_it_comes_back_when_it_pays_again():
    pace = LookaheadDepth(4)
    run(pace, lambda depth: 1, lambda depth: 1 + 0.1 * depth)
    depths = run(pace, lambda depth: depth + 1, lambda depth: 1 + 0.1 * depth, 1000)
    assert depths[-100:].count(4) > 80


def test_expected_steps_of_smaller_depths():
    """Runs of 1, 4, 2 and 3 steps take 1, 2, 1 and 2 calls that look one step ahead.

    Two steps ahead they take 1, 4 / 3, 1 and 1: nothing ended the run of 4 but its call.
    """
    pace = LookaheadDepth(3)
    for steps in (1, 4, 2, 3):
        pace.learn(3, steps, 1.0)
    assert [pace.expected(depth) for depth in range(4)] == pytest.approx([1, 10 / 6, 30 / 13, 2.5])


def test_what_was_never_tried_is_as_likely_as_what_was():
    pace = LookaheadDepth(4)
    for steps in (2, 2, 1, 2):
        pace.learn(1, steps, 1.0)
    assert pace.expected(1) == pytest.approx(7 / 4)
    assert pace.expected(3) == pytest.approx(7 / 4 + 0.75**2 + 0.75**3)
