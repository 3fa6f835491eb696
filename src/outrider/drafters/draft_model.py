"""A draft model that draws a chain, a branching tree, or a tree of any fixed shape.

Children of a node are drawn without replacement, the law of Gumbel-top-k (Vieira 2014; Kool et al.
2019): a chain is branching (1, ..., 1), other branchings are RSD-C (Jeon et al. 2024), uneven trees
Sequoia's (Chen et al. 2024). In coupled mode the noise is the target's own, keyed by absolute
position, and the children are the top tokens under it.
"""

from dataclasses import dataclass
from typing import ClassVar

from outrider import ops
from outrider.drafters import growing, recipes
from outrider.drafters.growing import Children, Keys, Level, shapes
from outrider.errors import ConfigurationError
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
class DraftModel:
    """`counts[l]` children below every node of level l, or the tree of `parents` in BFS order.

    >>> DraftModel(model, (1,) * 5)      # a chain of five tokens           # doctest: +SKIP
    >>> DraftModel(model, (3, 2, 1))     # a tree of 15 drafted tokens      # doctest: +SKIP
    """

    model: LanguageModel
    counts: tuple[int, ...] = (1, 1, 1, 1, 1)
    coupled: bool = False
    parents: tuple[int, ...] | None = None
    name: str = "draft_model"
    hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        counts, parents = shapes.parents_for(self.name, self.counts, self.parents)
        if counts and max(counts) > self.model.vocab_size:
            raise ConfigurationError(
                f"no node has more children than the draft has tokens; got branching {counts} "
                f"for a vocabulary of {self.model.vocab_size}; use smaller factors"
            )
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "parents", parents)

    @property
    def drawn(self) -> tuple[Kind, ...]:
        """Every child is drawn."""
        return (Kind.COUPLED if self.coupled else Kind.WITHOUT,)

    @property
    def kinds(self) -> frozenset[Kind]:
        """Greedy rows place their children."""
        return frozenset({Kind.FIXED, *self.drawn})

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The tree, and cut at each depth."""
        return shapes.of_tree(self.parents or (-1,))

    def open(self, context: Context, capacity: int) -> Cache:
        """The draft model's cache."""
        return growing.open_cache(self.model, context, capacity)

    def propose(self, memory: Cache, context: Context, shape: Shape) -> Draft:
        """Draw the tree, one draft-model call per level."""
        layout = shapes.cut(self, self.parents, shape, context)
        return growing.grow([growing.Model(self.model, memory)], context, layout, self)

    def children(self, law: Laws, level: Level, keys: Keys) -> Children:
        """Draws in order, or the best tokens under the target's noise."""
        if self.coupled:
            scores = ops.merit(law, keys.shared(level.depth))
            tokens, there = ops.largest(scores, level.most)
        else:
            tokens, there, law = ops.several(law, keys.own(level.start, level.stop), level.most)
        return Children(level.spread(tokens), level.spread(there), law)

    def commit(
        self, memory: Cache, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Keep the accepted path's entries."""
        growing.keep_path(self.model, memory, context, draft, verdict)


def _made(
    model: LanguageModel,
    num_speculative_tokens: int | None = None,
    branching: tuple[int, ...] | None = None,
    coupled: bool = False,
) -> DraftModel:
    recipes.one_depth(branching, num_speculative_tokens)
    counts = (1,) * (num_speculative_tokens or 4) if branching is None else branching
    return DraftModel(model, counts, coupled)


RECIPE = recipes.Recipe(_made, ("model",), ("num_speculative_tokens", "branching", "coupled"))
