"""What `--verbose` says of a planner."""

from outrider import DraftModel, Engine
from outrider.cli import generate
from outrider.costs import Costs, Curve
from outrider.stats import Stats
from tiny import pair


def test_the_costs_and_the_planner_are_named():
    target, small = pair()
    drafter = DraftModel(small, (1, 1))
    costs = Costs({1: {64: Curve.of({1: 5.0, 3: 7.25})}})
    assert generate.priced(Engine(target, drafter)) == [
        "planner fixed: 2 drafted tokens in every step"
    ]
    assert generate.priced(Engine(target, drafter, planner="adaptive", costs=costs)) == [
        "planner adaptive",
        "  ms of a step at 64 tokens: plain 5.0, 2 drafted 7.2",
    ]


def test_what_was_chosen_and_why_nothing_was():
    assert generate.chosen(Stats(sizes={5: 2, 1: 3})) == ["steps: 3 plain, 2 of 4 drafted"]
    off = Stats(sizes={1: 30}, predicted_ms=120.0, seconds=0.25, why_plain="it is dear")
    assert generate.chosen(off) == [
        "steps: 30 plain; predicted 120 ms, took 250 ms",
        "speculation is off because it is dear",
    ]
