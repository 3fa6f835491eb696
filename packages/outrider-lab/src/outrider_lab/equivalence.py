"""Whether two arms are worth the same: two one-sided tests (Schuirmann 1987), paired by prompt.

That a difference is not significant says little where prompts are few. Here the null hypotheses are
that the mean difference is at least `margin` on one side or on the other; where both are rejected
at 5 %, the arms are equal within the margin. Beside it stands how often such a test would have
succeeded if there were no difference at all: its power.

>>> even = [0.01, -0.01] * 15
>>> equivalence(even, 0.05).verdict, equivalence(even[:8], 0.05).verdict
('equal', 'fewer than 20 prompts')
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider_lab.bench.intervals import LEAST, angles, student

LEVEL = 0.05  #: of each one-sided test
MARGIN = 0.1  #: of scores in [0, 1], where nobody says


@dataclass(frozen=True)
class Equivalence:
    """A mean difference with its 90 % interval, the margin, and what the two tests say.

    p      the larger of the two one-sided p-values
    power  the chance of p below 5 % if the true difference is 0, from the spread that was seen
    """

    difference: float
    low: float
    high: float
    margin: float
    p: float
    power: float
    prompts: int

    @property
    def verdict(self) -> str:
        """Equal within the margin, different if the interval lies outside of it, else open."""
        if self.prompts < LEAST:
            return f"fewer than {LEAST} prompts"
        if self.p < LEVEL:
            return "equal"
        return "different" if self.low > self.margin or self.high < -self.margin else "open"

    def row(self) -> dict[str, float | int | str]:
        """For tables."""
        ends = "" if math.isinf(self.high) else f"[{self.low:+.3f}, {self.high:+.3f}]"
        return {
            "difference": self.difference,
            "90 % interval": ends,
            f"within {self.margin:g}": self.verdict,
            "p": self.p,
            "power": self.power,
            "prompts": self.prompts,
        }


def equivalence(differences: Sequence[float], margin: float) -> Equivalence:
    """The test for one difference for each prompt.

    Raises ValueError for a margin that is not positive, and without a difference.
    """
    if not margin > 0:
        raise ValueError(f"a margin must be positive; got {margin!r}")
    if not differences:
        raise ValueError("an equivalence test needs at least one prompt; got none")
    count, middle = len(differences), statistics.fmean(differences)
    if count == 1:
        return Equivalence(middle, -math.inf, math.inf, margin, 1.0, 0.0, 1)
    error = statistics.stdev(differences) / math.sqrt(count)
    if error == 0:  # as where both arms wrote the same texts
        inside = abs(middle) < margin
        return Equivalence(middle, middle, middle, margin, float(not inside), 1.0, count)
    critical = student(count - 1, 1 - 2 * LEVEL)
    half = critical * error
    p = _beyond((margin - abs(middle)) / error, count - 1)
    power = max(0.0, 2 * statistics.NormalDist().cdf(margin / error - critical) - 1)
    return Equivalence(middle, middle - half, middle + half, margin, p, power, count)


def _beyond(t: float, freedom: int) -> float:
    """P(T > t) of Student's law.

    >>> round(_beyond(2.093, 19), 3), round(_beyond(-2.093, 19), 3)
    (0.025, 0.975)
    """
    reached = np.interp(math.atan(abs(t) / math.sqrt(freedom)), *angles(freedom))
    above = (1 - float(reached)) / 2
    return above if t >= 0 else 1 - above
