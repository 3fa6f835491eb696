"""One shape in every step: what a user who gives numbers asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.costs import Costs
from outrider.engine.speculation_policy.protocol import (
    BatchView,
    PlanReport,
    StepReport,
)
from outrider.errors import ConfigurationError
from outrider.types import DraftShape


@dataclass(frozen=True)
class FixedLength:
    """The same shape in every step: the drafter's usual one, or its first of this depth.

    >>> from outrider.types import DraftShape
    >>> usual, small = DraftShape(5, 5, 4, True), DraftShape(2, 2, 1, True)
    >>> FixedLength().plan(FixedLength().open([usual, small], None), BatchView([])).max_depth
    4
    >>> FixedLength(1).open([usual, small], None).max_nodes
    2
    """

    depth: int | None = None

    def open(self, shapes: Sequence[DraftShape], costs: Costs | None) -> DraftShape:
        """That shape. Raises ConfigurationError where the drafter has none of this depth."""
        if self.depth is None:
            return shapes[0]
        for shape in shapes:
            if shape.max_depth == self.depth:
                return shape
        depths = sorted({shape.max_depth for shape in shapes})
        raise ConfigurationError(
            f"depth must be one that the drafter has, {depths}; got {self.depth}; use one of them"
        )

    def plan(self, state: DraftShape, view: BatchView) -> DraftShape:
        """That shape."""
        return state

    def learn(self, state: DraftShape, step: StepReport) -> DraftShape:
        """Nothing."""
        return state

    def report(self, state: DraftShape) -> PlanReport:
        """Nothing."""
        return PlanReport()
