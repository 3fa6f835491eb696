"""Random tokens: the baseline of Leviathan et al. 2023.

Every token is drawn from the uniform law over the vocabulary, and that law is declared. So each is
accepted with probability sum min(p, 1 / V), which is 1 / V for a greedy row: a drafter that is
worth nothing and costs nothing, and shows what the others add.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from outrider import arguments, ops
from outrider.drafters import recipes, tree_drafting
from outrider.drafters.memory import Forgetful, NoMemory
from outrider.drafters.tree_drafting import (
    Children,
    DrawKeys,
    TreeBuilder,
    TreeLevel,
    shapes,
)
from outrider.tree import parents_of
from outrider.types import Context, Draft, DraftShape, DrawKind, Laws, Output


@dataclass(frozen=True)
class Random(shapes.Chains, Forgetful):
    """A chain of tokens drawn uniformly out of `vocab_size`.

    >>> Random(100, 3).shapes[0].max_nodes
    4
    """

    vocab_size: int
    num_speculative_tokens: int = 4
    name: ClassVar[str] = "random"
    draw_kinds: ClassVar[tuple[DrawKind, ...]] = (DrawKind.WITHOUT,)
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED, DrawKind.WITHOUT})

    def __post_init__(self) -> None:
        arguments.wholes(self, "give the target's", vocab_size=1)
        arguments.wholes(self, recipes.PLAIN, num_speculative_tokens=1)

    def propose(self, memory: NoMemory, context: Context, shape: DraftShape) -> Draft:
        """Draw each token from the uniform law; what a request bans is not drawn."""
        depth = shape.max_depth
        layout = shapes.fixed(parents_of((1,) * depth), context.length_B.device)
        sampling = context.sampling
        hot_B = torch.isinf(sampling.inverse_temperature_B)  # their text depends on no seed
        seed_B = torch.where(hot_B, 0, sampling.seed_B)
        context = context._replace(sampling=sampling._replace(seed_B=seed_B))
        source = _Uniform(self.vocab_size)
        return tree_drafting.grow([source], context, layout, self).draft(self.draw_kinds)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """One draw. Rows at temperature 0 place what they draw at temperature 1."""
        inverse = law.inverse_temperature_B
        even = law._replace(
            inverse_temperature_B=torch.where(torch.isinf(inverse), 1.0, inverse), greedy="none"
        )
        tokens, there, even = ops.several(even, keys.own(level.start, level.stop), 1)
        return Children(tokens[..., 0], None if there is None else there[..., 0], even)


class _Uniform(NamedTuple):
    """The uniform law as a source."""

    vocab_size: int

    def output(self, tree: TreeBuilder, level: TreeLevel) -> Output:
        """[B, n, V] zeros."""
        length_B = tree.first_B
        shape = (length_B.shape[0], level.stop - level.start, self.vocab_size)
        return Output(torch.zeros(shape, device=length_B.device))


RECIPE = recipes.Recipe(Random, ("vocab_size",), ("num_speculative_tokens",))
