"""The law of what the engine emits, by chi-square with fixed seeds, and a mistake that must show.

The exact law of three tokens comes from transformers' own forward over every prefix.
"""

from functools import lru_cache

import pytest

from outrider import DraftModel, Engine, testing, verifiers
from outrider.testing import text_law
from tiny import Mislabelled, llama, pair

VOCAB, LENGTH, ROWS, PROMPT = 4, 3, 3000, (1, 3, 2)
RULES = {
    "chain": ["rejection", "block", "non_iterative", "match"],
    "tree": ["rejection", "traversal", "match"],
}
COUNTS = {"chain": (1, 1), "tree": (2, 2)}


@lru_cache
def exact():
    """Probability of every text of three tokens."""
    each = text_law(llama(vocab_size=VOCAB), PROMPT, LENGTH)
    assert float(each.sum()) == pytest.approx(1)
    return each


def p_value(engine):
    """Of the emitted texts under the target's law."""
    chance, run = testing.p_value(engine, exact(), PROMPT, LENGTH, ROWS)
    return chance, run.stats


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("shape", "rule"), [(s, r) for s, rules in RULES.items() for r in rules])
def test_the_law_is_the_targets(shape, rule):
    target, small = pair(0.4, VOCAB)
    drafter = DraftModel(small, COUNTS[shape])
    chance, stats = p_value(Engine(target, drafter, verifiers.get(rule)))
    assert chance > 1e-3
    assert 0.2 < stats.accepted / stats.steps < 1.9  # drafts are accepted and rejected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", COUNTS)
def test_the_law_of_coupled_drafts_is_the_targets(shape):
    target, small = pair(0.4, VOCAB)
    assert p_value(Engine(target, DraftModel(small, COUNTS[shape], shared_noise=True)))[0] > 1e-3


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("shape", "rule"), [("chain", "block"), ("tree", "traversal")])
def test_a_draft_that_declares_another_law_is_caught(shape, rule):
    target, small = pair(0.4, VOCAB)
    liar = Mislabelled(DraftModel(small, COUNTS[shape]))
    assert p_value(Engine(target, liar, verifiers.get(rule)))[0] < 1e-12
