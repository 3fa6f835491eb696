"""Outcomes out of a continuum: the rules of chains, by densities.

p, q are the densities of f and g at the same state; x was drawn from q.

    rejection   keep x if u q(x) < p(x); at the first refusal draw from norm((p - q)+), after the
                last acceptance from p (Leviathan et al. 2023, with sums read as integrals)
    norm((p - q)+)   draw y from p until u p(y) < p(y) - q(y): 1 / TV(p, q) draws on average, and a
                refusal happens in TV(p, q) of all cases, so one draw a step on average
    two normal laws of one covariance: no loop. x is reflected, y = m_p + s (z - 2 (e . z) e) with
                z = (x - m_q) / s and e along (m_q - m_p) / s (reflection coupling; Bou-Rabee,
                Eberle and Zimmer 2020; De Bortoli et al. 2025 for diffusion models)

All in logarithms and float64. Where g is zero and f is not, g never proposes the outcome and the
residual gives it; where f is zero an outcome of g is always refused.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider import noise, ops
from outrider.errors import ConfigurationError, NumericalError
from outrider.stochastic.laws import (
    ContinuousLaws,
    Density,
    NormalLaws,
    Probabilities,
    fine_uniforms,
    generator,
    joined,
)
from outrider.stochastic.outcomes import Place, Proposal, RoundVerdict

MOST_TRIALS = 1 << 22  #: draws for one residual: a law of total variation t stays without with less
# than t (1 - t)^MOST_TRIALS < 1e-7 of all rounds, whatever t is
RULES = ("rejection",)


class Ratios:
    """Log-ratios p(x) / q(x) of every drafted outcome, by row and depth."""

    def __init__(self, proposal: Proposal) -> None:
        target = proposal.target
        assert not isinstance(target, Probabilities)
        self.number = {place: at for at, place in enumerate(proposal.asked)}
        self.target, depth = target, proposal.tree.max_depth
        self.places: list[Place] = []  #: of the laws in `guess`
        tables: list[ContinuousLaws] = []
        for places, table in proposal.guesses:
            assert not isinstance(table, Probabilities)
            self.places += places
            tables.append(table)
        self.lengths = np.array([sum(row) - 1 for row in proposal.there])
        self.log_BD: NDArray[np.float64] = np.full((proposal.rows, depth), -np.inf)
        self.guess: ContinuousLaws | None = None
        if not self.places:
            return
        guess = joined("g", tables)
        assert not isinstance(guess, Probabilities)
        self.guess = guess
        self.mine = {place: at for at, place in enumerate(self.places)}
        drafted = [proposal.outcomes[row][node + 1] for row, node in self.places]
        for_x = target.take([self.number[place] for place in self.places]).log_density(drafted)
        against_x = guess.log_density(drafted)
        _check("f", for_x, drafted, zero=True)
        _check("g", against_x, drafted, zero=False)
        rows, nodes = np.array(self.places).T
        self.log_BD[rows, nodes] = for_x - against_x


def _check(name: str, found: NDArray[np.float64], outcomes: Sequence[Any], zero: bool) -> None:
    """Refuse log-densities that are none. -inf is one, but not of what was drawn from the law."""
    wrong = np.isnan(found) | (found == np.inf)
    if not zero:
        wrong |= found == -np.inf
    if wrong.any():
        at = int(wrong.nonzero()[0][0])
        why = "" if zero else " at what was drawn from it"
        raise NumericalError(
            f"{name}'s log-density must be finite{' or -inf' if zero else why}; got {found[at]} at "
            f"{outcomes[at]!r}; let draw and log_density be of one law, with a density"
        )


def verify(rule: str, proposal: Proposal) -> RoundVerdict:
    """The verdict of a continuous rule on every row."""
    if rule not in RULES:
        raise ConfigurationError(
            f"rule {rule!r} cannot verify outcomes of a continuum; got it with densities; rules "
            f"that can: {', '.join(RULES)}"
        )
    ratios = Ratios(proposal)
    rows, depth = ratios.log_BD.shape
    keys = noise.stream(proposal.seeds_B, proposal.starts_B, noise.Purpose.ACCEPT)
    with np.errstate(over="ignore"):
        uniform = fine_uniforms(keys, depth).numpy() if depth else np.zeros((rows, 0))
        keep = np.log(uniform) < ratios.log_BD
        chance = np.exp(np.minimum(ratios.log_BD, 0))
    inside = np.arange(depth) < ratios.lengths[:, None]
    count = (keep & inside).cumprod(1).sum(1)
    examined = inside & (np.arange(depth) <= count[:, None])
    following = _following(proposal, ratios, count)
    paths = [list(range(1, int(kept) + 1)) for kept in count]
    return RoundVerdict(paths, following, float(chance[examined].sum()), int(examined.sum()))


def _following(proposal: Proposal, ratios: Ratios, count_B: NDArray[np.int64]) -> list[Any]:
    """The outcome behind what was kept: of p at the draft's end, else of the residual."""
    found: list[Any] = [None] * proposal.rows
    keys = ops.streams(proposal.seeds_B, proposal.starts_B, noise.Purpose.RESIDUAL, 1)[:, 0]
    last = [
        row
        for row in range(proposal.rows)
        if count_B[row] == ratios.lengths[row] and (row, count_B[row]) in ratios.number
    ]
    if last:
        laws = ratios.target.take([ratios.number[row, int(count_B[row])] for row in last])
        for row, outcome in zip(last, laws.drawn(keys[last]), strict=True):
            found[row] = outcome
    refused = [row for row in range(proposal.rows) if count_B[row] < ratios.lengths[row]]
    if not refused:
        return found
    assert ratios.guess is not None
    places = [(row, int(count_B[row])) for row in refused]
    target = ratios.target.take([ratios.number[place] for place in places])
    guess = ratios.guess.take([ratios.mine[place] for place in places])
    drafted = [proposal.outcomes[row][node + 1] for row, node in places]
    alike = same_spread(target, guess)
    if alike.any():
        chosen = alike.nonzero()[0].tolist()
        near, far = target.take(chosen), guess.take(chosen)
        assert isinstance(near, NormalLaws)
        assert isinstance(far, NormalLaws)
        mirrored = reflected(near, far, [drafted[at] for at in chosen])
        for at, outcome in zip(chosen, mirrored, strict=True):
            found[refused[at]] = outcome
    for at in (~alike).nonzero()[0].tolist():
        rng = generator(int(keys[refused[at]]))
        found[refused[at]] = residual(target.law(at), guess.law(at), rng)
    return found


def same_spread(target: ContinuousLaws, guess: ContinuousLaws) -> NDArray[np.bool_]:
    """Which of these pairs are normal laws of one covariance, [n]."""
    if isinstance(target, NormalLaws) and isinstance(guess, NormalLaws):
        return np.asarray((target.std_nD == guess.std_nD).all(1))
    return np.zeros(len(target), bool)


def reflected(target: NormalLaws, guess: NormalLaws, drafted: Sequence[Any]) -> list[Any]:
    """What refused draws from `guess` become: draws from the residual, without a loop.

    The reflection maps q's surplus over p on p's surplus over q. Normal laws of one covariance.
    """
    spread = target.std_nD
    noise_nD = (np.asarray(drafted).reshape(spread.shape) - guess.mean_nD) / spread
    apart = (guess.mean_nD - target.mean_nD) / spread
    along = apart / np.linalg.norm(apart, axis=1, keepdims=True)  # never 0: p = q refuses nothing
    turned = noise_nD - 2 * (noise_nD * along).sum(1, keepdims=True) * along
    return target.outcomes(target.mean_nD + spread * turned)


def residual(target: Density, guess: Density, rng: np.random.Generator) -> Any:
    """A draw from norm((p - q)+): of p, until one is kept."""
    tried, size = 0, 16
    while tried < MOST_TRIALS:
        outcomes = target.draw(rng, size)
        favour = np.asarray(target.log_density(outcomes), np.float64)
        against = np.asarray(guess.log_density(outcomes), np.float64)
        _check("f", favour, outcomes, zero=False)
        _check("g", against, outcomes, zero=True)
        kept = (np.log(1 - rng.random(size)) > against - favour).nonzero()[0]
        if len(kept):
            first = outcomes[int(kept[0])]
            return first.item() if isinstance(first, np.generic) else first
        tried, size = tried + size, min(2 * size, 1 << 16)
    raise NumericalError(
        f"after a refusal f's density must exceed g's somewhere; got no such outcome in {tried} "
        "draws of f; check that log_density of both integrates to 1, and is that of draw"
    )
