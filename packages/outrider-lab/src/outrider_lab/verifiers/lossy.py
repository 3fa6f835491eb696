"""Rules that change the law, each under the name of its paper: never a default."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import ops
from outrider.errors import ConfigurationError
from outrider.types import UNCOUPLED, Draft, DrawKind, Draws, Laws, Outcome, Scores, Verdict
from outrider.verifiers import chain
from outrider.verifiers.sibling_draws import inner, rows
from outrider.verifiers.traversal import path_to

# Lenience (Leviathan et al. 2023, A.5): accept more than the target allows. Lossy.
#
# Stochastic, 0 < l <= 1: accept iff u l q(x) < p(x), so alpha = sum min(p / l, q) and no token is
# emitted with more than p / l. The paper leaves the law after a refusal open; the plain residual
# norm((p - q)+) loses least: its total variation to p is sum (min(p / l, q) - p)+. At l = 1 it is
# `rejection`.
#
# Argmax: accept iff p(x) >= l max p, with p the softmax of the raw target logits at temperature 1;
# else emit the argmax, which is also the bonus token. The printed "p(x) <= l max p" cannot be
# meant: at l = 1 it accepts everything. At l = 1 this is greedy decoding with ties accepted.


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
        rest = ops.residual(line.law_BNV[:, :-1], line.guess_BDV)
        rest = torch.where(line.there_BD[..., None], rest, line.law_BNV[:, :-1])
        return chain.outcome(line, chance, torch.cat([rest, line.law_BNV[:, -1:]], 1))


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
        log_lenience = torch.tensor(self.lenience, dtype=logits.dtype, device="cpu").log()
        return token - logits.amax(-1) >= log_lenience.to(logits.device)


def _greedy(scores: Scores) -> Scores:
    inverse = torch.full_like(scores.laws.inverse_temperature_B, torch.inf)
    laws = scores.laws._replace(inverse_temperature_B=inverse, greedy="all", floor_BR=None)
    return scores._replace(laws=laws)


# Typical acceptance (Medusa, Cai et al. 2024): a threshold on the target's probability. Lossy.
#
#     keep x iff p(x) > min(epsilon, delta exp(-H(p))),  H the entropy of p in nats
#
# The longest kept path wins (the first in node order on a tie), and the next token is the argmax.
# Nothing is random: the emitted law is not p. At temperature 0 it is greedy matching. Usual values:
# epsilon = 0.09, delta = 0.3 = sqrt(epsilon).


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


# Sigmoid approximation (Wagner et al. 2024): elementwise pseudo-probabilities. Lossy.
#
#     p^(v) = sigmoid((z_p(v) - a) / (b - a)),  q^ likewise;  a = -scale, b = +scale
#     z < a -> 0,  z > b -> 1;   accept iff u q^(x) < p^(x);   refused: y ~ norm((p^ - q^)+)
#
# z are the filtered logits divided by the temperature. p^ and q^ are not normalised; the ratio is
# used as it is. With the published scales (1e3, 1e4) p^ and q^ are nearly the same constant for
# every unfiltered token, so almost every draft is accepted and the output follows the draft's law:
# what looks like speed is the price. Differences from the released kernels, all on the side of the
# target: the bonus token comes from the exact softmax, filtered tokens (0 / 0) are refused, an
# empty residual falls back to p, nothing is clamped before a draw. Greedy rows and placed tokens
# are verified exactly: a one-hot law has no logits to approximate.


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
