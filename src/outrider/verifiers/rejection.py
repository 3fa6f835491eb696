"""Rejection, from the root down: speculative sampling on chains, recursive rejection on trees.

Chain, token level (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2): accept x_i
iff u_i q_i(x_i) < p_i(x_i); at the first rejection emit y ~ norm((p_i - q_i)+), after the last
acceptance y ~ p. Tree (Jeon et al. 2024, Algorithm 6, with its slips mended): the same test for
each child in draw order, against the residual p left by its earlier siblings and against q without
their tokens. Children drawn with replacement make it multi-round rejection (SpecInfer); a placed
child is verified with a one-hot q.

This is the formula, and what tests hold others to. What runs in a step, where a backend has it, is
the same test in `ops/cpu/rejection_walk.py`, or in `ops/triton/chain.py` and `tree.py`, found by
`outrider.engine.step.run_kernel`.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outrider import ops
from outrider.types import UNCOUPLED, Draft, DrawKind, Draws, Outcome, Scores, Verdict
from outrider.verifiers import chain, tree_walk
from outrider.verifiers.sibling_draws import SiblingLevel, drawn_first, pick
from outrider.verifiers.tree_walk import AliasedVerifier


def verify(law_BnV: Tensor, level: SiblingLevel) -> tree_walk.NodeDecision:
    """Test each draw against the residual of the earlier ones."""
    here, favour, against = law_BnV, [], []
    for k in range(level.most):
        guess = level.guess(k, law_BnV)
        favour.append(pick(here, level.token_BnK[..., k]))
        against.append(pick(guess, level.token_BnK[..., k]))
        here = ops.residual(here, guess)
    return tree_walk.node_decision(favour, against, here)


@dataclass(frozen=True)
class Rejection:
    """Exact for placed, with- and without-replacement children in any mixture."""

    name: ClassVar[str] = "rejection"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = UNCOUPLED
    chain_only: ClassVar[bool] = False

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count, next token and the overlap sum min(p, q) at each depth that was examined."""
        if not chain.is_plain(draft):
            return tree_walk.walk(verify, draft, scores, draws)
        line = chain.read(draft, scores)
        uniform = chain.uniforms(draft, draws)
        count = chain.until_refusal(line, uniform * line.against_BD < line.favour_BD)
        return chain.conclude(line, count, chain.left_after(line, count), draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """The walk with every accept test replaced by its probability."""
        return tree_walk.walked(verify, draft, scores)


# Multi-round rejection (SpecInfer, Miao et al. 2024): i.i.d. children, one rejection test each.
#
#     p^1 = p;  accept X_k iff u q(X_k) < p^k(X_k);  else p^{k+1} = norm((p^k - q)+)
#
# It is `rejection` on children drawn with replacement, under the name of its paper and restricted
# to the drafts of its paper, so that benchmarks can name it. A token that was refused once has
# p^{k+1}(X_k) = 0, so a repeated draw is refused for sure; but it must be played, because it takes
# its share from the residual: merged paths keep their multiplicity.

MULTI_ROUND = AliasedVerifier(
    "multi_round", Rejection(), frozenset({DrawKind.FIXED, DrawKind.WITH})
)


# Hub nodes, from the root down: sampled children first, then the placed ones.
#
# SpecHub (Sun, Zhou et al. 2024) for two children; Hu et al. 2025 for any number. Draft: T = the
# top tokens of q, placed; X ~ m = norm(q without T), drawn. Accept X iff u m(X) < p(X); else y ~
# norm((p - m)+): if y is in T follow that child, otherwise emit y. Accepts p(T) + sum min(p, m)
# outside T, the most any rule can for this draft.
#
# Drawing y and looking it up among T is played as one test for each placed child t in turn, with
# probability y(t) / (1 - what the earlier ones took): the same law, without a draw over the
# vocabulary at every node. Placed children are verified last wherever they stand in the draft.


@dataclass(frozen=True)
class HubVerifier:
    """Rejection with the placed children last. Exact for any mixture of kinds but coupled."""

    name: ClassVar[str] = "hub"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = UNCOUPLED
    chain_only: ClassVar[bool] = False

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count, next token and overlap of the first drawn child."""
        return Rejection()(drawn_first(draft), scores, draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """The walk with every accept test replaced by its probability."""
        return Rejection().outcome(drawn_first(draft), scores)
