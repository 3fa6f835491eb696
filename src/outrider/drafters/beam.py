"""Stochastic beam search (Kool et al. 2019) as a draft: RSD-S of Jeon et al. 2024.

`width` paths of `depth` tokens, drawn without replacement from the draft's law of whole paths, so
that the budget goes where the draft is sure. State per path: phi = log q, and psi = its perturbed
score, which may not exceed its parent's. Per level, with phi' = phi + log q(.|path), phi~ = phi' +
Gumbel and Z the largest phi~ of a row, the truncated score is

    psi' = -log( exp(-psi) - exp(-Z) + exp(-phi~) )

The `width` largest psi' over all (path, token) go on (`ops.survivors`); siblings stand in
descending order, which is their draw order. Rows at temperature 0 keep the paths of an ordinary
beam search and declare them placed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import arguments, ops
from outrider.drafters import recipes, tree_drafting
from outrider.drafters.tree_drafting import Children, DrawKeys, OneModel, TreeLevel, shapes
from outrider.types import Cache, Context, Draft, DraftShape, DrawKind, LanguageModel, Laws


@dataclass(frozen=True)
class Beam(OneModel):
    """`width` paths of `depth` tokens; width * depth drafted tokens in all."""

    model: LanguageModel
    width: int = 3
    depth: int = 4
    name: ClassVar[str] = "beam"
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED, DrawKind.WITHOUT})

    def __post_init__(self) -> None:
        arguments.wholes(self, recipes.CHAIN, width=2)
        arguments.wholes(self, recipes.PLAIN, depth=1)

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        return shapes.of_levels(self.width, self.depth)

    def propose(self, memory: Cache, context: Context, shape: DraftShape) -> Draft:
        """Grow the beam, one draft-model call per level; every row gets its own topology."""
        depth = shape.max_depth
        layout = shapes.ragged(self.width, depth, context.length_B.device)
        paths = _Paths(self.width, torch.zeros_like(context.length_B, dtype=torch.float32)[:, None])
        source = tree_drafting.TreeModel(
            self.model, memory, tree_drafting.unread_of(self.model, self.depth)
        )
        return tree_drafting.grow([source], context, layout, paths).draft(paths.draw_kinds)


class _Paths:
    """The paths of a beam under way."""

    draw_kinds = (DrawKind.WITHOUT,)

    def __init__(self, width: int, root_B1: Tensor) -> None:
        self.width, self.phi_Bw, self.psi_Bw = width, root_B1, root_B1

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """The `width` paths that stay."""
        names = keys.own(level.start, level.stop)
        parent, token, self.phi_Bw, self.psi_Bw = ops.survivors(
            law, names, self.phi_Bw, self.psi_Bw, self.width
        )
        return Children(token, self.psi_Bw > -torch.inf, law, parent)


def _made(
    model: LanguageModel, width: int = Beam.width, num_speculative_tokens: int = Beam.depth
) -> Beam:
    return Beam(model, width, num_speculative_tokens)


RECIPE = recipes.Recipe(_made, ("model",), ("num_speculative_tokens", "width"))
