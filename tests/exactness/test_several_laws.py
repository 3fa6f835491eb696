"""Independent draws of several draft models at one node: exact by enumeration, in float64."""

from itertools import product

import numpy as np
import pytest
import torch

from outrider import verifiers
from outrider.tree import from_parents
from outrider.types import Draft, DrawKind, Laws, Scores

VOCAB = 4


def law(kind, rng):
    """A law over four tokens."""
    p = rng.dirichlet(np.ones(VOCAB))
    if kind == "zeros":
        p[rng.integers(VOCAB)] = 0
    if kind == "one-hot":
        p = np.eye(VOCAB)[rng.integers(VOCAB)]
    return p / p.sum()


def emitted(rule, p, models, owner):
    """Law of the first token: every way to draw, times the rule's own law of its verdict."""
    draws = list(product(range(VOCAB), repeat=len(owner)))
    chances = [[models[o][x] for o, x in zip(owner, d, strict=True)] for d in draws]
    weight = np.prod(chances, 1)
    possible = [d for d, w in zip(draws, weight, strict=True) if w > 0]
    weight = weight[weight > 0]
    batch, count = len(possible), len(owner)
    tokens = torch.tensor([[0, *d] for d in possible])
    kids = torch.tensor([[1 + d.index(x) for x in d] for d in possible])  # repeats share a node
    draws_BNK = torch.full((batch, count + 1, count), -1)
    draws_BNK[:, 0] = kids
    row = torch.full_like(draws_BNK, -1)
    row[:, 0] = torch.tensor(owner)
    inverse = torch.ones(batch, dtype=torch.float64)
    q = torch.from_numpy(np.stack(models)).log().expand(batch, -1, -1)
    draft = Draft(
        tokens,
        from_parents([-1] + [0] * count),
        draws_BNK,
        torch.full_like(draws_BNK, int(DrawKind.WITH)),
        row,
        Laws(q, inverse, greedy="none"),
        frozenset({DrawKind.WITH}),
    )
    target = torch.from_numpy(p).log().expand(batch, count + 1, -1)
    outcome = rule.outcome(draft, Scores(Laws(target, inverse, greedy="none")))
    law = np.zeros(VOCAB)
    stop, following = outcome.stop_BN.numpy(), outcome.next_BNV.numpy()
    law += weight @ (stop[:, :1] * following[:, 0])
    for node in range(1, count + 1):
        np.add.at(law, tokens[:, node].numpy(), weight * stop[:, node])
    return law


@pytest.mark.parametrize("owner", [(0, 1), (0, 0, 1), (0, 1, 1), (0, 1, 2)])
@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot"])
@pytest.mark.parametrize("name", ["rejection", "multi_round", "kseq", "traversal", "match"])
def test_the_first_token_has_the_targets_law(name, kind, owner):
    rng = np.random.default_rng(7)  # a test's own: what others drew is nothing to it
    for _ in range(4):
        p, models = law(kind, rng), [law(kind, rng) for _ in range(3)]
        found = emitted(verifiers.get(name), p, models, owner)
        assert np.abs(found - p).max() < 1e-12


@pytest.mark.parametrize("name", ["rejection", "kseq", "traversal"])
def test_one_law_declared_for_all_is_seen(name):
    # what the first law leaves of p has two tokens: of one alone, a lie changes nothing
    p = np.array([0.4, 0.3, 0.2, 0.1])
    models = [np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.25, 0.25, 0.25, 0.25])]
    rule = verifiers.get(name)

    class Liar:
        def outcome(self, draft, scores):
            return rule.outcome(draft._replace(row_BNK=draft.row_BNK.clamp(max=0)), scores)

    assert np.abs(emitted(Liar(), p, models, (0, 1)) - p).max() > 1e-3
