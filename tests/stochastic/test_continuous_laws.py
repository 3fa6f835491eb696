"""Outcomes out of a continuum have f's density: two-sample tests, and mistakes that they see."""

import math

import numpy as np
import pytest
from scipy import stats

import outrider
from outrider.stochastic import Density, Gaussian, continuous

ROWS, STEPS = 20_000, 5  # 100,000 draws


def drift(states):
    return np.sin(np.asarray(states)) * 2


def same_spread(states):
    return Gaussian(drift(states), 0.8), Gaussian(drift(states) * 0.7 + 0.3, 0.8)


def other_spread(states):
    x = np.asarray(states)
    return Gaussian(drift(x), 0.5 + 0.4 * np.cos(x) ** 2), Gaussian(0.8 * x, 1.0)


def gap(states):
    """f on [m, m + 1.5], g on [m + 0.5, m + 2]: each has outcomes that the other has not."""

    def uniform(low, high):
        def log_density(x):
            return np.where((x >= low) & (x < high), -math.log(high - low), -np.inf)

        return Density(lambda rng, n: rng.uniform(low, high, n), log_density)

    means = [math.sin(state) for state in states]
    return [uniform(m, m + 1.5) for m in means], [uniform(m + 0.5, m + 2) for m in means]


def scale(of, low):
    """An exponential law from `low` on."""
    log = math.log(of)
    return Density(
        lambda rng, n: low + rng.exponential(of, n),
        lambda x: np.where(x >= low, -(x - low) / of - log, -np.inf),
    )


def tails(states):
    return [scale(1.0, math.tanh(s)) for s in states], [scale(1.6, math.tanh(s)) for s in states]


CASES = {
    "same spread": (same_spread, lambda s, x: stats.norm.cdf(x, drift(s), 0.8)),
    "other spread": (
        other_spread,
        lambda s, x: stats.norm.cdf(x, drift(s), 0.5 + 0.4 * np.cos(s) ** 2),
    ),
    "gap": (gap, lambda s, x: (x - np.sin(s)) / 1.5),
    "tails": (tails, lambda s, x: stats.expon.cdf(x, np.tanh(s))),
}
FEW = {"gap", "tails"}  # laws that are Python functions, one a state: a tenth of the draws


def run(case, guess=True):
    both = CASES[case][0]
    return outrider.speculate(
        lambda states: both(states)[0],
        (lambda states: both(states)[1]) if guess else None,
        lambda state, outcome: outcome,
        [0.3] * (ROWS // 10 if case in FEW else ROWS),
        STEPS,
        seed=7,
    )


def quantiles(case, found):
    """f's distribution function at every outcome, given the state: independent and uniform."""
    x = np.array(found.outcomes)
    before = np.concatenate([np.full((len(x), 1), 0.3), x[:, :-1]], 1)
    return CASES[case][1](before, x).ravel()


@pytest.mark.parametrize(
    "case",
    # The dearest of them: what it would find the mistakes below are found by, too.
    [pytest.param(c, marks=[pytest.mark.exhaustive] * (c == "other spread")) for c in CASES],
)
def test_two_samples(case):
    found = run(case)
    mine, plain = quantiles(case, found), quantiles(case, run(case, guess=False))
    assert len(mine) == len(plain) == (10_000 if case in FEW else 100_000)
    assert stats.ks_2samp(mine, plain).pvalue > 1e-3
    assert stats.kstest(mine, "uniform").pvalue > 1e-3
    assert 0 < found.stats.accepted < found.stats.drafted
    assert found.stats.steps < found.stats.new_tokens == len(mine)


def broken(monkeypatch, what):
    if what == "draws from f after a refusal":
        monkeypatch.setattr(continuous, "residual", lambda f, g, rng: float(f.draw(rng, 1)[0]))
    else:
        monkeypatch.setattr(continuous, "reflected", lambda near, far, drafted: drafted)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("other spread", "draws from f after a refusal"),
        ("same spread", "reflects nothing"),
    ],
)
def test_mistakes_are_seen(case, what, monkeypatch):
    broken(monkeypatch, what)
    assert stats.kstest(quantiles(case, run(case)), "uniform").pvalue < 1e-6


def test_a_draw_that_is_not_of_its_density_is_seen():
    def f(states):
        return [scale(1.0, 0.0) for _ in states]

    def g(states):  # says 1.6, draws with 0.8
        law = scale(1.6, 0.0)
        return [Density(lambda rng, n: rng.exponential(0.8, n), law.log_density) for _ in states]

    found = outrider.speculate(f, g, lambda s, x: x, [0.0] * 200, 50, seed=1)
    assert stats.kstest(np.ravel(found.outcomes), "expon").pvalue < 1e-6


def test_vectors_keep_their_covariance():
    """Reflection in four dimensions with a spread for each: every coordinate, and a mixture."""
    mean, spread = np.array([0.2, -1.0, 0.0, 2.0]), np.array([0.5, 1.0, 2.0, 0.1])

    def f(states):
        return Gaussian(np.tile(mean, (len(states), 1)), spread)

    def g(states):
        return Gaussian(np.tile(mean + 0.4 * spread, (len(states), 1)), spread)

    found = outrider.speculate(f, g, lambda s, x: s, [None] * 2000, 5, seed=2)
    z = (np.array(found.outcomes).reshape(-1, 4) - mean) / spread
    for part in (*z.T, z @ np.full(4, 0.5), z @ np.array([0.5, -0.5, 0.5, -0.5])):
        assert stats.kstest(part, "norm").pvalue > 1e-3
    overlap = 2 * stats.norm.cdf(-0.4)  # 0.8 standard deviations apart
    assert found.stats.alpha == pytest.approx(overlap, abs=0.01)
