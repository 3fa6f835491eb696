"""What a planner is: it chooses a shape for every step, by what finished steps have shown.

A plan may depend on committed text and on verdicts of earlier steps, never on this step's draws;
and a row whose seed another row has, too, on nothing of that other row (docs/planner.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from outrider.costs import Costs
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.errors import ConfigurationError
from outrider.types import DraftShape

P = TypeVar("P")


class PlannedRow(NamedTuple):
    """What a planner may look at of a running row: all of it is committed."""

    request_id: int  #: as blocks have it
    request: Request
    length: int  #: committed tokens that the host knows of
    #: [n]: tokens that n drafted nodes are expected to add, of drafters that foresee; who does not
    #: ask does not pay for it
    foresee: Callable[[], Sequence[float]] | None = None


class BatchView(NamedTuple):
    """What a planner may look at ahead of a step."""

    rows: Sequence[PlannedRow]
    max_num_seqs: int = 1  #: most rows of the run: known before anything is drawn
    ignores_drafts: bool = (
        True  #: whether no text can depend on the plan: greedy, placed or coupled rows
    )
    closed: bool = False  #: whether nobody comes after these rows: the slowest is the run's time
    unread: int = 0  #: tokens of every row that a draft model reads before it drafts
    dropped: bool = False  #: whether of what it drafted first nothing was kept


class StepReport(NamedTuple):
    """A finished step."""

    blocks: Sequence[StepOutput]
    nodes: int = 1  #: that each row was scored with, the pending token included
    depth: int = 0  #: of the deepest of them
    #: what it took; None where nobody waited for it, or it read the end of prompts besides
    milliseconds: float | None = None
    late: bool = False  #: whether it is told when the next one has been planned


class PlanReport(NamedTuple):
    """What a planner says of a run so far, for people."""

    predicted_ms: float = 0.0  #: of the steps so far, by the costs
    why_plain: str = ""  #: why most steps were plain, if they were and it can tell


class Planner(Protocol[P]):
    """Chooses a shape for every step. Its state is its own and goes through the loop."""

    def open(self, shapes: Sequence[DraftShape], costs: Costs | None) -> P:
        """The state of a new run over these shapes, the usual one first; `PLAIN` is among them."""

    def plan(self, state: P, view: BatchView) -> DraftShape:
        """One of the shapes, for a step of these rows; `most_B` and `sizes` may ask for
        less in some.
        """

    def learn(self, state: P, step: StepReport) -> P:
        """The state after a finished step."""

    def report(self, state: P) -> PlanReport:
        """What there is to tell of a run."""


# One shape in every step: what a user who gives numbers asks for.


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
        return state

    def learn(self, state: DraftShape, step: StepReport) -> DraftShape:
        return state

    def report(self, state: DraftShape) -> PlanReport:
        return PlanReport()
