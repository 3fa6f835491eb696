"""A draft model that fills a chain, a branching tree, or a tree of any fixed shape.

Because the shape is fixed before a token is drawn, no draw can influence which draws are verified.
If nothing else is asked for, the children of a node are drawn without replacement, the law of
Gumbel-top-k (Vieira 2014; Kool et al. 2019): a chain is branching (1, ..., 1), other branchings are
RSD-C (Jeon et al. 2024), uneven trees Sequoia's (Chen et al. 2024). In coupled mode the noise is
the target's own, keyed by absolute position, and the children are the top tokens under it.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from outrider import ops
from outrider.drafters import recipes, tree_drafting
from outrider.drafters.tree_drafting import Children, DrawKeys, OneModel, Policy, TreeLevel, shapes
from outrider.errors import ConfigurationError
from outrider.models.config import found
from outrider.types import Cache, Context, Draft, Drafter, DraftShape, DrawKind, LanguageModel, Laws

SMALL = 64  #: nodes of trees whose tables are made at load: a fifth of a millisecond each


@dataclass(frozen=True)
class SampledChildren:
    """Children drawn without replacement."""

    draw_kinds: ClassVar[tuple[DrawKind, ...]] = (DrawKind.WITHOUT,)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        names = keys.own(level.start, level.stop, law.greedy)
        tokens, there, law = ops.several(law, names, level.most)
        return Children(level.spread(tokens), None if there is None else level.spread(there), law)


@dataclass(frozen=True)
class CoupledChildren:
    """The best tokens under the target's noise."""

    draw_kinds: ClassVar[tuple[DrawKind, ...]] = (DrawKind.COUPLED,)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """The target's own token first, if the draft's law is the target's."""
        tokens, there = ops.largest(ops.merit(law, keys.shared(level.depth)), level.most)
        return Children(level.spread(tokens), level.spread(there), law)


@dataclass(frozen=True)
class DraftModel(OneModel):
    """`counts[l]` children below every node of level l, or the tree of `parents` in BFS order.

    `policy` chooses the children; None draws them without replacement, or with the target's noise
    if `shared_noise`.

    >>> DraftModel(model, (1,) * 5)      # a chain of five tokens           # doctest: +SKIP
    >>> DraftModel(model, (3, 2, 1))     # a tree of 15 drafted tokens      # doctest: +SKIP
    """

    model: LanguageModel
    counts: tuple[int, ...] = (1, 1, 1, 1, 1)
    shared_noise: bool = False
    parents: tuple[int, ...] | None = None
    name: str = "draft_model"
    policy: Policy | None = None
    chosen: Policy = field(init=False, repr=False, compare=False)  #: the policy in force
    #: the tree, and cut at each depth
    shapes: tuple[DraftShape, ...] = field(init=False, repr=False, compare=False)
    _unread: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.shared_noise and self.policy is not None:
            raise ConfigurationError(
                "a policy chooses the children, so shared_noise says nothing; got "
                f"shared_noise=True and {self.policy}; leave one of them out"
            )
        counts, parents = shapes.parents_for(self.name, self.counts, self.parents)
        if counts and self.policy is None and max(counts) > self.model.vocab_size:
            raise ConfigurationError(
                f"no node has more children than the draft has tokens; got branching {counts} "
                f"for a vocabulary of {self.model.vocab_size}; use smaller factors"
            )
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "parents", parents)
        chosen = self.policy or (CoupledChildren() if self.shared_noise else SampledChildren())
        object.__setattr__(self, "chosen", chosen)
        object.__setattr__(self, "shapes", shapes.of_tree(parents or (-1,)))
        depth = self.shapes[0].max_depth
        object.__setattr__(self, "_unread", tree_drafting.unread_of(self.model, depth))
        if parents and len(parents) <= SMALL:
            for shape in self.shapes:
                shapes.fixed(parents[: shape.max_nodes], torch.device(self.model.device))

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Greedy rows place their children."""
        return frozenset({DrawKind.FIXED, *self.chosen.draw_kinds})

    def propose(self, memory: Cache, context: Context, shape: DraftShape) -> Draft:
        """Fill the tree level by level, one draft-model call each."""
        parents = (self.parents or (-1,))[: shape.max_nodes]
        layout = shapes.fixed(parents, context.length_B.device)
        source = tree_drafting.TreeModel(self.model, memory, self._unread)
        trim = self.policy is None  # another policy may keep tokens
        tree = tree_drafting.grow([source], context, layout, self.chosen, trim=trim)
        return tree.draft(self.chosen.draw_kinds)


def _made(
    model: LanguageModel,
    num_speculative_tokens: int | None = None,
    branching: tuple[int, ...] | None = None,
    shared_noise: bool = False,
) -> DraftModel:
    recipes.one_depth(branching, num_speculative_tokens)
    counts = (1,) * (num_speculative_tokens or 4) if branching is None else branching
    return DraftModel(model, counts, shared_noise)


RECIPE = recipes.Recipe(
    _made, ("model",), ("num_speculative_tokens", "branching", "shared_noise"), deepest=24
)


def model_of(drafter: Drafter) -> LanguageModel | None:
    """The draft model of a drafter that has one: the protocol does not ask for it."""
    model: LanguageModel | None = found(drafter, "model")
    return model
