"""What to draft in the next step: one of the drafter's shapes, from what finished steps have shown.

A plan may depend on committed text and on verdicts of earlier steps, never on this step's draws
(docs/rules.md, "What a draft must say about itself").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from outrider.engine.blocks import HostBlock
from outrider.engine.request import Request
from outrider.types import Costs, Shape

P = TypeVar("P")


class Planner(Protocol[P]):
    """Chooses a shape for every step. Its state is its own and goes through the loop."""

    def open(self, shapes: Sequence[Shape], costs: Costs | None) -> P:
        """The state of a new run over these shapes, the usual one first."""

    def plan(self, state: P, rows: Sequence[Request]) -> Shape:
        """One of the shapes, for a step of these rows; `most_B` may ask for less in some."""

    def learn(self, state: P, blocks: Sequence[HostBlock]) -> P:
        """The state after a finished step that emitted these blocks."""


@dataclass(frozen=True)
class Fixed:
    """The drafter's usual shape in every step.

    >>> from outrider.types import Costs, Shape
    >>> usual, small = Shape(5, 5, 4, True), Shape(2, 2, 1, True)
    >>> Fixed().plan(Fixed().open([usual, small], None), []).max_depth
    4
    """

    def open(self, shapes: Sequence[Shape], costs: Costs | None) -> Shape:
        """The usual shape."""
        return shapes[0]

    def plan(self, state: Shape, rows: Sequence[Request]) -> Shape:
        """The usual shape."""
        return state

    def learn(self, state: Shape, blocks: Sequence[HostBlock]) -> Shape:
        """Nothing."""
        return state
