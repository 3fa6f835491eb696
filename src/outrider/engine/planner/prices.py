"""What the shapes of a drafter cost beside a plain step, by the table and by recent steps."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from outrider.costs import Costs, Curve
from outrider.types import Shape

CONTEXT = 64  #: committed tokens that share a price
RECENT = 31  #: steps whose times are remembered
ENOUGH = 8  #: steps of one size before their own times count
BOUND = 1.5  #: a measured time corrects the table by this factor at most


class Prices(NamedTuple):
    """Milliseconds of a plain step, and what each draft costs more."""

    plain: float
    more: tuple[float, ...]


class Pricing:
    """The table's prices, corrected by what steps of a size have taken beside other steps.

    A busy neighbour slows all sizes down, and then nothing is corrected: what counts is how long a
    size takes beside the others, as the median of recent steps. The table alone is what a text may
    depend on.
    """

    def __init__(self, costs: Costs, drafts: Sequence[Shape]) -> None:
        self.costs, self._nodes = costs, [shape.max_nodes for shape in drafts]
        self._known: dict[tuple[int, int, bool], Prices] = {}
        self._steps: dict[tuple[int, int, int], float] = {}
        self._curves: dict[tuple[int, int], Curve] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._by_nodes: dict[int, deque[float]] = {}
        self._factor: dict[int, float] = {}
        self._overall, self._count = 1.0, 0

    def of(self, rows: int, context: int, corrected: bool = False) -> Prices:
        """The prices of a step of so many rows that are at most so long."""
        key = rows, context // CONTEXT, corrected
        found = self._known.get(key)
        if found is None:
            plain = self.step(1, rows, context, corrected)
            steps = [self.step(nodes, rows, context, corrected) for nodes in self._nodes]
            found = self._known[key] = Prices(plain, tuple(step - plain for step in steps))
        return found

    def step(self, nodes: int, rows: int, context: int, corrected: bool = False) -> float:
        """Milliseconds of a step."""
        key = rows, context // CONTEXT
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = self.costs.curve(rows, context // CONTEXT * CONTEXT)
        found = self._steps.get((nodes, *key))
        if found is None:
            found = self._steps[nodes, rows, key[1]] = curve.milliseconds(nodes)
        return found * self._factor.get(nodes, 1.0) if corrected else found

    def took(self, nodes: int, rows: int, context: int, milliseconds: float) -> None:
        """A step of this size took so long."""
        ratio = milliseconds / self.step(nodes, rows, context)
        self._recent.append(ratio)
        sizes = self._by_nodes.setdefault(nodes, deque(maxlen=RECENT))
        sizes.append(ratio / self._overall)
        self._count += 1
        if self._count % ENOUGH:
            return
        self._overall = median(self._recent)
        self._factor = {
            n: min(max(median(times), 1 / BOUND), BOUND)
            for n, times in self._by_nodes.items()
            if len(times) >= ENOUGH
        }
        self._known = {key: prices for key, prices in self._known.items() if not key[2]}
