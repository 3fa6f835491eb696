"""Sigmoid approximation (Wagner et al. 2024): elementwise pseudo-probabilities. Lossy.

    p^(v) = sigmoid((z_p(v) - a) / (b - a)),  q^ likewise;  a = -scale, b = +scale
    z < a -> 0,  z > b -> 1;   accept iff u q^(x) < p^(x);   refused: y ~ norm((p^ - q^)+)

z are the filtered logits divided by the temperature. p^ and q^ are not normalised; the ratio is
used as it is. With the published scales (1e3, 1e4) p^ and q^ are nearly the same constant for every
unfiltered token, so almost every draft is accepted and the output follows the draft's law: what
looks like speed is the price. Differences from the released kernels, all on the side of the
target: the bonus token comes from the exact softmax, filtered tokens (0 / 0) are refused, an
empty residual falls back to p, nothing is clamped before a draw. Greedy rows and placed tokens are
verified exactly: a one-hot law has no logits to approximate.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import ops
from outrider.errors import ConfigurationError
from outrider.types import UNCOUPLED, Draft, DrawKind, Draws, Laws, Outcome, Scores, Verdict
from outrider.verifiers import chain


@dataclass(frozen=True)
class Sigmoid:
    """For comparison only: with the usual scales it keeps nearly everything."""

    scale: float = 1e4
    name: ClassVar[str] = "sigmoid"
    exact: ClassVar[bool] = False
    kinds: ClassVar[frozenset[DrawKind]] = UNCOUPLED
    chain_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ConfigurationError(f"scale must be > 0; got {self.scale!r}; the paper uses 1e4")

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count, next token and the overlap of the exact laws."""
        line, favour, against, left = self._squashed(draft, scores)
        keep = chain.uniforms(draft, draws) * against < favour
        count = chain.until_refusal(line, keep)
        return chain.conclude(line, count, chain.at(left, count), draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """Each token is kept with probability min(1, p^ / q^)."""
        line, favour, against, left = self._squashed(draft, scores)
        return chain.outcome(line, chain.chances(favour, against), left)

    def _squashed(self, draft: Draft, scores: Scores) -> tuple[chain.Chain, Tensor, Tensor, Tensor]:
        """The chain, p^ and q^ of its tokens, and the law left at each node."""
        line = chain.read(draft, scores)
        law, guess = self._squash(scores.laws, line.law_BNV)[:, :-1], line.guess_BDV
        if draft.laws is not None and line.drawn:
            rows_BD = draft.row_BNK[:, : guess.shape[1], 0].clamp(min=0)
            guess = self._squash(ops.select(draft.laws, rows_BD), guess)
        if line.placed_BD is not None:
            placed = line.placed_BD[..., None]
            law = torch.where(placed, line.law_BNV[:, :-1], law)
            guess = torch.where(placed, line.guess_BDV, guess)
        rest = (law - guess).clamp_(min=0)
        total = rest.sum(-1, keepdim=True)
        rest = torch.where(
            total > 0, rest / torch.where(total > 0, total, 1.0), line.law_BNV[:, :-1]
        )
        rest = torch.where(line.there_BD[..., None], rest, line.law_BNV[:, :-1])
        left = torch.cat([rest, line.law_BNV[:, -1:]], 1)
        token = line.token_BD[..., None]
        return line, law.gather(2, token)[..., 0], guess.gather(2, token)[..., 0], left

    def _squash(self, laws: Laws, exact_BRV: Tensor) -> Tensor:
        """Pseudo-probabilities; the exact law on greedy rows."""
        if laws.greedy == "all":
            return exact_BRV
        logits = ops.scaled(laws).to(exact_BRV.dtype)
        soft = ((logits + self.scale) / (2 * self.scale)).sigmoid()
        soft = torch.where(logits < -self.scale, 0.0, soft)
        soft = torch.where(logits > self.scale, 1.0, soft)
        if laws.greedy == "none":
            return soft
        hot = torch.isinf(laws.inverse_temperature_B)[:, None, None]
        return torch.where(hot, exact_BRV, soft)
