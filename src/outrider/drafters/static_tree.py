"""The draft's top tokens in a tree of fixed shape (Medusa's and EAGLE-1's layout).

Nothing is drawn, so no draft law is kept and `match` is the best rule: it accepts p of the placed
set. Strong at low temperature, weak at 1.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import ops
from outrider.drafters.shape_tables import Level
from outrider.drafters.shaped import Shaped
from outrider.types import Kind, Laws


@dataclass(frozen=True)
class StaticTree(Shaped):
    """Child j of a node is the draft's j-th best token there."""

    name: ClassVar[str] = "static_tree"
    drawn: ClassVar[frozenset[Kind]] = frozenset({Kind.FIXED})

    def fill(self, law: Laws, level: Level, keys_Bn: Tensor) -> tuple[Tensor, Tensor, Laws]:
        """The top tokens that the filters leave in."""
        top = ops.scaled(law).topk(min(level.most, law.logits_BRV.shape[-1]), -1)
        return top.indices, top.values > -torch.inf, law
