"""Lenience (Leviathan et al. 2023, A.5): accept more than the target allows. Lossy.

Stochastic, 0 < l <= 1: accept iff u l q(x) < p(x), so alpha = sum min(p / l, q) and no token is
emitted with more than p / l. The paper leaves the law after a refusal open; the plain residual
norm((p - q)+) loses least: its total variation to p is sum (min(p / l, q) - p)+. At l = 1 it is
`rejection`.

Argmax: accept iff p(x) >= l max p, with p the softmax of the raw target logits at temperature 1;
else emit the argmax, which is also the bonus token. The printed "p(x) <= l max p" cannot be meant:
at l = 1 it accepts everything. At l = 1 this is greedy decoding with ties accepted.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.errors import ConfigurationError
from outrider.types import UNCOUPLED, Draft, DrawKind, Draws, Outcome, Scores, Verdict
from outrider.verifiers import chain


def _check(value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigurationError(f"lenience must lie in (0, 1]; got {value!r}; 1 is the least")


@dataclass(frozen=True)
class Lenience:
    """`rejection` with the draft's probability scaled down. Greedy rows stay greedy."""

    lenience: float = 0.5
    name: ClassVar[str] = "lenience"
    exact: ClassVar[bool] = False
    kinds: ClassVar[frozenset[DrawKind]] = UNCOUPLED
    chain_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.lenience)

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count, next token and overlap."""
        line = chain.read(draft, scores)
        uniform = chain.uniforms(draft, draws) * self.lenience
        count = chain.until_refusal(line, uniform * line.against_BD < line.favour_BD)
        return chain.conclude(line, count, chain.left_after(line, count), draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """Each token is kept with probability min(1, p / (l q))."""
        line = chain.read(draft, scores)
        chance = chain.chances(line.favour_BD, self.lenience * line.against_BD)
        return chain.outcome(line, chance, chain.residuals(line))


@dataclass(frozen=True)
class LenienceArgmax:
    """Keep every drafted token whose probability is at least `lenience` times the largest."""

    lenience: float = 0.5
    name: ClassVar[str] = "lenience_argmax"
    exact: ClassVar[bool] = False
    kinds: ClassVar[frozenset[DrawKind]] = frozenset(DrawKind)
    chain_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.lenience)

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count and the argmax where the walk stands; no noise is read."""
        line = chain.read(draft, _greedy(scores))
        count = chain.until_refusal(line, self._keeps(scores, line))
        return chain.conclude(line, count, chain.at(line.law_BNV, count), draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """A point mass: nothing is random."""
        line = chain.read(draft, _greedy(scores))
        keeps = self._keeps(scores, line).to(line.law_BNV.dtype)
        return chain.outcome(line, keeps, line.law_BNV)

    def _keeps(self, scores: Scores, line: chain.Chain) -> Tensor:
        """In logits: p(x) >= l max p, without a softmax."""
        raw = scores.laws.logits_BRV if scores.raw_BNV is None else scores.raw_BNV
        logits = raw[:, :-1].to(line.law_BNV.dtype)
        token = logits.gather(2, line.token_BD[..., None])[..., 0]
        log_lenience = torch.tensor(self.lenience, dtype=logits.dtype).log()
        return token - logits.amax(-1) >= log_lenience.to(logits.device)


def _greedy(scores: Scores) -> Scores:
    inverse = torch.full_like(scores.laws.inverse_temperature_B, torch.inf)
    laws = scores.laws._replace(inverse_temperature_B=inverse, greedy="all", floor_BR=None)
    return scores._replace(laws=laws)
