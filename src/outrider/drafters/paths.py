"""Independent paths of one or several draft models, merged where they agree (SpecTr; SpecInfer).

`count` chains of `depth` tokens are drawn independently. Paths with the same prefix share a node,
and the node keeps one draw for each of them, in path order, repeats included: rules for i.i.d.
drafts need their number. Rows at temperature 0 place the top tokens below the root and follow each
with its argmax.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from outrider import arguments, ops
from outrider.drafters import recipes, tree_drafting
from outrider.drafters.memory import Several
from outrider.drafters.tree_drafting import Children, DrawKeys, OneModel, TreeLevel, shapes
from outrider.errors import ConfigurationError
from outrider.models.model_wrapper import capturable
from outrider.tree import numbers
from outrider.types import (
    Context,
    Draft,
    DraftShape,
    DrawKind,
    LanguageModel,
    Laws,
    Scores,
    Verdict,
)


@dataclass(frozen=True)
class Paths:
    """`count` independent chains; at most count * depth drafted tokens.

    With `more` draft models the paths are dealt out in equal blocks, the first block to `model`
    (SpecInfer's several small models). Every model runs the whole tree, so that each knows the
    prefix that is kept. Draws of one model at a node share a law row and stand together.
    """

    model: LanguageModel
    count: int = 3
    depth: int = 4
    more: tuple[LanguageModel, ...] = ()
    name: ClassVar[str] = "paths"
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED, DrawKind.WITH})

    def __post_init__(self) -> None:
        arguments.wholes(self, recipes.CHAIN, count=2)
        arguments.wholes(self, recipes.PLAIN, depth=1)
        if self.count < len(self.models):
            raise ConfigurationError(
                f"every draft model needs a path; got {self.count} paths for {len(self.models)} "
                "models; raise the number of paths"
            )

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        """All draft models."""
        return (self.model, *self.more)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's states that the draft models read, one model after another."""
        return tuple(layer for model in self.models for layer in model.aux_layers)

    @property
    def capturable(self) -> bool:
        return capturable(*self.models)

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        return shapes.of_levels(self.count, self.depth)

    def open(self, context: Context, capacity: int) -> Several:
        each = zip(self.models, self._own(context.hidden), strict=True)
        return Several(
            tuple(
                OneModel(model).open(context._replace(hidden=hidden), capacity)
                for model, hidden in each
            )
        )

    def propose(self, memory: Several, context: Context, shape: DraftShape) -> Draft:
        """Draw all paths level by level, one call of each draft model per level."""
        depth, device = shape.max_depth, context.length_B.device
        pairs = zip(self.models, memory.stores, strict=True)
        sources = [
            tree_drafting.TreeModel(model, cache, tree_drafting.unread_of(model, self.depth))
            for model, cache in pairs
        ]
        walk = _Walk(context, _blocks(self.count, len(sources), device))
        layout = shapes.ragged(self.count, depth, device)
        return tree_drafting.grow(sources, context, layout, walk).draft(walk.draw_kinds)

    def commit(
        self, memory: Several, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Keep the accepted path's entries in every cache."""
        stores = zip(self.models, memory.stores, self._own(scores.hidden), strict=True)
        for model, cache, hidden in stores:
            OneModel(model).commit(cache, context, draft, verdict, scores._replace(hidden=hidden))

    def _own(self, hidden: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Each model's part of the target's states."""
        ends = list(accumulate(len(model.aux_layers) for model in self.models))
        return [hidden[start:end] for start, end in pairwise([0, *ends])]


class _Walk:
    """Paths under way: which node of the deepest level each has come to."""

    draw_kinds = (DrawKind.WITH,)

    def __init__(self, context: Context, blocks: tuple[Tensor, Tensor, Tensor]) -> None:
        self.model_c, self.place_c, self.path_mp = blocks
        rows, count = context.length_B.shape[0], len(self.model_c)
        self.where_Bc = torch.zeros_like(context.length_B)[:, None].expand(rows, count)
        self.going_Bc = torch.ones_like(self.where_Bc, dtype=torch.bool)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """One more token of every path, from the law of its own model at its node."""
        row = self.where_Bc + self.model_c * (level.stop - level.start)
        token, there, law = ops.independent(law, row, keys.own(level.stop, level.end))
        if not level.depth:  # greedy paths part at the root: path i starts with the i-th best token
            best = ops.greedily(law, token[:, self.path_mp], there[:, self.path_mp])
            token, there = (table[:, self.model_c, self.place_c] for table in best)
        going = self.going_Bc & there  # a path ends where no token is possible
        same = (self.where_Bc[:, :, None] == self.where_Bc[:, None, :]) & going[:, None, :]
        same &= token[:, :, None] == token[:, None, :]
        # the first path of the same prefix; a path that has ended keeps a node of its own
        number = numbers(len(self.model_c), token.device)
        first = torch.where(going, same.to(torch.int8).argmax(-1), number)
        several = len(self.path_mp) > 1
        children = Children(token, going, law, self.where_Bc, first, row if several else None)
        self.where_Bc, self.going_Bc = first, going
        return children


@lru_cache(maxsize=64)
def _blocks(count: int, models: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Paths dealt out as evenly as can be: each one's model, its place there, and the reverse.

    In the table of the reverse, [models, most paths], a shorter block repeats its last path.

    >>> [table.tolist() for table in _blocks(5, 2, torch.device("cpu"))]
    [[0, 0, 0, 1, 1], [0, 1, 2, 0, 1], [[0, 1, 2], [3, 4, 4]]]
    """
    blocks = list(pairwise(-(-count * model // models) for model in range(models + 1)))
    most = max(stop - start for start, stop in blocks)
    tables = (
        [model for model, (start, stop) in enumerate(blocks) for _ in range(start, stop)],
        [path - start for start, stop in blocks for path in range(start, stop)],
        [[min(start + place, stop - 1) for place in range(most)] for start, stop in blocks],
    )
    model_c, place_c, path_mp = (torch.tensor(table, device=device) for table in tables)
    return model_c, place_c, path_mp


def _made(
    models: tuple[LanguageModel, ...],
    width: int = Paths.count,
    num_speculative_tokens: int = Paths.depth,
) -> Paths:
    if width < len(models):
        raise ConfigurationError(
            f"every draft model needs a path; got {len(models)} models for {width} paths; give "
            f"width={len(models)}"
        )
    return Paths(models[0], width, num_speculative_tokens, models[1:])


RECIPE = recipes.Recipe(_made, ("models",), ("num_speculative_tokens", "width"))
