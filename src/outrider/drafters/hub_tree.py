"""Hub nodes (SpecHub, Sun, Zhou et al. 2024; Hu et al. 2025): one child is drawn, the rest placed.

Of c children the draft's top c - 1 tokens are placed and one is drawn from the draft's law without
them; the drawn one stands first. Verified by `hub` or `traversal` a node accepts the most any rule
can for such a draft.
"""

from dataclasses import dataclass
from typing import ClassVar

from outrider import ops
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.shapes import recipe
from outrider.drafters.tree_drafting import Children, DrawKeys, TreeLevel
from outrider.types import DrawKind, LanguageModel, Laws


@dataclass(frozen=True)
class HubPolicy:
    """A node with one child draws it from the whole law."""

    drawn: ClassVar[tuple[DrawKind, ...]] = (DrawKind.WITHOUT, DrawKind.FIXED)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """The drawn token, then the top tokens; the declared law leaves the latter out."""
        names = keys.own(level.start, level.stop)
        placed = [max(fan - 1, 0) for fan in level.fan]
        tokens, there, law = ops.several(law, names, 1, placed)
        return Children(level.spread(tokens), level.spread_if(there), law)


def HubTree(
    model: LanguageModel,
    counts: tuple[int, ...] = (3, 2, 2, 1),
    parents: tuple[int, ...] | None = None,
) -> DraftModel:
    """A tree of hub nodes: `counts` children per level, or `parents` in BFS order."""
    return DraftModel(model, counts, parents=parents, name="hub_tree", policy=HubPolicy())


RECIPE = recipe(HubTree)
