"""What the shapes of a drafter cost beside a plain step, by the table and by recent steps."""

from collections import deque
from collections.abc import Collection, Sequence
from math import exp, inf, log
from statistics import median
from typing import NamedTuple, TypeAlias

from outrider.costs import Costs, between
from outrider.types import DraftShape

CONTEXT = 64  #: committed tokens that share a price
RECENT = 31  #: steps of a size whose times are remembered
NEAR = 8  #: steps before one, of any size, beside which it is slow or fast
ENOUGH = 8  #: steps of one size before their own times count
GRAIN = 0.02  #: smaller corrections are left alone
BOUND = 1.5  #: a measured time corrects the table by this factor at most
TABLE_ERROR = 0.03  #: by how much a table is wrong, as a rule: its standard error
_OF_QUARTILES = 0.93  #: of a median of n: this part of the ratios' middle half, by the root of n


_Line: TypeAlias = tuple[int, list[float], list[float]]


class StepPrices(NamedTuple):
    """Milliseconds of a plain step, and what each draft costs more."""

    plain: float
    more: tuple[float, ...]
    node: float = 0.0  #: what one more node costs at least, wherever it is added


class CostModel:
    """The table's prices, corrected by what steps of a size have taken beside other steps.

    A busy neighbour slows all sizes down, and then nothing is corrected: what counts is how long a
    size takes beside the steps before it, by the median of recent ones and the table (`_likely`). A
    size is so many nodes of about so many rows: what three nodes take of one row says nothing of
    three nodes of sixteen. The table alone is what a text may depend on.

    before  that of the run before, with the same table and drafts: what it has shown counts, as
            most runs are too short to find out anew. A step of every size is forgotten with each
            run, so that one that seemed dear, and is not asked for any more, is tried again.
    """

    def __init__(
        self, costs: Costs, drafts: Sequence[DraftShape], before: "CostModel | None" = None
    ) -> None:
        self.costs, self.drafts = costs, tuple(drafts)
        if before is None:
            self.deepest = max((shape.max_depth for shape in drafts), default=0)
            self._nodes = [1, *(shape.max_nodes for shape in drafts)]
            contexts = {context for by_context in costs.times.values() for context in by_context}
            self._contexts = sorted(contexts)
            self._lines: dict[int, list[_Line]] = {}
        else:
            self.deepest, self._nodes = before.deepest, before._nodes
            self._contexts, self._lines = before._contexts, before._lines
        self._known: dict[tuple[int, int, bool], StepPrices] = {}
        self._near: deque[float] = deque(maxlen=NEAR)  #: logarithms
        self._by_size: dict[tuple[int, int], deque[float]] = {}
        self._factor: dict[tuple[int, int], float] = {}
        self._count = 0
        if before is not None:
            for size, times in list(before._by_size.items()):
                self._by_size[size] = deque(list(times)[1:], maxlen=RECENT)
            self._correct()

    def of(self, rows: int, context: int, corrected: bool = False) -> StepPrices:
        """The prices of a step of so many rows that are at most so long."""
        context -= context % CONTEXT
        key = rows, context, corrected
        found = self._known.get(key)
        if found is None:
            steps = self._steps(rows, context)
            if corrected and self._factor:
                about = rows.bit_length()
                for at, nodes in enumerate(self._nodes):
                    steps[at] *= self._factor.get((about, nodes), 1.0)
            plain, more = steps[0], []
            low, less, least = 1, 0.0, inf  # what a node costs at least
            for high, step in zip(self._nodes[1:], steps[1:], strict=True):
                more.append(step - plain)
                least = min(least, (more[-1] - less) / max(high - low, 1))
                low, less = high, more[-1]
            node = max(least, 0.0) if more else 0.0
            found = self._known[key] = StepPrices(plain, tuple(more), node)
        return found

    def step(self, nodes: int, rows: int, context: int, corrected: bool = False) -> float:
        """Milliseconds of a step."""
        plain, more, _ = self.of(rows, context, corrected)
        if nodes == 1 or not more:
            return plain
        if nodes in self._nodes:
            return plain + more[self._nodes.index(nodes) - 1]
        return plain + between(self._nodes[1:], more, nodes)

    def read_on(self, tokens: int, rows: int) -> float:
        """What a draft model needs to read so many tokens of every row that it has not read.

        >>> CostModel(Costs({}, {1: 0.1, 2: 0.2}), ()).read_on(10, 4)
        4.0
        """
        reading = self.costs.reading
        if not tokens or not reading:
            return 0.0
        nearest = rows
        if rows not in reading:
            nearest = min(reading, key=lambda known: (abs(known - rows), known))
        return tokens * reading[nearest] * rows / nearest

    def _steps(self, rows: int, context: int) -> list[float]:
        """Milliseconds of a plain step and of every draft's, between measured contexts."""
        lines = self._lines.get(rows)
        if lines is None:
            lines = self._lines[rows] = self._measured(rows)
        at = 0
        while at + 1 < len(lines) and context >= lines[at + 1][0]:
            at += 1
        low, steps, slopes = lines[at]
        beyond, found = max(context - low, 0), []
        for step, slope in zip(steps, slopes, strict=True):
            found.append(step + slope * beyond)
        return found

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

    def observe(self, nodes: int, rows: int, context: int, milliseconds: float) -> None:
        """A step of this size took so long; 0 tells nothing: what was read took it all."""
        if not milliseconds:
            return
        ratio = log(milliseconds / self.step(nodes, rows, context))
        near = self._near
        if near:
            size = rows.bit_length(), nodes
            sizes = self._by_size.get(size)
            if sizes is None:
                sizes = self._by_size[size] = deque(maxlen=RECENT)
            sizes.append(exp(ratio - sum(near) / len(near)))
        near.append(ratio)
        self._count += 1
        if not self._count % ENOUGH:
            self._correct()

    def _correct(self) -> None:
        """Correct the table by what is known by now."""
        factors = {}
        for size, times in self._by_size.items():
            if len(times) >= ENOUGH:
                factor = round(_likely(times) / GRAIN) * GRAIN
                factors[size] = min(max(factor, 1 / BOUND), BOUND)
        if factors != self._factor:
            self._factor = factors
            for key in list(self._known):
                if key[2]:
                    del self._known[key]


def _likely(ratios: Collection[float]) -> float:
    """What a size takes beside others: 1, as the table says, or the ratios' median, or between.

    Each counts by how sure it is. A table is of few looks, within a start's budget; and a median of
    steps that vary much, as they do on a busy machine, says less than one of steps that agree.

    >>> _likely([1.1] * 9), round(_likely([0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]), 2)
    (1.1, 1.01)
    """
    ranked, count = sorted(ratios), len(ratios)
    middle = median(ranked)
    spread = ranked[-1 - count // 4] - ranked[count // 4]
    unsure = (_OF_QUARTILES * spread) ** 2 / count
    return 1 + (middle - 1) * TABLE_ERROR**2 / (TABLE_ERROR**2 + unsure)
