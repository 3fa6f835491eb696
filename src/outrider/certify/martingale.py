"""Sums of (found - expected) with known variance: a martingale, standard normal once scaled."""

import math
from dataclasses import dataclass

from torch import Tensor

from outrider.certify.report import Test
from outrider.certify.statistics import normal_two_sided, quantile_gap

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
            detail = "too little variance: not judged"
            return Test(name, 0.0, None, self.count, True, detail, judged=False)
        spread = math.sqrt(self.variance)
        z = self.total / spread
        p_value = normal_two_sided(z)
        found = quantile_gap(level, power) * spread / self.count
        detail = f"shift {self.total / self.count:+.4f} per {per}; finds {found:.4f}"
        return Test(name, z, p_value, self.count, p_value >= level, detail, found)
