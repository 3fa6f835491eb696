"""Planners choose what is drafted, and texts do not change: greedy, coupled, and in law."""

import pytest

from outrider import DraftModel, Engine, Limits, Root, Sampling, testing, verifiers
from outrider.engine.blocks import HostBlock
from outrider.engine.planner import PLANNERS, Adaptive, Row, named
from outrider.engine.request import Request
from outrider.errors import ConfigurationError, UnknownName
from outrider.testing import text_law
from outrider.types import PLAIN, Costs, Curve, Shape
from tiny import DRAFTERS, PROMPTS, Mislabelled, decode, llama, pair

COSTS = Costs(Curve.of({1: 6.0, 8: 7.0}), Curve.of({1: 2.0}))
CHAIN = [*(Shape(depth, depth + 1, depth, True) for depth in (4, 3, 2, 1)), PLAIN]
ROW = [Row(0, Request([1]), 1)]


def block(accepted, drafted):
    return HostBlock(0, [5] * (accepted + 1), accepted, None, drafted)


def played(acceptance, steps, costs=COSTS):
    """The depths of a row whose drafts are kept to at most `acceptance` levels in each step."""
    planner, depths = Adaptive(), []
    state = planner.open(CHAIN, costs)
    for _ in range(steps):
        shape = planner.plan(state, ROW)
        depths.append(shape.max_depth)
        kept = min(acceptance, shape.max_depth)
        state = planner.learn(state, [block(kept, shape.max_depth)])
    return depths


def test_good_drafts_become_deep_and_bad_ones_are_switched_off():
    assert played(4, 20)[-1] == 4
    bad = played(0, 300)
    assert sum(bad[:60]) <= 5  # two tokens, one, and two looks
    assert sum(depth > 0 for depth in bad[100:]) == 3  # one look in 65 steps
    assert max(bad[3:]) == 1


def test_drafts_that_become_good_are_taken_up_again():
    planner = Adaptive()
    state = planner.open(CHAIN, COSTS)
    for _ in range(10):
        drafted = planner.plan(state, ROW).max_depth
        state = planner.learn(state, [block(0, drafted)])
    assert planner.plan(state, ROW) == PLAIN
    depths = []
    for _ in range(400):
        depth = planner.plan(state, ROW).max_depth
        depths.append(depth)
        state = planner.learn(state, [block(depth, depth)])
    assert depths[-1] == 4


def test_a_draft_that_costs_as_much_as_it_saves_is_not_used():
    dear = COSTS._replace(draft=Curve.of({1: 6.0}))
    assert sum(played(4, 60, dear)) <= 60 / 16 + 1


class Turns:
    """Three plain steps behind every proposal."""

    def open(self, shapes, costs):
        return shapes, 0

    def plan(self, state, rows):
        shapes, at = state
        return PLAIN if at % 4 else shapes[0]

    def learn(self, state, blocks):
        return state[0], state[1] + 1


def kept_and_drafted(name):
    target, _ = pair()
    engine = Engine(target, DRAFTERS[name](target), "match", Turns())
    texts, run = decode(engine, PROMPTS[:3], Sampling(0), Limits(31))
    expected, _ = decode(Engine(target, Root()), PROMPTS[:3], Sampling(0), Limits(31))
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


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_and_coupled_texts_are_plain_decodings(name):
    target, small = pair(0.4)
    drafter = DRAFTERS[name](small)
    for how in (Sampling(0), Sampling(1.0, seed=4)):
        rule = "match" if how.temperature else None
        if rule and not verifiers.judges(verifiers.get(rule), drafter.kinds, False):
            continue
        engine = Engine(target, drafter, rule, Adaptive(), COSTS)
        texts, _ = decode(engine, PROMPTS, how, Limits(24))
        assert texts == decode(Engine(target, Root(), "match"), PROMPTS, how, Limits(24))[0]


def chance(drafter, target):
    exact = text_law(llama(vocab_size=4), (1, 3, 2), 3)
    engine = Engine(target, drafter, "block", Adaptive(), COSTS)
    return testing.p_value(engine, exact, (1, 3, 2), 3, 3000)[0]


def test_the_law_is_the_targets_and_a_mistake_in_it_is_caught():
    target, small = pair(0.4, 4)
    drafter = DraftModel(small, (1, 1))
    assert chance(drafter, target) > 1e-3
    assert chance(Mislabelled(drafter), target) < 1e-12


def test_by_name_and_what_is_refused():
    target, small = pair()
    assert isinstance(Engine(target, Root(), planner="adaptive", costs=COSTS).planner, Adaptive)
    with pytest.raises(UnknownName, match="adaptive"):
        named("clever")
    assert set(PLANNERS) == {"fixed", "adaptive"}
    with pytest.raises(ConfigurationError, match=r"got no costs; load with planner='adaptive'"):
        Engine(target, DraftModel(small, (1,)), planner="adaptive").run(PROMPTS, Sampling(0))
