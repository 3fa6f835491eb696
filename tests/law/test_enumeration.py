"""Every exact rule keeps the target's law to 1e-12, and three classic mistakes do not."""

import numpy as np
import pytest
import torch
from enumeration import (
    CASES,
    World,
    drafts_fixed,
    drafts_iid,
    drafts_without,
    joint,
    prefix_of,
    scores_of,
    truth,
)

from outrider import verifiers
from outrider.types import Draft, Kind, Laws, Outcome, Scores
from outrider.verifiers.rejection import Rejection

CHAINS = [(1,), (1, 1), (1, 1, 1)]
TREES = [(2, 2), (3, 2), (2, 2, 1)]
MAKERS = {Kind.WITHOUT: drafts_without, Kind.WITH: drafts_iid, Kind.FIXED: drafts_fixed}


def combinations():
    for name, rule in verifiers.VERIFIERS.items():
        if not rule.exact:
            continue
        for kind, make in MAKERS.items():
            for counts in CHAINS + TREES:
                if not verifiers.judges(rule, frozenset({kind}), max(counts) == 1):
                    continue
                size = 3 if len(counts) == 3 or sum(counts) > 4 else 4
                if kind is Kind.WITH and counts in ((3, 2), (2, 2, 1)):
                    size = 2
                yield pytest.param(rule, make, counts, size, id=f"{name}-{kind.name}-{counts}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rule", "make", "counts", "size"), list(combinations()))
def test_law_is_the_targets(rule, make, counts, size, case):
    world = World(size, seed=hash((counts, size)) % 1000, case=case)
    draft, weights = make(world, counts)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    error = np.abs(joint(world, rule, draft, weights) - truth(world, len(counts) + 1)).max()
    assert error < 1e-12


def test_acceptance_of_one_token_is_one_minus_total_variation():
    world = World(4, seed=5)
    draft, weights = drafts_without(world, (1,))
    outcome = verifiers.get("rejection").outcome(draft, scores_of(world, draft))
    accepted = float((weights * outcome.stop_BN[:, 1]).sum())
    p, q = world.law("target", ()), world.law("draft", ())
    assert accepted == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)


# Negative controls: each classic mistake must be seen by the same test.


def _error(world, rule, draft, weights, length):
    return np.abs(joint(world, rule, draft, weights) - truth(world, length)).max()


@pytest.mark.parametrize("counts", [(1, 1), (2, 1)])
def test_argmax_draft_declared_as_softmax_is_caught(counts):
    world = World(3, seed=1)
    placed, weights = drafts_fixed(world, counts)
    drawn, _ = drafts_without(world, counts)
    row_table = torch.where(
        placed.draws_BNK >= 0, torch.arange(placed.tree.nodes)[None, :, None], -1
    )
    lie = placed._replace(
        laws=_laws_along(world, placed),
        kind_BNK=torch.full_like(placed.kind_BNK, int(Kind.WITHOUT)),
        kinds=frozenset({Kind.WITHOUT}),
        row_BNK=row_table,
    )
    assert drawn.kinds == lie.kinds
    assert _error(world, verifiers.get("rejection"), lie, weights, len(counts) + 1) > 0.01


def _laws_along(world: World, draft: Draft) -> Laws:
    tokens = dict(enumerate(draft.tokens_BN[0].tolist()))
    rows = [world.law("draft", prefix_of(draft.tree, tokens, n)) for n in range(draft.tree.nodes)]
    logits = torch.tensor(np.log(np.array(rows)))[None]
    return Laws(logits, torch.ones(1, dtype=torch.float64), greedy="none")


class _ResidualFromTarget(Rejection):
    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        right = super().outcome(draft, scores)
        return right._replace(next_BNV=scores.laws.logits_BRV.softmax(-1))


@pytest.mark.parametrize("counts", [(1,), (1, 1), (2, 2)])
def test_residual_drawn_from_the_target_is_caught(counts):
    world = World(3, seed=2)
    draft, weights = drafts_without(world, counts)
    assert _error(world, _ResidualFromTarget(), draft, weights, len(counts) + 1) > 0.01


@pytest.mark.parametrize("counts", [(1,), (1, 1)])
def test_filtered_sample_with_unfiltered_law_is_caught(counts):
    class Filtered(World):
        def law(self, side, prefix):
            law = super().law(side, prefix)
            if side == "draft" and self.cut:
                law = np.where(law >= np.sort(law)[-2], law, 0)
                law = law / law.sum()
            return law

    world = Filtered(4, seed=3)
    world.cut = True
    draft, weights = drafts_without(world, counts)
    world.cut = False
    lie, lie_laws = draft, []
    for row in range(draft.tokens_BN.shape[0]):
        tokens = dict(enumerate(draft.tokens_BN[row].tolist()))
        lie_laws.append(
            [world.law("draft", prefix_of(draft.tree, tokens, n)) for n in range(draft.tree.nodes)]
        )
    lie = draft._replace(
        laws=draft.laws._replace(logits_BRV=torch.tensor(np.array(lie_laws)).log())
    )
    assert _error(world, verifiers.get("rejection"), draft, weights, len(counts) + 1) < 1e-12
    assert _error(world, verifiers.get("rejection"), lie, weights, len(counts) + 1) > 0.01
