"""Dynamic trees (EAGLE-2, Li et al. 2024): the draft's confidence decides which nodes there are.

Every row gets its own topology. On each of `depth` levels the `top_k` nodes with the largest
cumulative probability are expanded, `top_k` children each. Of all these candidates the
`total_tokens` best by cumulative probability become the draft. A child is never more probable than
its parent and stands behind it where they are equal, so the best nodes are a connected subtree.

Which nodes are kept depends on their tokens. No rule for *drawn* children allows that
(docs/rules.md, "What a draft must say about itself", 3); here it is exact, for one reason per kind:

* Placed (the default): the tokens are a function of the prefix and the draft's weights. Nothing is
  drawn, so nothing about a draw is told by what is kept. Children are declared as point masses.
* Coupled: the tokens and the selection are functions of the prefix and the shared noise. The
  emitted token is the target's own, argmax(z / T + noise), whatever was drafted (`match`): a draft
  decides how many tokens a step emits and never which.

Cumulative probabilities are the draft's under the row's temperature and filters (at temperature 0:
those of temperature 1). A coupled draft has seen the noise and knows more than that law: its
children are the best tokens under the noise, and softmax(1.5 (z / T + noise)) says how sure they
are. The factor is measured (docs/results/2026-11-21.md) and matters for speed alone.
"""

from dataclasses import dataclass
from typing import ClassVar

from outrider import arguments
from outrider.drafters import recipes, tree_drafting
from outrider.drafters.tree_drafting import OneModel, dynamic_tree_builder, shapes
from outrider.types import Cache, Context, Draft, DraftShape, DrawKind, LanguageModel


@dataclass(frozen=True)
class DynamicTree(OneModel):
    """The `total_tokens` most probable nodes of a beam of `top_k` nodes and `depth` levels.

    The names are EAGLE-2's; `total_tokens` leaves the pending token out. `shared_noise` draws with
    the target's noise.

    >>> DynamicTree(model, total_tokens=24, depth=6, top_k=6)                # doctest: +SKIP
    """

    model: LanguageModel
    total_tokens: int = 16
    depth: int = 5
    top_k: int = 4
    shared_noise: bool = False
    name: ClassVar[str] = "dynamic_tree"

    def __post_init__(self) -> None:
        for name in ("total_tokens", "depth", "top_k"):
            object.__setattr__(self, name, arguments.plain(vars(self)[name]))
        dynamic_tree_builder.fits(self.total_tokens, self.depth, self.top_k, self.model.vocab_size)

    @property
    def drawn(self) -> tuple[DrawKind, ...]:
        """Every child is placed, or every child is coupled."""
        return dynamic_tree_builder.drawn(self.shared_noise)

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Greedy rows place their children."""
        return frozenset({DrawKind.FIXED, *self.drawn})

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """A tree of each depth, with as many nodes as it can have."""
        return dynamic_tree_builder.of_candidates(self.total_tokens, self.depth, self.top_k)

    def open(self, context: Context, capacity: int) -> Cache:
        """The draft model's cache: it may run more nodes than it proposes."""
        run = 1 + (self.depth - 1) * self.top_k
        more = max(run - 1 - self.total_tokens, 0)
        room = self.model.width(capacity + more) if more else capacity
        return tree_drafting.open_cache(self.model, context, room)

    def propose(self, memory: Cache, context: Context, shape: DraftShape) -> Draft:
        """Expand level by level, one draft-model call each, and keep the best nodes."""
        own = shapes.declared(self, shape)
        source = tree_drafting.TreeModel(
            self.model, memory, tree_drafting.unread_of(self.model, self.depth)
        )
        return dynamic_tree_builder.grow(source, context, own, self.top_k, self.shared_noise)


def _made(
    model: LanguageModel,
    num_speculative_tokens: int = DynamicTree.depth,
    width: int = DynamicTree.top_k,
    total_tokens: int | None = None,
    shared_noise: bool = False,
) -> DynamicTree:
    total = dynamic_tree_builder.sized(
        total_tokens, num_speculative_tokens, width, model.vocab_size, DynamicTree.total_tokens
    )
    return DynamicTree(model, total, num_speculative_tokens, width, shared_noise)


RECIPE = recipes.Recipe(
    _made, ("model",), ("num_speculative_tokens", "width", "total_tokens", "shared_noise")
)
