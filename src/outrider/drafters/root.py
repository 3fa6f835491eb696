"""The root-only drafter: a tree with nothing below the pending token. Plain decoding."""

from dataclasses import dataclass
from typing import ClassVar

from outrider.drafters.memory import Forgetful, NoMemory
from outrider.drafters.recipes import Recipe
from outrider.drafters.tree_drafting import bare
from outrider.types import PLAIN, Context, Draft, DraftShape, DrawKind


@dataclass(frozen=True)
class Root(Forgetful):
    """Proposes nothing: every step emits one token of the target. Every benchmark's baseline."""

    name: ClassVar[str] = "none"
    kinds: ClassVar[frozenset[DrawKind]] = frozenset()
    shapes: ClassVar[tuple[DraftShape, ...]] = (PLAIN,)

    def propose(self, memory: NoMemory, context: Context, shape: DraftShape) -> Draft:
        """Node 0 alone."""
        return bare(context)


RECIPE = Recipe(Root)
