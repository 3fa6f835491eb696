"""The draft's top tokens in a tree of fixed shape (Medusa's and EAGLE-1's layout).

Nothing is drawn, so no draft law is kept and `match` is the best rule: it accepts p of the placed
set. Strong at low temperature, weak at 1.
"""

from dataclasses import dataclass
from typing import ClassVar

from outrider import ops
from outrider.drafters import growing
from outrider.drafters.growing import Children, Keys, Level, shapes
from outrider.types import (
    Cache,
    Context,
    Draft,
    Kind,
    LanguageModel,
    Laws,
    Scores,
    Shape,
    Verdict,
)


@dataclass(frozen=True)
class StaticTree:
    """Child j of a node is the draft's j-th best token there.

    The shape is `counts[l]` children per node of level l, or `parents` in BFS order.
    """

    model: LanguageModel
    counts: tuple[int, ...] = (3, 2, 2, 1)
    parents: tuple[int, ...] | None = None
    name: ClassVar[str] = "static_tree"
    hidden: ClassVar[bool] = False
    drawn: ClassVar[tuple[Kind, ...]] = (Kind.FIXED,)
    kinds: ClassVar[frozenset[Kind]] = frozenset(drawn)

    def __post_init__(self) -> None:
        counts, parents = shapes.parents_for(self.name, self.counts, self.parents)
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "parents", parents)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The tree, and cut at each depth."""
        return shapes.of_tree(self.parents or (-1,))

    def open(self, context: Context, capacity: int) -> Cache:
        """The draft model's cache."""
        return growing.open_cache(self.model, context, capacity)

    def propose(self, memory: Cache, context: Context, shape: Shape) -> Draft:
        """Fill the tree level by level, one draft-model call each."""
        layout = shapes.cut(self, self.parents, shape, context)
        return growing.grow([growing.Model(self.model, memory)], context, layout, self)

    def children(self, law: Laws, level: Level, keys: Keys) -> Children:
        """The top tokens that the filters leave in."""
        tokens, there = ops.largest(ops.scaled(law), level.most)
        return Children(level.spread(tokens), level.spread(there), law)

    def commit(
        self, memory: Cache, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Keep the accepted path's entries."""
        growing.keep_path(self.model, memory, context, draft, verdict)
