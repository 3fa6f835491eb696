"""What to draft in the next step: one of the drafter's shapes, from what finished steps have shown.

A plan may depend on committed text and on verdicts of earlier steps, never on this step's draws
(docs/rules.md, "What a draft must say about itself").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from outrider.engine.blocks import HostBlock
from outrider.engine.request import Request
from outrider.errors import ConfigurationError, UnknownName
from outrider.types import Costs, Shape

P = TypeVar("P")


class Row(NamedTuple):
    """What a planner may look at of a running row: all of it is committed."""

    number: int  #: the request's, as blocks name it
    request: Request
    length: int  #: committed tokens that the host knows of
    #: gains[n]: tokens that n drafted nodes are expected to add, of drafters that foresee
    gains: Sequence[float] | None = None


class Planner(Protocol[P]):
    """Chooses a shape for every step. Its state is its own and goes through the loop."""

    def open(self, shapes: Sequence[Shape], costs: Costs | None) -> P:
        """The state of a new run over these shapes, the usual one first; `PLAIN` is among them."""

    def plan(self, state: P, rows: Sequence[Row]) -> Shape:
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

    def plan(self, state: Shape, rows: Sequence[Row]) -> Shape:
        """The usual shape."""
        return state

    def learn(self, state: Shape, blocks: Sequence[HostBlock]) -> Shape:
        """Nothing."""
        return state


PRIOR, WEIGHT = 0.7, 2.0  #: acceptance before anything is known, and how many looks that is worth
_MEMORY = 0.95  #: what earlier looks count for beside those of the next step
_FIRST, _LONGEST = 16, 64  #: plain steps between two looks, doubled while they are in vain


class Seen(NamedTuple):
    """What a run of `Adaptive` has shown so far."""

    shapes: tuple[Shape, ...]
    costs: Costs
    kept: float = 0.0  #: levels of drafts that were accepted, old ones count less
    tried: float = 0.0  #: and those that were looked at
    waited: int = 0  #: steps since anything was drafted
    pause: int = 0  #: steps to wait before the next look

    @property
    def acceptance(self) -> float:
        """The chance that a level of a draft is accepted, if the one above it was."""
        return (self.kept + PRIOR * WEIGHT) / (self.tried + WEIGHT)

    def speed(self, shape: Shape, rows: int) -> float:
        """Tokens per millisecond to be expected of a step."""
        tokens = sum(self.acceptance**level for level in range(shape.max_depth + 1))
        return tokens / self.milliseconds(shape, rows)

    def milliseconds(self, shape: Shape, rows: int) -> float:
        """What a step costs: the target's call, and one of the draft model for each level."""
        took = self.costs.target.milliseconds(rows * shape.max_nodes)
        if self.costs.draft is not None and shape.max_depth:
            width = (shape.max_nodes - 1) / shape.max_depth
            took += shape.max_depth * self.costs.draft.milliseconds(round(rows * width))
        return took

    def best(self, rows: int) -> Shape:
        """The fastest shape."""
        return max(self.shapes, key=lambda shape: self.speed(shape, rows))


@dataclass(frozen=True)
class Adaptive:
    """The shape with most tokens per millisecond, plain steps included, by what a run has shown.

    Acceptance is estimated over the steps so far (a level of a tree counts once, whatever its
    width), costs are the measured curves. Where plain steps are best, the cheapest draft is tried
    now and then, more and more rarely. The choice follows from costs and from blocks that are
    committed, never from a step's own draws, so every law stays the target's. Greedy and coupled
    texts stay the same, too; other sampled texts follow from the seed and the costs.

    >>> from outrider.types import PLAIN, Costs, Curve
    >>> chain = [Shape(d, d + 1, d, True) for d in (4, 3, 2, 1)] + [PLAIN]
    >>> costs = Costs(Curve.of({1: 6.0, 8: 7.0}), Curve.of({1: 2.0}))
    >>> seen, row = Adaptive().open(chain, costs), Row(0, Request([1]), 1)
    >>> Adaptive().plan(seen, [row]).max_depth
    2
    >>> Adaptive().plan(seen._replace(kept=19, tried=20), [row]).max_depth
    4
    >>> Adaptive().plan(seen._replace(kept=1, tried=20, pause=16), [row]) == PLAIN
    True
    """

    def open(self, shapes: Sequence[Shape], costs: Costs | None) -> Seen:
        """Nothing is known yet. Raises ConfigurationError without costs."""
        if costs is None:
            raise ConfigurationError(
                "the adaptive planner weighs tokens against milliseconds; got no costs; load with "
                "planner='adaptive', which measures them, or give Engine(..., costs=...)"
            )
        return Seen(tuple(shapes), costs)

    def plan(self, state: Seen, rows: Sequence[Row]) -> Shape:
        """The fastest shape, or the cheapest draft if it is time for another look."""
        best = state.best(len(rows))
        drafts = [shape for shape in state.shapes if shape.max_depth]
        if best.max_depth or not drafts or state.waited < state.pause:
            return best
        return min(drafts, key=lambda shape: state.milliseconds(shape, len(rows)))

    def learn(self, state: Seen, blocks: Sequence[HostBlock]) -> Seen:
        """Count the levels that were looked at: those accepted, and the first that was not."""
        drafted = [block for block in blocks if block.drafted]
        if not drafted:
            return state._replace(waited=state.waited + 1)
        kept, tried = _MEMORY * state.kept, _MEMORY * state.tried
        for block in drafted:
            kept += block.accepted
            tried += min(block.accepted + 1, _depth(state.shapes, block.drafted))
        after = state._replace(kept=kept, tried=tried, waited=0)
        if after.best(len(blocks)).max_depth:
            return after._replace(pause=0)
        return after._replace(pause=min(max(2 * state.pause, _FIRST), _LONGEST))


def _depth(shapes: Sequence[Shape], drafted: int) -> int:
    """How deep a draft of so many tokens is: as the smallest shape that has room for it."""
    room = [shape.max_depth for shape in shapes if shape.max_nodes > drafted]
    return min(room, default=max(shape.max_depth for shape in shapes))


PLANNERS: dict[str, Callable[[], Planner[Any]]] = {"fixed": Fixed, "adaptive": Adaptive}


def named(planner: str | Planner[Any] | None) -> Planner[Any]:
    """The planner of that name; None: `Fixed`."""
    if not isinstance(planner, str):
        return Fixed() if planner is None else planner
    if planner not in PLANNERS:
        raise UnknownName("planner", planner, PLANNERS)
    return PLANNERS[planner]()
