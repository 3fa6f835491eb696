"""Traversal verification (Weng et al. 2025): verify a tree from its leaves to its root.

Block verification for trees; on a chain it is block verification. Written as a mass m = w p at each
node, where w is the chance with which the node may be kept (1 at the root):

    for child x of v in draw order, drawn from q (one-hot if placed):
        verify the subtree of x with w_x = min(1, m(x) / q(x)); if anything there is kept, done
        m <- (m - q)+ / (S + 1 - w),  w <- S / (S + 1 - w),  S = sum (m - q)+
    keep v with probability w and emit y ~ m / w; else v is refused

Weights and masses depend on the draft alone, never on a test, so they are computed for all nodes of
a level at once, from the root down. Then every node tests u_v < w_v with the uniform of node v, and
the first node in post-order that passed is where the walk stops. A draw that repeats an earlier
one (merged i.i.d. paths) has no mass left and needs no special case.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.ops.reference.probs import EMPTY
from outrider.types import UNCOUPLED, Draft, DrawKind, Draws, Outcome, Scores, Tree, Verdict
from outrider.verifiers import chain
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.sibling_draws import SiblingDraws, inner, pick, rows


def _weights(draft: Draft, law_BNV: Tensor, siblings: SiblingDraws) -> tuple[Tensor, list[Tensor]]:
    """w [B, N] of each node after all its children were refused, and m [B, n, V] level by level."""
    weight_BN = torch.zeros_like(law_BNV[..., 0])
    weight_BN[:, 0] = 1
    masses = []
    empty = 0.0 if law_BNV.dtype is torch.float64 else EMPTY
    for start, end in inner(draft.tree):
        level, w = siblings.at(slice(start, end)), weight_BN[:, start:end]
        law = law_BNV[:, start:end]
        mass = law * w[..., None]
        for k in range(level.most):
            guess = level.guess(k, law)
            share, drawn = pick(mass, level.token_BnK[..., k]), pick(guess, level.token_BnK[..., k])
            chance = (share / torch.where(drawn > 0, drawn, 1.0)).clamp(max=1)
            chance = torch.where(drawn > 0, chance, (share > 0).to(chance.dtype))
            chance = torch.where(level.there_BnK[..., k], chance, 0.0)
            kid = level.kid_BnK[..., k].clamp(min=0)
            weight_BN = weight_BN.scatter_reduce(1, kid, chance, "amax")
            rest = (mass - guess).clamp_(min=0)
            surplus = rest.sum(-1)
            whole = surplus + (1 - w)
            some = whole > empty
            scale = torch.where(some, whole, 1.0)
            mass = torch.where(some[..., None], rest / scale[..., None], mass)
            w = torch.where(some, surplus / scale, w)
        weight_BN = torch.cat([weight_BN[:, :start], w, weight_BN[:, end:]], 1)
        masses.append(mass)
    start = draft.tree.levels[-2]
    masses.append(law_BNV[:, start:] * weight_BN[:, start:, None])
    return weight_BN, masses


def _first_passed(tree: Tree, siblings: SiblingDraws, passed_BN: Tensor) -> Tensor:
    """[B]: the first node in post-order that passed its test; the root always does."""
    node = torch.arange(passed_BN.shape[1], device=passed_BN.device)
    found_BN = torch.where(passed_BN, node, -1)
    for start, end in reversed(inner(tree)):
        level = siblings.at(slice(start, end))
        best = found_BN[:, start:end]
        for k in reversed(range(level.most)):  # the earliest child is written last
            below = found_BN.gather(1, level.kid_BnK[..., k].clamp(min=0))
            best = torch.where(level.there_BnK[..., k] & (below >= 0), below, best)
        found_BN = torch.cat([found_BN[:, :start], best, found_BN[:, end:]], 1)
    return found_BN[:, 0]


def path_to(tree: Tree, node_B: Tensor) -> Tensor:
    """[B, D]: the nodes from the root (left out) to a node, -1 padded."""
    batch = node_B.shape[0]
    ancestors = rows(tree.ancestors_BNN.expand(batch, -1, -1), node_B[:, None])[:, 0]
    depth = tree.depth_BN.expand(batch, -1)
    node = torch.arange(depth.shape[1], device=node_B.device).expand(batch, -1)
    table = torch.full((batch, tree.max_depth + 1), -1, dtype=torch.int64, device=node_B.device)
    at, what = torch.where(ancestors, depth, 0), torch.where(ancestors, node, -1)
    return table.scatter_reduce(1, at, what, "amax")[:, 1:]


@dataclass(frozen=True)
class Traversal:
    """Exact on trees of placed, with- and without-replacement children in any mixture."""

    name: ClassVar[str] = "traversal"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = UNCOUPLED
    chain_only: ClassVar[bool] = False

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count, next token and overlap along the kept path."""
        tree = draft.tree
        if chain.is_plain(draft):
            return BlockVerifier()(draft, scores, draws)
        law = ops.probs(scores.laws)
        siblings = SiblingDraws(draft, law)
        weight, masses = _weights(draft, law, siblings)
        uniform = noise.accept_uniforms(draws, law.shape[1], siblings.most)[..., 0]
        passed = uniform < weight
        passed[:, 0] = True
        stop = _first_passed(tree, siblings, passed)
        path = path_to(tree, stop)
        left = masses[0][:, 0]
        for start, mass in zip(tree.levels[1:-1], masses[1:], strict=True):
            inside = (stop >= start)[:, None]
            index = (stop - start).clamp(0, mass.shape[1] - 1)[:, None]
            left = torch.where(inside, rows(mass, index)[:, 0], left)
        following = ops.draw(left, noise.residual_race(draws, law.shape[-1]))
        overlap = None
        if siblings.laws_BRV is not None:
            on_path = torch.cat([torch.zeros_like(path[:, :1]), path[:, :-1]], 1)
            level, here = siblings.at(on_path.clamp(min=0)), rows(law, on_path.clamp(min=0))
            shared = torch.minimum(here, level.guess(0, here)).sum(-1)
            overlap = torch.where((on_path >= 0) & level.there_BnK[..., 0], shared, torch.nan)
        return Verdict(path, (path >= 0).sum(1), following, overlap)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """Stopping at v: v passes and every node before it in post-order fails."""
        law = ops.probs(scores.laws)
        siblings = SiblingDraws(draft, law)
        weight, masses = _weights(draft, law, siblings)
        fail_BN = 1 - weight  # of the whole subtree, once its level is done
        for start, end in reversed(inner(draft.tree)):
            level, fail = siblings.at(slice(start, end)), fail_BN[:, start:end]
            for below in _fails(level.kid_BnK, fail_BN):
                fail = fail * below
            fail_BN = torch.cat([fail_BN[:, :start], fail, fail_BN[:, end:]], 1)
        reach_BN = torch.zeros_like(fail_BN)
        reach_BN[:, 0] = 1
        for start, end in inner(draft.tree):
            level, left = siblings.at(slice(start, end)), reach_BN[:, start:end]
            for k, below in enumerate(_fails(level.kid_BnK, fail_BN)):
                kid = level.kid_BnK[..., k]
                arrive = torch.where((kid >= 0) & ~_repeated(level.kid_BnK, k), left, 0.0)
                reach_BN = reach_BN.scatter_add(1, kid.clamp(min=0), arrive)
                left = left * below
            reach_BN = torch.cat([reach_BN[:, :start], left, reach_BN[:, end:]], 1)
        following = torch.cat(masses, 1)
        total = following.sum(-1, keepdim=True)
        return Outcome(reach_BN * weight, following / torch.where(total > 0, total, 1.0))


def _repeated(kid_BnK: Tensor, k: int) -> Tensor:
    """Whether draw k carries the child of an earlier draw."""
    return (kid_BnK[..., :k] == kid_BnK[..., k : k + 1]).any(-1)


def _fails(kid_BnK: Tensor, fail_BN: Tensor) -> list[Tensor]:
    """For each draw, the probability that nothing in its subtree is kept (1 if seen or absent)."""
    found = []
    for k in range(kid_BnK.shape[2]):
        below = fail_BN.gather(1, kid_BnK[..., k].clamp(min=0).flatten(1)).view(kid_BnK.shape[:2])
        seen = (kid_BnK[..., k] < 0) | _repeated(kid_BnK, k)
        found.append(torch.where(seen, 1.0, below))
    return found
