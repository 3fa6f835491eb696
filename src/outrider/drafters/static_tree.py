"""The draft's top tokens in a tree of fixed shape (Medusa's and EAGLE-1's layout).

Nothing is drawn, so no draft law is kept and `match` is the best rule: it accepts p of the placed
set. Strong at low temperature, weak at 1.
"""

from dataclasses import dataclass
from typing import ClassVar

from outrider import ops
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.shapes import recipe
from outrider.drafters.tree_drafting import Children, DrawKeys, TreeLevel
from outrider.types import DrawKind, LanguageModel, Laws


@dataclass(frozen=True)
class Top:
    """Child j of a node is the draft's j-th best token there."""

    drawn: ClassVar[tuple[DrawKind, ...]] = (DrawKind.FIXED,)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """The top tokens that the filters leave in."""
        tokens, there = ops.largest(ops.scaled(law), level.most)
        return Children(level.spread(tokens), level.spread(there), law)


def StaticTree(
    model: LanguageModel,
    counts: tuple[int, ...] = (3, 2, 2, 1),
    parents: tuple[int, ...] | None = None,
) -> DraftModel:
    """A tree of the draft's top tokens: `counts` children per level, or `parents` in BFS order."""
    return DraftModel(model, counts, parents=parents, name="static_tree", policy=Top())


RECIPE = recipe(StaticTree)
