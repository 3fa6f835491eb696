"""Hub nodes (SpecHub, Sun, Zhou et al. 2024; Hu et al. 2025): one child is drawn, the rest placed.

Of c children the draft's top c - 1 tokens are placed and one is drawn from the draft's law without
them; the drawn one stands first. Judged by `hub` or `traversal` a node accepts the most any rule
can for such a draft.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import ops
from outrider.drafters.shape_tables import Level, Shape
from outrider.drafters.shaped import Shaped
from outrider.types import Kind, Laws


@dataclass(frozen=True)
class HubTree(Shaped):
    """A node with one child draws it from the whole law."""

    name: ClassVar[str] = "hub_tree"
    drawn: ClassVar[frozenset[Kind]] = frozenset({Kind.FIXED, Kind.WITHOUT})

    def kind_of(self, table: Shape) -> Tensor:
        """The first child of every node is drawn."""
        kind = torch.full_like(table.draws_BNK, int(Kind.FIXED))
        kind[..., 0] = int(Kind.WITHOUT)
        return kind

    def fill(self, law: Laws, level: Level, keys_Bn: Tensor) -> tuple[Tensor, Tensor, Laws]:
        """The drawn token, then the top tokens; the declared law leaves the latter out."""
        return ops.several(law, keys_Bn, 1, [max(fan - 1, 0) for fan in level.fan])
