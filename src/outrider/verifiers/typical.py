"""Typical acceptance (Medusa, Cai et al. 2024): a threshold on the target's probability. Lossy.

    keep x iff p(x) > min(epsilon, delta exp(-H(p))),  H the entropy of p in nats

The longest kept path wins (the first in node order on a tie), and the next token is the argmax.
Nothing is random: the emitted law is not p. At temperature 0 it is greedy matching. Usual values:
epsilon = 0.09, delta = 0.3 = sqrt(epsilon).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import ops
from outrider.errors import ConfigurationError
from outrider.types import Draft, DrawKind, Draws, Outcome, Scores, Verdict
from outrider.verifiers.sibling_draws import inner, rows
from outrider.verifiers.traversal import path_to


@dataclass(frozen=True)
class Typical:
    """For comparison only. Verifies every kind of draft and needs no draft law."""

    epsilon: float = 0.09
    delta: float = 0.3
    name: ClassVar[str] = "typical"
    exact: ClassVar[bool] = False
    kinds: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)
    chain_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.epsilon < 0 or self.delta < 0:
            raise ConfigurationError(
                f"epsilon and delta must be >= 0; got {self.epsilon!r} and {self.delta!r}; "
                "Medusa uses 0.09 and 0.3"
            )

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count and the argmax at its end; no noise is read."""
        law = ops.probs(scores.laws)
        stop = self._stop(draft, law)
        path = path_to(draft.tree, stop)
        return Verdict(path, (path >= 0).sum(1), rows(law, stop[:, None])[:, 0].argmax(-1))

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """A point mass: nothing is random."""
        law = ops.probs(scores.laws)
        stop = torch.zeros_like(law[..., 0]).scatter(1, self._stop(draft, law)[:, None], 1.0)
        best = law.argmax(-1, keepdim=True)
        return Outcome(stop, torch.zeros_like(law).scatter(-1, best, 1.0))

    def _stop(self, draft: Draft, law_BNV: Tensor) -> Tensor:
        """[B]: the deepest node whose whole path passes, the first of them on a tie."""
        batch, nodes, _ = law_BNV.shape
        entropy = -torch.special.xlogy(law_BNV, law_BNV).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        kept_BN = torch.zeros(batch, nodes, dtype=torch.int64, device=law_BNV.device)
        kept_BN[:, 0] = 1
        kids = draft.draws_BNK.expand(batch, -1, -1)
        tokens = draft.tokens_BN.expand(batch, -1)
        for start, end in inner(draft.tree):
            for k in range(kids.shape[2]):
                kid = kids[:, start:end, k]
                token = tokens.gather(1, kid.clamp(min=0))
                share = law_BNV[:, start:end].gather(-1, token[..., None])[..., 0]
                good = (share > threshold[:, start:end]) & (kid >= 0)
                good = good & (kept_BN[:, start:end] > 0)
                kept_BN = kept_BN.scatter_reduce(1, kid.clamp(min=0), good.long(), "amax")
        depth = draft.tree.depth_BN.expand(batch, -1)
        return torch.where(kept_BN > 0, depth, -1).argmax(-1)
