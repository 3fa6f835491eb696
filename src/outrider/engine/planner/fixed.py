"""One shape in every step: what a user who gives numbers asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.costs import Costs
from outrider.engine.planner.protocol import Finished, Report, View
from outrider.errors import ConfigurationError
from outrider.types import Shape


@dataclass(frozen=True)
class Fixed:
    """The same shape in every step: the drafter's usual one, or its first of this depth.

    >>> from outrider.types import Shape
    >>> usual, small = Shape(5, 5, 4, True), Shape(2, 2, 1, True)
    >>> Fixed().plan(Fixed().open([usual, small], None), View([])).max_depth
    4
    >>> Fixed(1).open([usual, small], None).max_nodes
    2
    """

    depth: int | None = None

    def open(self, shapes: Sequence[Shape], costs: Costs | None) -> Shape:
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

    def plan(self, state: Shape, view: View) -> Shape:
        """That shape."""
        return state

    def learn(self, state: Shape, step: Finished) -> Shape:
        """Nothing."""
        return state

    def report(self, state: Shape) -> Report:
        """Nothing."""
        return Report()
