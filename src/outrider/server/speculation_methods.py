"""Lanes: rows of one lane share a drafter, a rule and its shapes. One target under all of them.

"default"     the drafter and rule that the server was started with
"coupled"     the same drafter, verified by the target's own noise: same seed, same text, whatever
              is drafted and whoever stands beside; seeded requests go here
"prediction"  copies of a text that the answer is expected to resemble
"none"        plain decoding
and any drafter of the registry that needs no parts, by its name
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from outrider.drafters import (
    DRAFTERS,
    DrafterParts,
    DraftModel,
    DynamicTree,
    Recall,
    ReferenceLookup,
    Root,
    make,
)
from outrider.engine.engine import Engine
from outrider.errors import OutriderError, UnknownName
from outrider.types import Drafter

DEFAULT, COUPLED, PREDICTION, NONE = "default", "coupled", "prediction", "none"
#: Other servers' names for drafters.
ALIASES = {"ngram": "prompt_lookup"}
#: Tokens of a prediction that are verified at once: they cost nothing to draft.
PREDICTED = 16


@dataclass(frozen=True)
class MethodSet:
    """What requests may name: lanes with the nodes of their largest drafts.

    `drafter` is the server's own. One that cannot be made here has no nodes, and says so when it is
    asked for. `copying` are those that draft from a prediction.
    """

    drafter: str
    nodes: Mapping[str, int]
    copying: frozenset[str] = frozenset({PREDICTION})

    def named(self, method: str) -> str:
        """The lane of a method, under whatever name it is known. Raises UnknownName."""
        name = ALIASES.get(method, method)
        if name == self.drafter:
            return DEFAULT
        if name not in self.nodes:
            here = tuple(lane for lane, nodes in self.nodes.items() if nodes)
            raise UnknownName("method", method, here)
        return name


class MethodRouter(Mapping[str, Engine]):
    """The engines of a server by lane; made when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made = {DEFAULT: engine}
        free = [name for name, recipe in DRAFTERS.items() if set(recipe.needs) <= {"target"}]
        self._names = (DEFAULT, COUPLED, PREDICTION, NONE, *(n for n in free if n != Root.name))

    @property
    def methods(self) -> MethodSet:
        """What requests may name."""
        nodes = dict.fromkeys(self, 0)
        for lane in self:
            with suppress(OutriderError):
                nodes[lane] = self[lane].drafter.shapes[0].max_nodes
        own = self._engine.drafter.name
        drafters = {lane: lane for lane in self} | {DEFAULT: own, COUPLED: own}
        copying = {lane for lane, name in drafters.items() if _copies(name)}
        return MethodSet(own, nodes, frozenset({PREDICTION, *copying}))

    def __getitem__(self, lane: str) -> Engine:
        if lane not in self._made:
            self._made[lane] = self._new(lane)
        if lane == COUPLED:  # what was measured since
            self._made[lane].costs = self._engine.costs
        return self._made[lane]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _new(self, lane: str) -> Engine:
        own = self._engine
        if lane == COUPLED:
            more = own.planner, own.costs
            return Engine(own.target, reproducible(own), "match", *more, own.graphs, own.kept)
        if lane == PREDICTION:
            return Engine(own.target, ReferenceLookup(PREDICTED), "match", graphs=own.graphs)
        if lane == NONE:
            return Engine(own.target, Root(), "match", graphs=own.graphs)
        drafter = make(lane, DrafterParts(target=own.target))
        return Engine(own.target, drafter, "match", costs=own.costs, graphs=own.graphs)


def _copies(drafter: str) -> bool:
    """Whether a drafter of this name has a use for a request's reference."""
    return drafter in DRAFTERS and DRAFTERS[drafter].copies


def coupled(drafter: Drafter) -> Drafter:
    """The drafter with the target's noise where it can draw with it.

    Others stay as they are: `match` emits the target's own text for the seed whatever is drafted.
    """
    if isinstance(drafter, DynamicTree) or (
        isinstance(drafter, DraftModel) and drafter.policy is None
    ):
        return replace(drafter, shared_noise=True)
    return drafter


def reproducible(engine: Engine) -> Drafter:
    """What seeded requests are drafted with: their texts are one at any load.

    Where a node of a tree may round otherwise than the same text does in a row, which trees there
    are depends on the load: a chain of the same drafter, or plain decoding.
    """
    drafter = coupled(engine.drafter)
    if engine.target.trees_alike or all(shape.is_chain for shape in drafter.shapes):
        return drafter
    if isinstance(drafter, Recall):
        return replace(drafter, chain=True)
    if isinstance(drafter, DraftModel | DynamicTree):
        depth = drafter.shapes[0].max_depth
        return DraftModel(drafter.model, (1,) * depth, shared_noise=True)
    return Root()
