"""Hub nodes (SpecHub, Sun, Zhou et al. 2024; Hu et al. 2025): one child is drawn, the rest placed.

Of c children the draft's top c - 1 tokens are placed and one is drawn from the draft's law without
them; the drawn one stands first. Judged by `hub` or `traversal` a node accepts the most any rule
can for such a draft.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.drafters.shape_tables import Level, Tables
from outrider.drafters.shaped import Shaped
from outrider.types import Kind, Laws


@dataclass(frozen=True)
class HubTree(Shaped):
    """A node with one child draws it from the whole law."""

    name: ClassVar[str] = "hub_tree"
    drawn: ClassVar[frozenset[Kind]] = frozenset({Kind.FIXED, Kind.WITHOUT})

    def kind_of(self, table: Tables) -> Tensor:
        """The first child of every node is drawn."""
        kind = torch.full_like(table.draws_BNK, int(Kind.FIXED))
        kind[..., 0] = int(Kind.WITHOUT)
        return kind

    def fill(self, law: Laws, level: Level, keys_Bn: Tensor) -> tuple[Tensor, Tensor, Laws]:
        """The drawn token, then the top tokens; the declared law leaves the latter out."""
        few = law.logits_BRV.shape[-1]
        drawn = ops.several(law, keys_Bn, 1, [min(max(fan - 1, 0), few) for fan in level.fan])
        if drawn is not None:
            chosen, there = drawn
            if level.most > 1:  # no drawn child: the law is nobody's, and stays whole
                out = there[..., 1:] & there[..., :1]
                logits = law.logits_BRV
                kept = logits.gather(-1, chosen[..., 1:]).masked_fill(out, -torch.inf)
                law = law._replace(logits_BRV=logits.scatter(-1, chosen[..., 1:], kept))
            return chosen, there, law
        scaled = ops.scaled(law)
        vocab = scaled.shape[-1]
        rest, top = scaled, None
        if level.most > 1:
            top = scaled.topk(min(level.most - 1, vocab), -1)
            placed = torch.arange(top.indices.shape[-1], device=scaled.device) < (
                level.fan_n[:, None] - 1
            )
            logits = law.logits_BRV
            rest = scaled.scatter(-1, top.indices, top.values.masked_fill(placed, -torch.inf))
            some = (rest > -torch.inf).any(-1, keepdim=True)
            kept = logits.gather(-1, top.indices).masked_fill(placed, -torch.inf)
            without = torch.where(some, logits.scatter(-1, top.indices, kept), logits)
            law = law._replace(logits_BRV=without)
        best = (rest - noise.exponentials(keys_Bn, vocab).log_()).max(-1, keepdim=True)
        if top is None:
            return best.indices, best.values > -torch.inf, law
        tokens = torch.cat([best.indices, top.indices], -1)
        return tokens, torch.cat([best.values, top.values], -1) > -torch.inf, law
