"""An n-gram table as a tree of placed tokens: the best nodes by the table's cumulative probability.

A table is seldom right, but the right token is often among its best few. So a tree of these gains
more than the chain that `ngram_table` draws; it costs nodes to score, and no model. The tree is
that of `dynamic_tree` (EAGLE-2's selection) with the table's law (Kneser-Ney) in place of a
model's. Children are point masses: what is kept is a function of the text alone.
"""

from dataclasses import dataclass
from typing import ClassVar

from outrider import arguments
from outrider.drafters import dynamic_tree, recipes
from outrider.drafters.memory import Forgetful, NoMemory
from outrider.drafters.ngram_table import Table, followers
from outrider.types import Context, Draft, DraftShape, DrawKind


@dataclass(frozen=True)
class NgramTree(Forgetful):
    """The `total_tokens` most probable nodes of a beam of `top_k` nodes and `depth` levels.

    `vocab_size` is the target's number of outputs if it has more than the table knows tokens
    (padding): those are never drafted.

    >>> from outrider.drafters.ngram_table import count
    >>> NgramTree(count([1, 2, 1, 3] * 4, 8), total_tokens=4, depth=2, top_k=2).shapes[0].max_nodes
    5
    """

    table: Table
    total_tokens: int = 8
    depth: int = 3
    top_k: int = 4
    vocab_size: int | None = None
    name: ClassVar[str] = "ngram_tree"
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED})

    def __post_init__(self) -> None:
        for name in ("total_tokens", "depth", "top_k"):
            object.__setattr__(self, name, arguments.plain(vars(self)[name]))
        dynamic_tree.fits(self.total_tokens, self.depth, self.top_k, self.table.vocab_size)
        followers(self.table, self.vocab_size)

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """A tree of each depth, with as many nodes as it can have."""
        return dynamic_tree.of_candidates(self.total_tokens, self.depth, self.top_k)

    def propose(self, memory: NoMemory, context: Context, shape: DraftShape) -> Draft:
        """Look up level by level, and keep the best nodes."""
        source = followers(self.table, self.vocab_size)
        return dynamic_tree.grow(source, context, shape, self.top_k)


def _made(
    table: Table,
    vocab_size: int,
    num_speculative_tokens: int = NgramTree.depth,
    width: int = NgramTree.top_k,
    total_tokens: int | None = None,
) -> NgramTree:
    total = dynamic_tree.sized(
        total_tokens, num_speculative_tokens, width, table.vocab_size, NgramTree.total_tokens
    )
    return NgramTree(table, total, num_speculative_tokens, width, vocab_size)


RECIPE = recipes.Recipe(
    _made, ("table", "vocab_size"), ("num_speculative_tokens", "width", "total_tokens"), depth=3
)
