"""Block verification (Sun et al., ICLR 2025): a chain as a whole. Never worse than rejection.

    r_0 = 1,  r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i))
    S_i = sum_v (r_i p_{i+1}(v) - q_{i+1}(v))+,  h_i = S_i / (S_i + 1 - r_i) for i < D,  h_D = r_D
    count = the largest i with u_i < h_i (0 if none)
    y ~ p_{D+1} if count = D, else y ~ norm((r_i p_{i+1} - q_{i+1})+) at i = count

Not a scan that stops at the first failure: a later position may pass after an earlier one failed.
A row ends where its draft ends: there S_i covers all of r_i p, so h_i = r_i and y ~ p. Position i
reads the uniform of the draw that proposed x_i. On placed tokens it is as good as `match`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import ops
from outrider.types import UNCOUPLED, Draft, DrawKind, Draws, Outcome, Scores, Verdict
from outrider.verifiers import chain


def _weights(line: chain.Chain) -> tuple[Tensor, Tensor, Tensor]:
    """r [B, D + 1], h [B, D + 1] and the guesses [B, D + 1, V], zero where no token follows."""
    ratio = chain.chances(line.favour_BD, line.against_BD, torch.finfo(line.law_BNV.dtype).max)
    ratio = torch.where(line.there_BD, ratio, 0.0)
    r = [torch.ones_like(line.law_BNV[:, 0, 0])]
    for i in range(ratio.shape[1]):
        r.append((r[-1] * ratio[:, i]).clamp(max=1))
    weight = torch.stack(r, 1)
    guess = torch.where(line.there_BD[..., None], line.guess_BDV, 0.0)
    guess = torch.nn.functional.pad(guess, (0, 0, 0, 1))
    surplus = (weight[..., None] * line.law_BNV - guess).clamp_(min=0).sum(-1)
    whole = surplus + (1 - weight)
    passing = torch.where(whole > 0, surplus / torch.where(whole > 0, whole, 1.0), 1.0)
    passing[:, 0] = 1  # the root never fails
    return weight, passing, guess


@dataclass(frozen=True)
class BlockVerifier:
    """Exact on chains; the most accepted tokens of any rule for one path."""

    name: ClassVar[str] = "block"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = UNCOUPLED
    chain_only: ClassVar[bool] = True

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        line = chain.read(draft, scores)
        weight, passing, guess = _weights(line)
        position = torch.arange(passing.shape[1], device=passing.device)
        passed = torch.nn.functional.pad(chain.uniforms(draft, draws), (1, 0)) < passing
        count = torch.where(passed, position, 0).amax(1)
        law = chain.at(line.law_BNV, count) * weight.gather(1, count[:, None])
        left = ops.residual(law, chain.at(guess, count))
        return chain.conclude(line, count, left, draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """Stopping at i: i passes and every later position fails."""
        line = chain.read(draft, scores)
        weight, passing, guess = _weights(line)
        fails = torch.cat([1 - passing[:, 1:], torch.ones_like(passing[:, :1])], 1)
        later = fails.flip(1).cumprod(1).flip(1)
        left = ops.residual(line.law_BNV * weight[..., None], guess)
        return Outcome(passing * later, left)
