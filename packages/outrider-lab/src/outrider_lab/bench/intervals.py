"""95 % intervals of what benches print: paired over prompts, right for few of them.

A unit is a prompt, with everything that was decoded from it: samples and repeats of one prompt are
no new evidence. Arms see the same prompts, so that a comparison is one statistic of the units that
is computed again without each of them (the jackknife; Efron and Stein 1981), and the interval is
Student's t with one degree of freedom less than there are prompts. Times, rates and ratios are
positive and skewed: theirs is made of logarithms, and that of shares of angles. Factors that were
measured on different numbers of prompts (a time of a few, tokens of all) are multiplied with Welch
and Satterthwaite's degrees of freedom. `tests/bench/test_coverage.py` counts how often the printed
intervals hold what is true.

A sign is claimed from LEAST prompts on, here and nowhere else.

>>> shown = interval(lambda units: sum(units) / len(units), 5)
>>> f"{shown.value:.1f} {shown}", shown.sign()
('2.0 [0.037, 3.963]', 'fewer than 20 prompts')
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

LEAST = 20  #: prompts; fewer of them show no sign
LEVEL = 0.95
Statistic = Callable[[Sequence[int]], float]  #: of the units with these numbers


@dataclass(frozen=True)
class Interval:
    """An estimate, its 95 % interval, and how many prompts it stands on (the fewest of a factor).

    With a single prompt there is no interval: `low` and `high` are infinite.
    """

    value: float
    low: float
    high: float
    prompts: int

    def sign(self, null: float = 0.0) -> str:
        """Which side of `null` the estimate is on: "+", "-", "open", or that prompts are few.

        >>> Interval(1.2, 1.1, 1.3, 24).sign(1.0), Interval(1.2, 0.9, 1.5, 24).sign(1.0)
        ('+', 'open')
        """
        if self.prompts < LEAST:
            return f"fewer than {LEAST} prompts"
        return "+" if self.low > null else "-" if self.high < null else "open"

    def text(self, digits: int = 3, signed: bool = False) -> str:
        """The two ends in brackets; nothing if there is no interval.

        >>> Interval(0.5, 0.25, 0.75, 20).text(2, signed=True)
        '[+0.25, +0.75]'
        """
        if math.isinf(self.high):
            return ""
        plus = "+" if signed else ""
        return f"[{self.low:{plus}.{digits}f}, {self.high:{plus}.{digits}f}]"

    def times(self) -> str:
        """A ratio, and a word where it shows no sign.

        >>> Interval(2.0, 1.5, 2.5, 24).times(), Interval(2.0, 1.5, 2.5, 8).times()
        ('2.00x [1.50, 2.50]', '2.00x [1.50, 2.50] (fewer than 20 prompts: no sign)')
        """
        few = self.sign(1.0) if self.prompts < LEAST else ""
        shown = f"{self.value:.2f}x {self.text(2)}".rstrip()
        return f"{shown} ({few}: no sign)" if few else shown

    @classmethod
    def of_row(cls, row: Mapping[str, float | int | None]) -> "Interval":
        """What `row` made."""
        value, low, high, prompts = (row[name] for name in ("value", "low", "high", "prompts"))
        assert value is not None
        if low is None or high is None or prompts is None:
            return _alone(value)
        return cls(value, low, high, int(prompts))

    def __str__(self) -> str:
        return self.text()

    def row(self) -> dict[str, float | int | None]:
        """For JSON documents, which know no infinity."""
        alone = math.isinf(self.high)
        low, high = (None, None) if alone else (self.low, self.high)
        return {"value": self.value, "low": low, "high": high, "prompts": self.prompts}


class Scale(NamedTuple):
    """Where an interval is symmetric: a function of the statistic, and its inverse."""

    to: Callable[[float], float]
    back: Callable[[float], float]


def _log(value: float) -> float:
    if value <= 0:
        raise ValueError(f"a logarithm needs a positive statistic; got {value!r}")
    return math.log(value)


def _angle(value: float) -> float:
    if not -1e-9 < value < 1 + 1e-9:
        raise ValueError(f"a share is in [0, 1]; got {value!r}")
    return math.asin(math.sqrt(min(max(value, 0.0), 1.0)))


PLAIN = Scale(float, float)  #: differences
LOG = Scale(_log, math.exp)  #: what is positive: times, rates, ratios
SHARE = Scale(_angle, lambda angle: math.sin(min(max(angle, 0.0), math.pi / 2)) ** 2)  #: 0 to 1


class Factor(NamedTuple):
    """A positive statistic of the units 0 to prompts - 1, to be multiplied with others."""

    value: Statistic
    prompts: int


def interval(value: Statistic, prompts: int, scale: Scale = PLAIN) -> Interval:
    """The interval of a statistic of the units 0 to prompts - 1.

    Raises ValueError without a unit, and for values that are not of the scale.
    """
    pulls = _pulls(lambda units: scale.to(value(units)), prompts)
    return _joined(value(range(prompts)), [pulls], scale)


def product(*factors: Factor) -> Interval:
    """The interval of the product of positive statistics, of logarithms.

    Unit n of every factor is the same prompt; a factor of fewer units has the first ones.

    >>> found = product(Factor(lambda units: 2.0, 30), Factor(lambda units: 1.0 + max(units), 3))
    >>> found.value, found.prompts
    (6.0, 3)
    """
    logs = [_pulls(_logarithm(factor.value), factor.prompts) for factor in factors]
    whole = math.prod(factor.value(range(factor.prompts)) for factor in factors)
    return _joined(whole, logs, LOG)


def mean(values: Sequence[float], scale: Scale = PLAIN) -> Interval:
    """The mean of one value for each prompt."""
    return quotient(values, [1.0] * len(values), scale)


def quotient(above: Sequence[float], below: Sequence[float], scale: Scale = PLAIN) -> Interval:
    """Sum of `above` over sum of `below`, one value of each for each prompt.

    >>> quotient([2.0, 4.0], [1.0, 2.0]).value
    2.0
    """
    return interval(over(above, below), len(above), scale)


def over(above: Sequence[float], below: Sequence[float]) -> Statistic:
    """The statistic sum of `above` over sum of `below`."""
    a, b = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)

    def value(units: Sequence[int]) -> float:
        chosen = np.asarray(units)
        return float(a[chosen].sum() / b[chosen].sum())

    return value


def typical(ratios: Sequence[float]) -> Interval:
    """The geometric mean of one positive ratio for each prompt: how many times, typically.

    >>> round(typical([0.5, 2.0]).value, 6)
    1.0
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    return interval(lambda units: math.exp(logs[np.asarray(units)].mean()), len(ratios), LOG)


def _logarithm(value: Statistic) -> Statistic:
    return lambda units: _log(value(units))


def _alone(value: float) -> Interval:
    return Interval(value, -math.inf, math.inf, 1)


def _pulls(value: Statistic, count: int) -> tuple[float, np.ndarray]:
    """The statistic, and what each unit does to it; the sum of squares is the variance."""
    if count < 1:
        raise ValueError("an interval needs at least one prompt; got none")
    every = np.arange(count)
    middle = value(every.tolist())
    if count == 1:
        return middle, np.zeros(1)
    without = np.array([value(np.delete(every, unit).tolist()) for unit in range(count)])
    return middle, math.sqrt((count - 1) / count) * (without - without.mean())


def _joined(value: float, parts: Sequence[tuple[float, np.ndarray]], scale: Scale) -> Interval:
    """`value` with the interval of a sum of statistics of the same units.

    Where some parts have more units than the smallest, the units that only those have are a second
    source of variance, independent of the first: two variances, two degrees of freedom.
    """
    middle = sum(part for part, _ in parts)
    most, least = (pick(len(pulls) for _, pulls in parts) for pick in (max, min))
    if least < 2:
        return _alone(value)
    together = np.zeros(most)
    for _, pulls in parts:
        together[: len(pulls)] += pulls
    sources = ((together[:least], least - 1), (together[least:], most - least - 1))
    variances = [(float((pulls**2).sum()), max(freedom, 1)) for pulls, freedom in sources]
    below = sum(variance**2 / freedom for variance, freedom in variances)
    whole = sum(variance for variance, _ in variances)
    half = student(whole**2 / below) * math.sqrt(whole) if below > 0 else 0.0
    low, high = (scale.back(middle + end) for end in (-half, half))
    return Interval(value, min(low, value), max(high, value), least)


def angles(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Angles a, and P(|A| <= a) of Student's law: T = sqrt(freedom) tan(A).

    A has a density of cos(a)^(freedom - 1).
    """
    angle = np.linspace(0, min(math.pi / 2, 40 / math.sqrt(freedom)), 20_001)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return angle, mass / mass[-1]


@lru_cache(maxsize=4096)
def student(freedom: float, level: float = LEVEL) -> float:
    """t with P(|T| <= t) = level, for Student's law of this many degrees, 1 or more, whole or not.

    >>> round(student(19), 3), round(student(3.5), 3)
    (2.093, 2.94)
    """
    angle, mass = angles(freedom)
    return math.sqrt(freedom) * math.tan(float(np.interp(level, mass, angle)))
