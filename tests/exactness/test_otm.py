"""OTM: acceptance is the bound's where the alphabet is small, the law exact after any step."""

import enumeration as e
import numpy as np
import own_trees
import pytest
import torch

from outrider import verifiers
from outrider.errors import ConfigurationError
from outrider.types import Draft, Outcome, Scores
from outrider.verifiers import tree_walk
from outrider_lab.theory import transport
from outrider_lab.verifiers import otm


def accepted(rule, trees: e.Forest) -> np.ndarray:
    """The probability of a drafted token at the root, of each case."""
    outcome = rule.outcome(trees.draft(), trees.scores())
    kept = trees.weight_R * (1 - outcome.stop_BN[:, 0].numpy())
    return np.bincount(trees.case_R, kept, len(trees.world.cases))


@pytest.mark.parametrize(("vocab", "draws"), [(2, 2), (4, 2), (2, 3)])
def test_it_accepts_what_the_bound_allows(vocab, draws):
    trees = e.separate(e.world(vocab, 1), (draws,))
    world = trees.world
    best = transport.independent(world.target[:, 0], world.draft[:, 0], draws)
    found = accepted(verifiers.get("otm", iterations=400), trees)
    np.testing.assert_allclose(found, best, atol=1e-5)
    usual = accepted(verifiers.get("otm"), trees)
    assert (usual <= best + 1e-12).all()
    assert (best - usual).max() < 0.01
    lesser = accepted(verifiers.get("kseq"), trees)
    assert (usual >= lesser - 1e-9).all()
    assert (usual > lesser + 5e-4).any()


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("scheme", ["separate", "merged", "three"])
def test_few_steps_accept_less_and_stay_exact(iterations, scheme):
    trees = {
        "separate": lambda: e.separate(e.world(3, 2), (2, 1)),
        "merged": lambda: own_trees.merged(e.world(3, 2), 3, 2),
        "three": lambda: e.separate(e.world(3, 1), (3,)),
    }[scheme]()
    rough = verifiers.get("otm", iterations=iterations)
    assert e.errors(rough, trees).max() < 1e-12
    assert (accepted(rough, trees) <= accepted(verifiers.get("otm"), trees) + 1e-6).all()


@pytest.mark.parametrize("cells", [9, 16, 30])
def test_letters_for_some_tokens_and_one_for_all_others(cells):
    """With fewer letters than tokens it is exact, and accepts no more than the whole problem."""
    trees = e.separate(e.world(4, 1), (2,))
    coarse = verifiers.get("otm", cells=cells)
    assert e.errors(coarse, trees).max() < 1e-12
    assert (accepted(coarse, trees) <= accepted(verifiers.get("otm"), trees) + 0.01).all()


def test_placed_children_are_one_tuple_however_many():
    """Each is emitted with its own probability; tuples of twelve letters would be 500,000."""
    trees = e.placed(e.World(16, 1, 3, ("random",)), (12,))
    order = trees.world.draft[:, 0].argsort(-1)[:, -12:]
    best = np.take_along_axis(trees.world.target[:, 0], order, -1).sum(-1)
    np.testing.assert_allclose(accepted(verifiers.get("otm"), trees), best, atol=1e-12)
    assert e.errors(verifiers.get("otm"), trees).max() < 1e-12


class Wrong:
    """OTM with one of its parts changed."""

    def __init__(self, change) -> None:
        self.change = change

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        def verify(law, level):
            with pytest.MonkeyPatch.context() as patch:
                self.change(patch)
                return otm.verify(law, level, 3, 4096)

        return tree_walk.walked(verify, draft, scores)


def _unshared(patch):
    """A plan that was not fitted to the end serves more than p; it must be cut."""
    honest = otm.fitted
    patch.setattr(
        otm, "fitted",
        lambda *a: (plan := honest(*a))._replace(share_BnA=torch.ones_like(plan.share_BnA)),
    )  # fmt: skip


def _left_is_target(patch):
    honest = otm.fitted
    patch.setattr(otm, "fitted", lambda a, n: honest(a, n)._replace(left_BnA=a.target_BnA))


@pytest.mark.parametrize("change", [_unshared, _left_is_target])
def test_mistakes_in_the_plan_are_seen(change):
    trees = e.separate(e.World(4, 1, 3, ("random",)), (2,))
    assert e.errors(Wrong(lambda patch: None), trees).max() < 1e-12
    assert e.errors(Wrong(change), trees).max() > 1e-3


def test_letters_chosen_by_what_was_drawn_are_seen():
    """Which tokens have letters of their own must not depend on the draft."""

    def change(patch):
        honest = otm.Letters.of

        def of(law, level, cells):
            drawn = torch.zeros_like(law).scatter_add(
                -1, level.token_BnK, torch.ones_like(level.token_BnK, dtype=law.dtype)
            )
            found = honest(law, level, 9)
            token = drawn.topk(1, -1).indices
            assert token.shape == found.token_BnA.shape
            each = token[:, :, None].expand(-1, -1, level.most, -1)
            guess = torch.stack([level.guess(k, law) for k in range(level.most)], 2)
            outside, apart = law.scatter(-1, token, 0.0), guess.scatter(-1, each, 0.0)
            target = torch.cat([law.gather(-1, token), outside.sum(-1, keepdim=True)], -1)
            absent = found.guess_BnKA[..., -1:]
            whole = torch.cat([guess.gather(-1, each), apart.sum(-1, keepdim=True), absent], -1)
            return otm.Letters(token, target, whole, outside, apart)

        patch.setattr(otm.Letters, "of", staticmethod(of))

    trees = e.separate(e.World(4, 1, 3, ("random",)), (2,))
    assert e.errors(verifiers.get("otm", cells=9), trees).max() < 1e-12
    assert e.errors(Wrong(change), trees).max() > 1e-3


def test_more_draws_than_tuples_can_be_enumerated_are_refused():
    trees = e.separate(e.World(3, 1, 3, ("random",)), (3,))
    assert e.errors(verifiers.get("otm", cells=27), trees).max() < 1e-12
    with pytest.raises(ConfigurationError, match="3 draws at a node, at least 27 tuples, and cel"):
        accepted(verifiers.get("otm", cells=26), trees)


def test_options_out_of_range_are_refused():
    for options in ({"iterations": 0}, {"cells": 2.5}, {"cells": 4}):
        with pytest.raises(ConfigurationError, match="whole number from"):
            verifiers.get("otm", **options)
