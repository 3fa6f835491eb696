"""Non-iterative rejection sampling (Leviathan et al. 2023, A.2): a baseline.

M = max_x p(x) / q(x), infinite if some p(x) > 0 has q(x) = 0. Accept x ~ q iff u M q(x) < p(x);
else emit y ~ p, unmodified. Accepts 1 / M, never more than sum min(p, q); rare tokens rule it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.types import UNCOUPLED, Draft, DrawKind, Draws, Outcome, Scores, Verdict
from outrider.verifiers import chain


def _rate(line: chain.Chain) -> Tensor:
    """[B, D]: M q(x), infinite where nothing can be accepted."""
    law, guess = line.law_BNV[:, :-1], line.guess_BDV
    ratio = torch.where(guess > 0, law / torch.where(guess > 0, guess, 1.0), torch.inf)
    most = torch.where(law > 0, ratio, 0.0).amax(-1)
    return torch.where(torch.isinf(most), torch.inf, most * line.against_BD)


@dataclass(frozen=True)
class NonIterative:
    """Exact on chains, far from optimal; for the comparison with `rejection`."""

    name: ClassVar[str] = "non_iterative"
    exact: ClassVar[bool] = True
    kinds: ClassVar[frozenset[DrawKind]] = UNCOUPLED
    chain_only: ClassVar[bool] = True

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count, next token and overlap."""
        line = chain.read(draft, scores)
        rate = _rate(line)
        keep = torch.where(
            torch.isinf(rate), False, chain.uniforms(draft, draws) * rate < line.favour_BD
        )
        count = chain.until_refusal(line, keep)
        return chain.conclude(line, count, chain.at(line.law_BNV, count), draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """Each drafted token is kept with probability p(x) / (M q(x))."""
        line = chain.read(draft, scores)
        rate = _rate(line)
        chance = line.favour_BD / torch.where(rate > 0, rate, 1.0)
        return chain.outcome(line, chance.clamp(max=1), line.law_BNV)
