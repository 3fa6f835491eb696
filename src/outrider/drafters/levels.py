"""What drafters that grow a tree with a model share: its cache, and one call per level."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider.nodes import causal
from outrider.prefill import ingest, width
from outrider.tree import numbers, visible
from outrider.types import Context, Draft, LanguageModel, Laws, Nodes, Scores, Verdict


class Grown:
    """Cache keeping for a drafter with a `model`; the tree is the subclass's matter.

    The last two committed tokens are fed again in every step: after a full acceptance the accepted
    leaf was never run, and feeding it needs neither a branch nor a host read.
    """

    model: LanguageModel
    hidden: ClassVar[bool] = False

    def open(self, context: Context, capacity: int) -> Any:
        """The draft model's cache, with all but the last two committed tokens ingested."""
        cache = self.model.open(context.tokens_BL.shape[0], capacity)
        ingest(self.model, cache, context.tokens_BL, context.bound - 1)
        return cache

    def commit(
        self, memory: Any, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Keep the accepted path's entries; a chain's lie where they belong."""
        if not draft.tree.is_chain:
            self.model.keep(memory, context.length_B - 1, verdict.path_BD)


class Growth(NamedTuple):
    """One proposal under way."""

    model: LanguageModel
    memory: Any
    first_B: Tensor  #: slot and position of the pending token
    wide: int
    pending_B1: Tensor

    def sees(self, start: int, stop: int, ancestors: Tensor | None) -> Tensor:
        """Which cache slots nodes start..stop may see, [B, n, W].

        `ancestors` [B or 1, N, N] covers at least these nodes; None: every node sees all before it.
        """
        if ancestors is None:
            device = self.first_B.device
            slot = self.first_B[:, None] + numbers(stop, device)[start:]
            return numbers(self.wide, device) <= slot[..., None]
        return visible(ancestors, self.first_B, start, stop, self.wide)

    def feed(self, tokens_Bn: Tensor, depth: int, start: int, seen_BnW: Tensor) -> Tensor:
        """Logits [B, n, V] after nodes start, start + 1, ... of one level."""
        stop = start + tokens_Bn.shape[1]
        slot = self.first_B[:, None] + numbers(stop, tokens_Bn.device)[start:]
        at = (self.first_B[:, None] + depth).expand_as(slot)
        return self.model.forward(self.memory, Nodes(tokens_Bn, at, slot, seen_BnW)).logits_BQV


def begin(model: LanguageModel, memory: Any, context: Context, nodes: int) -> tuple[Growth, Tensor]:
    """Feed the committed tail. The growth, and the logits [B, 1, V] after the pending token."""
    device = context.length_B.device
    first = context.length_B - 1
    wide = width(context.bound, nodes, memory.capacity)
    tail = (first[:, None] + (numbers(2, device) - 1)).clamp(min=0)
    ends = causal(context.tokens_BL.gather(1, tail), tail, wide)
    logits = model.forward(memory, ends, last=1).logits_BQV[:, -1:]
    pending = context.tokens_BL.gather(1, first[:, None])
    return Growth(model, memory, first, wide, pending), logits


def stack(laws: list[Laws]) -> Laws:
    """The laws of all inner nodes, level after level, as one table."""
    floors = [law.floor_BR for law in laws if law.floor_BR is not None]
    return laws[0]._replace(
        logits_BRV=torch.cat([law.logits_BRV for law in laws], 1),
        floor_BR=torch.cat(floors, 1) if floors else None,
        lse_BR=None,
    )
