"""The drafter's usual shape in every step: what a user who gives numbers asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.costs import Costs
from outrider.engine.planner.protocol import Finished, Report, View
from outrider.types import Shape


@dataclass(frozen=True)
class Fixed:
    """The drafter's usual shape in every step.

    >>> from outrider.types import Shape
    >>> usual, small = Shape(5, 5, 4, True), Shape(2, 2, 1, True)
    >>> Fixed().plan(Fixed().open([usual, small], None), View([])).max_depth
    4
    """

    def open(self, shapes: Sequence[Shape], costs: Costs | None) -> Shape:
        """The usual shape."""
        return shapes[0]

    def plan(self, state: Shape, view: View) -> Shape:
        """The usual shape."""
        return state

    def learn(self, state: Shape, step: Finished) -> Shape:
        """Nothing."""
        return state

    def report(self, state: Shape) -> Report:
        """Nothing."""
        return Report()
