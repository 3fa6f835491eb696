"""The law of what the engine emits, by chi-square with fixed seeds, and a mistake that must show.

The exact law of three tokens comes from transformers' own forward over every prefix.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from outrider import DraftModel, Engine, Limits, Sampling, verifiers
from tiny import decode, llama, pair

VOCAB, LENGTH, ROWS, PROMPT = 4, 3, 3000, (1, 3, 2)
RULES = {
    "chain": ["rejection", "block", "non_iterative", "match"],
    "tree": ["rejection", "traversal", "match"],
}
COUNTS = {"chain": (1, 1), "tree": (2, 2)}


@lru_cache
def exact():
    """Probability of every text of three tokens."""
    model = llama(vocab_size=VOCAB)
    texts = list(product(range(VOCAB), repeat=LENGTH))
    ids = torch.tensor([PROMPT + text for text in texts])
    with torch.inference_mode():
        laws = model(ids).logits[:, len(PROMPT) - 1 : -1].double().softmax(-1)
    each = laws.gather(2, ids[:, len(PROMPT) :, None])[..., 0].prod(1)
    assert float(each.sum()) == pytest.approx(1)
    return each


def p_value(engine, temperature=1.0):
    """Of the emitted texts under the target's law; cells with few expected texts are merged."""
    rows = [Sampling(temperature, seed=seed) for seed in range(ROWS)]
    texts, run = decode(engine, [PROMPT] * ROWS, rows, Limits(LENGTH))
    weights = torch.tensor([VOCAB**2, VOCAB, 1])
    seen = torch.bincount((torch.tensor(texts) * weights).sum(1), minlength=VOCAB**LENGTH)
    expected = exact() * ROWS
    rare = expected < 8
    seen = torch.cat([seen[~rare].double(), seen[rare].sum()[None].double()])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, len(seen) - 1)), run.stats


@pytest.mark.parametrize(("shape", "rule"), [(s, r) for s, rules in RULES.items() for r in rules])
def test_the_law_is_the_targets(shape, rule):
    target, small = pair(0.4, VOCAB)
    drafter = DraftModel(small, COUNTS[shape])
    chance, stats = p_value(Engine(target, drafter, verifiers.get(rule)))
    assert chance > 1e-3
    assert 0.2 < stats.accepted / stats.steps < 1.9  # drafts are accepted and rejected


@pytest.mark.parametrize("shape", COUNTS)
def test_the_law_of_coupled_drafts_is_the_targets(shape):
    target, small = pair(0.4, VOCAB)
    assert p_value(Engine(target, DraftModel(small, COUNTS[shape], coupled=True)))[0] > 1e-3


@dataclass(frozen=True)
class Mislabelled:
    """Draws from one law and declares another: what every exactness test has to catch."""

    drafter: DraftModel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, memory, context, shape):
        draft = self.drafter.propose(memory, context, shape)
        declared = draft.laws.inverse_temperature_B * 0.25
        return draft._replace(laws=draft.laws._replace(inverse_temperature_B=declared))


@pytest.mark.parametrize(("shape", "rule"), [("chain", "block"), ("tree", "traversal")])
def test_a_draft_that_declares_another_law_is_caught(shape, rule):
    target, small = pair(0.4, VOCAB)
    liar = Mislabelled(DraftModel(small, COUNTS[shape]))
    assert p_value(Engine(target, liar, verifiers.get(rule)))[0] < 1e-12
