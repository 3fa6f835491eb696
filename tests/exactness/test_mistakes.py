"""Negative controls: each documented mistake must be seen by the enumeration that passes the rules.

Each was found in a paper, in public code or in a review. A control first shows that the honest
version passes on the same world, then that the mistake does not.
"""

from dataclasses import replace

import enumeration as e
import numpy as np
import own_trees
import pytest
import torch

from outrider import ops, verifiers
from outrider.types import Draft, DrawKind, Outcome, Scores, Verifier
from outrider.verifiers import block, chain, kseq, tree_walk
from outrider.verifiers.sibling_draws import pick

SEEN = 1e-3  # a mistake moves some sequence by at least this much


def world(vocab: int, depth: int, seed: int = 3) -> e.World:
    return e.World(vocab, depth, seed, ("random",))


def node(target: list[float], draft: list[float]) -> e.World:
    """One prefix with these laws: some mistakes hide where one token has all the surplus."""
    found = world(len(target), 1)
    found.target[:], found.draft[:] = target, draft
    return found


SPREAD = ([0.1, 0.2, 0.3, 0.4], [0.5, 0.25, 0.15, 0.1])


def honest(rule: str | Verifier, trees: e.Forest) -> None:
    rule = verifiers.get(rule) if isinstance(rule, str) else rule
    assert e.errors(rule, trees).max() < 1e-12


def caught(rule: str | Verifier, trees: e.Forest) -> None:
    rule = verifiers.get(rule) if isinstance(rule, str) else rule
    assert e.errors(rule, trees).max() > SEEN


class Rule:
    """A top-down rule from its decision at a node, for mistakes in the rule itself."""

    def __init__(self, verify) -> None:
        self.verify = verify

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        return tree_walk.walked(self.verify, draft, scores)


# What the draft says about itself


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_a_top_token_declared_as_sampled(rule, counts):
    trees = e.placed(world(3, len(counts)), counts)
    honest(rule, trees)
    lie = replace(
        trees, kinds=frozenset({DrawKind.WITHOUT}), kind_RNK=np.array([[[DrawKind.WITHOUT]]])
    )
    caught(rule, lie)


@pytest.mark.parametrize("rule", ["rejection", "block", "non_iterative", "traversal"])
def test_a_filtered_sample_with_the_unfiltered_law(rule):
    full, cut = world(4, 2), world(4, 2)
    cut.draft = np.where(cut.draft >= np.sort(cut.draft, -1)[..., -2:-1], cut.draft, 0)
    cut.draft /= cut.draft.sum(-1, keepdims=True)
    trees = e.without(cut, (1, 1))
    honest(rule, trees)
    caught(rule, replace(trees, law_RNV=full.draft[trees.case_R[:, None], trees.code_RN.clip(0)]))


def test_an_unlikely_token_dropped_after_it_was_drawn():
    honest("rejection", e.stopped(world(3, 3), 3))
    honest("block", e.stopped(world(3, 3), 3))
    caught("rejection", e.stopped(world(3, 3), 3, drop=True))
    caught("block", e.stopped(world(3, 3), 3, drop=True))


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_siblings_sorted_by_draft_probability(rule):
    trees = e.without(node(*SPREAD), (3,))
    honest(rule, trees)
    q = trees.world.draft[0, 0][trees.token_RN[:, 1:]]
    caught(rule, replace(trees, draws_RNK=_root(trees, 1 + np.argsort(-q, -1))))


def _root(trees: e.Forest, kids_RK: np.ndarray) -> np.ndarray:
    draws = trees.draws_RNK.copy()
    draws[:, 0] = kids_RK
    return draws


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_children_without_replacement_verified_as_if_with(rule):
    trees = e.without(node(*SPREAD), (3,))
    caught(
        rule,
        replace(trees, kinds=frozenset({DrawKind.WITH}), kind_RNK=np.array([[[DrawKind.WITH]]])),
    )


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_a_beam_that_forgets_its_first_child(rule):
    """Jeon's theorem 3.2 says "any subsequence" of the kept children; it must be a prefix."""
    trees = own_trees.beam(world(3, 2), 3, 2)
    honest(rule, trees)
    draws = trees.draws_RNK.copy()
    two = (draws[:, 0, 1] >= 0).nonzero()[0]
    draws[two, 0, :-1], draws[two, 0, -1] = draws[two, 0, 1:], -1
    caught(rule, replace(trees, draws_RNK=draws))


@pytest.mark.parametrize("rule", ["kseq", "multi_round", "otm"])
def test_a_path_that_is_kept_only_if_it_is_new(rule):
    """A repeated path adds no node, but its draw counts: the residual is what K draws leave."""
    trees = own_trees.merged(world(3, 2), 3, 2)
    honest(rule, trees)
    draws = trees.draws_RNK.copy()
    for k in range(1, 3):
        again = (draws[..., :k] == draws[..., k : k + 1]).any(-1)
        draws[..., k] = np.where(again, -1, draws[..., k])
    caught(rule, replace(trees, draws_RNK=draws))


@pytest.mark.parametrize("rule", ["hub", "rejection", "traversal"])
def test_a_hub_that_declares_the_law_with_its_placed_tokens(rule):
    trees = e.hub(world(4, 1), (3,))
    honest(rule, trees)
    caught(rule, replace(trees, law_RNV=None))


# What the rule does


class ResidualFromTarget:
    def __init__(self, rule: str) -> None:
        self.rule = verifiers.get(rule)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        right = self.rule.outcome(draft, scores)
        return right._replace(next_BNV=scores.laws.logits_BRV.softmax(-1))


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal", "hub", "multi_round"])
def test_the_next_token_drawn_from_the_target_after_a_refusal(rule):
    caught(ResidualFromTarget(rule), e.without(world(3, 2), (1, 1)))


class FirstFailure:
    """Block verification as a scan that stops at the first failure."""

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        line = chain.read(draft, scores)
        weight, passing, guess = block._weights(line)
        left = ops.residual(line.law_BNV * weight[..., None], guess)
        return chain.outcome(line, passing[:, 1:], left)


def test_block_verification_that_stops_at_the_first_failure():
    trees = e.without(world(3, 3), (1, 1, 1))
    honest("block", trees)
    caught(FirstFailure(), trees)


def _verify(law, level, *, mask="token", update="before", inverted=False):
    """Recursive rejection with one slip."""
    here, favour, against = law, [], []
    base = level.guess(0, law)
    gone = torch.zeros_like(law, dtype=torch.bool)
    for k in range(level.most):
        token = level.token_BnK[..., k]
        guess = base.masked_fill(gone, 0)
        guess = guess / guess.sum(-1, keepdim=True).clamp(min=1e-300)
        p, q = pick(here, token), pick(guess, token)
        if inverted:  # refuse iff q > p and u > 1 - p / q
            favour.append(torch.where(q > p, (q - p), q))
            against.append(q)
        else:
            favour.append(p)
            against.append(q)
        index = token if mask == "token" else torch.full_like(token, k)
        gone = gone.scatter(-1, index[..., None], True)
        if update == "after":
            guess = base.masked_fill(gone, 0)
            guess = guess / guess.sum(-1, keepdim=True).clamp(min=1e-300)
        here = ops.residual(here, guess)
    return tree_walk.node_decision(favour, against, here)


def test_the_copy_of_recursive_rejection_is_right_before_it_is_broken():
    honest(Rule(_verify), e.without(node(*SPREAD), (3,)))


def test_the_mask_written_at_the_list_index():
    """Jeon's algorithm 6 as printed: Phi[i] instead of Phi[token]."""
    trees = e.without(node(*SPREAD), (3,))
    caught(Rule(lambda law, level: _verify(law, level, mask="index")), trees)


def test_the_draft_masked_before_the_residual_is_formed():
    trees = e.without(node(*SPREAD), (3,))
    caught(Rule(lambda law, level: _verify(law, level, update="after")), trees)


def test_the_inverted_test_of_the_slides():
    trees = e.without(world(3, 1), (1,))
    caught(Rule(lambda law, level: _verify(law, level, inverted=True)), trees)


def test_a_division_factor_below_its_root(monkeypatch):
    """ "Any factor in [1, K]" is not enough: the residual goes negative below the root."""
    trees = e.separate(node([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), (3,))
    honest("kseq", trees)
    exact = kseq.division_factor
    with monkeypatch.context() as patch:
        patch.setattr(kseq, "division_factor", lambda p, q, n: 0.5 + 0.5 * exact(p, q, n))
        caught("kseq", trees)
    with monkeypatch.context() as patch:  # above the root it is lossless and accepts less
        patch.setattr(kseq, "division_factor", lambda p, q, n: exact(p, q, n) * 0 + n)
        honest("kseq", trees)


class StaleBudget:
    """Traversal that forgets to lower a node's weight after a refused child."""

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        right = verifiers.get("traversal").outcome(draft, scores)
        wrong = verifiers.get("rejection").outcome(draft, scores)
        return right._replace(stop_BN=wrong.stop_BN)


def test_traversal_with_the_weights_of_another_rule():
    trees = e.without(world(3, 2), (2, 2))
    honest("traversal", trees)
    caught(StaleBudget(), trees)


@pytest.mark.parametrize("name", [n for n, r in verifiers.VERIFIERS.items() if not r.exact])
def test_lossy_rules_are_lossy(name):
    caught(name, e.without(world(4, 2), (1, 1)))
