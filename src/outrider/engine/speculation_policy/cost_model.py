"""What the shapes of a drafter cost beside a plain step, by the table and by recent steps."""

from collections import deque
from collections.abc import Collection, Sequence
from math import sqrt
from operator import mul
from statistics import geometric_mean
from typing import NamedTuple, TypeAlias

from outrider.costs import Costs, between
from outrider.types import DraftShape

CONTEXT = 64  #: committed tokens that share a price
RECENT = 31  #: steps of a size whose times are remembered
NEAR = 8  #: steps before one, of any size, beside which it is slow or fast
ENOUGH = 8  #: steps of one size before their own times count
GRAIN = 0.02  #: smaller corrections are left alone
BOUND = 1.5  #: a measured time corrects the table by this factor at most


_Line: TypeAlias = tuple[int, list[float], list[float]]


class StepPrices(NamedTuple):
    """Milliseconds of a plain step, and what each draft costs more."""

    plain: float
    more: tuple[float, ...]


class CostModel:
    """The table's prices, corrected by what steps of a size have taken beside other steps.

    A busy neighbour slows all sizes down, and then nothing is corrected: what counts is how long a
    size takes beside the steps before it, as the median of recent ones, as far as that is sure. The
    table alone is what a text may depend on.
    """

    def __init__(self, costs: Costs, drafts: Sequence[DraftShape]) -> None:
        self.costs = costs
        self._nodes = [1, *(shape.max_nodes for shape in drafts)]
        contexts = {context for by_context in costs.times.values() for context in by_context}
        self._contexts = sorted(contexts)
        self._lines: dict[int, list[_Line]] = {}
        self._known: dict[tuple[int, int, bool], StepPrices] = {}
        self._near: deque[float] = deque(maxlen=NEAR)
        self._by_nodes: dict[int, deque[float]] = {}
        self._factor: dict[int, float] = {}
        self._count = 0

    def of(self, rows: int, context: int, corrected: bool = False) -> StepPrices:
        """The prices of a step of so many rows that are at most so long."""
        context -= context % CONTEXT
        key = rows, context, corrected
        found = self._known.get(key)
        if found is None:
            steps = self._steps(rows, context)
            if corrected and self._factor:
                factors = [self._factor.get(nodes, 1.0) for nodes in self._nodes]
                steps = list(map(mul, steps, factors))
            plain = steps[0]
            more = tuple([step - plain for step in steps[1:]])
            found = self._known[key] = StepPrices(plain, more)
        return found

    def step(self, nodes: int, rows: int, context: int, corrected: bool = False) -> float:
        """Milliseconds of a step."""
        plain, more = self.of(rows, context, corrected)
        if nodes == 1 or not more:
            return plain
        return plain + between(self._nodes[1:], more, nodes)

    def _steps(self, rows: int, context: int) -> list[float]:
        """Milliseconds of a plain step and of every draft's, between measured contexts."""
        lines = self._lines.get(rows)
        if lines is None:
            lines = self._lines[rows] = self._measured(rows)
        at = 0
        while at + 1 < len(lines) and context >= lines[at + 1][0]:
            at += 1
        low, steps, slopes = lines[at]
        beyond = max(context - low, 0)
        return [step + slope * beyond for step, slope in zip(steps, slopes, strict=True)]

    def _measured(self, rows: int) -> list[_Line]:
        """From each measured context on: the steps there, and what they rise by with a token."""
        at = self._contexts
        curves = [self.costs.curve(rows, context) for context in at]
        steps = [[curve.milliseconds(n) for n in self._nodes] for curve in curves]
        if len(at) == 1:
            return [(at[0], steps[0], [0.0] * len(self._nodes))]
        return [
            (low, less, [(b - a) / (high - low) for a, b in zip(less, more, strict=True)])
            for low, high, less, more in zip(at, at[1:], steps, steps[1:], strict=False)
        ]

    def took(self, nodes: int, rows: int, context: int, milliseconds: float) -> None:
        """A step of this size took so long; 0 tells nothing: what was read took it all."""
        if not milliseconds:
            return
        ratio = milliseconds / self.step(nodes, rows, context)
        if self._near:
            sizes = self._by_nodes.setdefault(nodes, deque(maxlen=RECENT))
            sizes.append(ratio / geometric_mean(self._near))
        self._near.append(ratio)
        self._count += 1
        if self._count % ENOUGH:
            return
        factors = {
            n: min(max(round(_surely(times) / GRAIN) * GRAIN, 1 / BOUND), BOUND)
            for n, times in self._by_nodes.items()
            if len(times) >= ENOUGH
        }
        if factors != self._factor:
            self._factor = factors
            self._known = {key: prices for key, prices in self._known.items() if not key[2]}


def _surely(ratios: Collection[float]) -> float:
    """What is nearest to 1 of where the ratios' median lies in 99 cases of 100.

    The interval between two of the ratios in their order. On a busy machine single steps vary by
    more than a drafted token costs; what that may be is no reason to correct anything.

    >>> _surely([1.3] * 9), _surely([0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    (1.3, 1.0)
    """
    ranked, count = sorted(ratios), len(ratios)
    least = int(max(count / 2 - 1.5 * sqrt(count), 0))
    return min(max(1.0, ranked[least]), ranked[count - 1 - least])
