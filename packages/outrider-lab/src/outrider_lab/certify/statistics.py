"""Tail probabilities and power, from torch and math alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from outrider.testing.runs import chi_square_tail
from outrider_lab.certify.report import Test

_NORMAL = NormalDist()


def normal_two_sided(z: float) -> float:
    """P(|Z| >= |z|) for a standard normal Z.

    >>> round(normal_two_sided(1.959964), 6)
    0.05
    """
    return math.erfc(abs(z) / math.sqrt(2))


def uniform_distance(values: torch.Tensor) -> float:
    """Kolmogorov's distance between a sample and the uniform law on [0, 1].

    >>> uniform_distance(torch.tensor([0.5]))
    0.5
    """
    ordered = values.to(torch.float64).sort().values
    count = ordered.numel()
    at = torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
    return float(torch.maximum(at / count - ordered, ordered - (at - 1) / count).max())


def kolmogorov_tail(distance: float, count: int) -> float:
    """P(D >= distance) for `count` uniforms, by Stephens' finite-sample form of the limit law.

    >>> round(kolmogorov_tail(1.358 / 100, 10_000), 2)
    0.05
    """
    root = math.sqrt(count)
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.2:
        return 1.0
    tail = 2.0 * sum((-1.0) ** (j - 1) * math.exp(-2 * j * j * x * x) for j in range(1, 101))
    return min(max(tail, 0.0), 1.0)


def quantile_gap(level: float, power: float) -> float:
    """z(1 - level / 2) + z(power): how many standard errors a two-sided test can find.

    >>> round(quantile_gap(0.05, 0.8), 2)
    2.8
    """
    return _NORMAL.inv_cdf(1 - level / 2) + _NORMAL.inv_cdf(power)


def noncentrality(freedom: int, level: float, power: float) -> float:
    """The non-centrality at which a chi-square test of this level has this power.

    Uses Sankaran's normal approximation of the non-central tail, good to a few percent.

    >>> round(noncentrality(9, 1e-3, 0.9))
    34
    """
    threshold, most = _chi_square_quantile(freedom, level), 1.0
    while _noncentral_tail(threshold, freedom, most) < power:
        most *= 2
    return _first(lambda shift: _noncentral_tail(threshold, freedom, shift) >= power, most)


def _chi_square_quantile(freedom: int, level: float) -> float:
    return _first(lambda value: chi_square_tail(value, freedom) <= level, 10.0 * freedom + 100.0)


def _first(true: Callable[[float], bool], high: float) -> float:
    """Where something becomes true between 0 and `high`, by bisection."""
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if true(middle) else (middle, high)
    return high


def _noncentral_tail(x: float, freedom: int, shift: float) -> float:
    whole, twice, thrice = freedom + shift, freedom + 2 * shift, freedom + 3 * shift
    h = 1 - 2 * whole * thrice / (3 * twice**2)
    p = twice / whole**2
    m = (h - 1) * (1 - 3 * h)
    mean = 1 + h * p * (h - 1 - 0.5 * (2 - h) * m * p)
    spread = h * math.sqrt(2 * p * (1 + m * p))
    return 1 - _NORMAL.cdf(((x / whole) ** h - mean) / spread)


# Sums of (found - expected) with known variance: a martingale, standard normal once scaled.

#: Least sum of variances: below it nothing was at stake, and the normal law is a poor guess.
LEAST = 10.0


@dataclass
class Surplus:
    """What was found beyond expectation, summed over events."""

    total: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, found: Tensor, expected: Tensor, variance: Tensor) -> None:
        """One entry per event; `expected` and `variance` are exact, given the past."""
        self.total += float((found.double() - expected.double()).sum())
        self.variance += float(variance.double().clamp(min=0).sum())
        self.count += found.numel()

    def test(self, name: str, level: float, power: float, per: str) -> Test:
        """Two-sided normal test; `per` names the events."""
        if self.variance < LEAST:
            detail = "too little variance: inconclusive"
            return Test(name, 0.0, None, self.count, True, detail, conclusive=False)
        spread = math.sqrt(self.variance)
        z = self.total / spread
        p_value = normal_two_sided(z)
        found = quantile_gap(level, power) * spread / self.count
        detail = f"shift {self.total / self.count:+.4f} per {per}; finds {found:.4f}"
        return Test(name, z, p_value, self.count, p_value >= level, detail, found)
