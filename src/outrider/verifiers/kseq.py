"""K-SEQ (SpecTr, Sun, Suresh et al. 2023): K i.i.d. children, each accepted at a reduced rate.

    beta(g) = sum min(q, p / g);   accept each X_k in turn iff u g q(X_k) < p(X_k)
    all refused:  y ~ norm(p - min(q, p / g) (1 - (1 - beta)^K) / beta)

The division factor g must satisfy g beta(g) >= 1 - (1 - beta(g))^K, else the residual is negative.
The gap is non-decreasing in g, <= 0 at 1 and >= 0 at K, so g is found by bisection; the upper end
is kept, which errs on the exact side. Accepts 1 - (1 - beta)^K at a node. K is the number of draws
at the node (merged paths keep their multiplicity), known before its tokens are looked at.

Draws of one law row must stand together at a node, the order of `outrider.drafters.paths`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import ops
from outrider.types import Draft, DrawKind, Draws, Outcome, Scores, Verdict
from outrider.verifiers import chain, tree_walk
from outrider.verifiers.rejection import Rejection
from outrider.verifiers.sibling_draws import SiblingLevel, drawn_first, pick


def division_factor(law_BnV: Tensor, guess_BnV: Tensor, count_Bn: Tensor) -> Tensor:
    """[B, n]: the smallest valid g in [1, K], rounded up by the last bisection step."""

    def enough(factor_Bn: Tensor) -> Tensor:
        beta = _beta(law_BnV, guess_BnV, factor_Bn)
        return factor_Bn * beta >= 1 - (1 - beta).clamp(min=0) ** count_Bn

    low = torch.ones_like(law_BnV[..., 0])
    high = torch.where(enough(low), low, count_Bn)
    for _ in range(50 if law_BnV.dtype is torch.float64 else 25):
        middle = (low + high) / 2
        valid = enough(middle)
        low, high = torch.where(valid, low, middle), torch.where(valid, middle, high)
    return high


def _beta(law_BnV: Tensor, guess_BnV: Tensor, factor_Bn: Tensor) -> Tensor:
    return torch.minimum(guess_BnV, law_BnV / factor_Bn[..., None]).sum(-1)


def verify(law_BnV: Tensor, level: SiblingLevel) -> tree_walk.NodeDecision:
    """The draws of the first law at rate 1 / g; then, one by one, whatever else there is.

    Draws of other laws (several draft models) and placed children are tested against what those of
    the first law leave, as in `rejection`: exact in any mixture, K-SEQ where one law drew them all.
    """
    drawn = level.there_BnK & (level.kind_BnK != DrawKind.FIXED)
    mine = drawn & (level.row_BnK == level.row_BnK[..., :1])
    count = mine.sum(-1).clamp(min=1).to(law_BnV.dtype)
    guess = torch.where(drawn[..., :1], level.guess(0, law_BnV), 0.0)
    factor = division_factor(law_BnV, guess, count)
    beta = _beta(law_BnV, guess, factor)
    taken = -torch.expm1(count * torch.log1p(-beta.clamp(max=1)))
    share = taken / torch.where(beta > 0, beta, 1.0)
    kept = torch.minimum(guess, law_BnV / factor[..., None]) * share[..., None]
    here = ops.residual(law_BnV, kept)
    favour, against = [], []
    for k in range(level.most):
        token, other = level.token_BnK[..., k], ~mine[..., k]
        own = level.guess(k, law_BnV)
        favour.append(torch.where(other, pick(here, token), pick(law_BnV, token)))
        against.append(torch.where(other, pick(own, token), factor * pick(guess, token)))
        here = ops.residual(here, torch.where(other[..., None], own, 0.0))
    return tree_walk.node_decision(favour, against, here)


@dataclass(frozen=True)
class KSeq:
    """Exact for independent draws; those of a second law, and placed children, come last."""

    name: ClassVar[str] = "kseq"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED, DrawKind.WITH})
    chain_only: ClassVar[bool] = False

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        if chain.is_plain(draft):  # one draw at a node: g = 1
            return Rejection()(draft, scores, draws)
        return tree_walk.walk(verify, drawn_first(draft), scores, draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """The walk with every accept test replaced by its probability."""
        return tree_walk.walked(verify, drawn_first(draft), scores)
