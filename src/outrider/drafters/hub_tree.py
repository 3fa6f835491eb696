"""Hub nodes (SpecHub, Sun, Zhou et al. 2024; Hu et al. 2025): one child is drawn, the rest placed.

Of c children the draft's top c - 1 tokens are placed and one is drawn from the draft's law without
them; the drawn one stands first. Judged by `hub` or `traversal` a node accepts the most any rule
can for such a draft.
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
class HubTree:
    """A node with one child draws it from the whole law.

    The shape is `counts[l]` children per node of level l, or `parents` in BFS order.
    """

    model: LanguageModel
    counts: tuple[int, ...] = (3, 2, 2, 1)
    parents: tuple[int, ...] | None = None
    name: ClassVar[str] = "hub_tree"
    hidden: ClassVar[bool] = False
    drawn: ClassVar[tuple[Kind, ...]] = (Kind.WITHOUT, Kind.FIXED)
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
        """The drawn token, then the top tokens; the declared law leaves the latter out."""
        names = keys.own(level.start, level.stop)
        placed = [max(fan - 1, 0) for fan in level.fan]
        tokens, there, law = ops.several(law, names, 1, placed)
        return Children(level.spread(tokens), level.spread(there), law)

    def commit(
        self, memory: Cache, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Keep the accepted path's entries."""
        growing.keep_path(self.model, memory, context, draft, verdict)
