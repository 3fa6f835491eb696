"""Layers of multi-token prediction in a chain: the k-th drafts the k-th token behind the text.

A layer makes a token's entry from the token and a state of the token before it: the first layer
from the target's, each other one from the output of the layer before it (DeepSeek-V3, section
2.2). So a layer's entry knows the target's states up to as many tokens back as its number, and the
pending token's law is the first layer's, that of the first drafted token the second's, and so on:

    layer 0   t1(h0) t2(h1) ... tn(hn-1)                      says what is behind tn
    layer 1          t2(o0) ... tn(o0)   d1(o0)               says what is behind the first draft d1
    layer 2                              d1(o1)  d2(o1)       and behind the second one

Below as many drafted tokens as there are layers the last one goes on below its own output.
"""

from typing import Protocol

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.models.heads.autoregressive_head import (
    AutoregressiveHead,
    HeadCache,
    StateHead,
    parents,
    within,
)
from outrider.models.heads.eagle3 import HeadStates
from outrider.models.heads.model import read_states, write_states
from outrider.types import Nodes


class ChainedLayers(StateHead, Protocol):
    """Several layers, each of which makes entries of its own."""

    windows: tuple[int | None, ...]  #: of each layer, how many positions back it reaches

    def entries(
        self, nodes: Nodes, states_BQE: Tensor, cache: SlotCache, layer: int = 0
    ) -> HeadStates:
        """Write a layer's entries of nodes, each with a state of the token before it."""


class ChainedHead(AutoregressiveHead):
    """A `HeadRunner` over layers of which each one drafts at a depth of its own.

    >>> HeadModel(ChainedHead(Mtp(layers)), vocab_size=129280).aux_layers     # doctest: +SKIP
    (-1,)
    """

    head: ChainedLayers

    def __init__(self, head: ChainedLayers) -> None:
        super().__init__(head)

    def open(self, rows: int, capacity: int) -> HeadCache:
        """An empty cache: every layer keeps entries and outputs."""
        return HeadCache.of(self.head.depth, rows, capacity, self.device, self.head.depth)

    def logits(self, cache: HeadCache, nodes: Nodes, last: int | None) -> Tensor:
        """Write the nodes' entries of the layers that go on from them; [B, Q or last, K]."""
        head, slots_BQ, wide = self.head, nodes.slots_BQ, nodes.visible_BQW.shape[-1]
        # how many tokens were drafted behind the pending one, up to the node
        drafted_BQ = (nodes.positions_BQ - cache.known_B[:, None]).clamp(min=0)
        parent_BQ, read = parents(nodes), None
        for layer in range(self._first(drafted_BQ, last), head.depth):
            state = self._before(cache, parent_BQ, layer, drafted_BQ)
            seen = within(nodes, 1 + layer, head.windows[layer])
            cache.entries.begin(slots_BQ, wide, 0)
            made = head.entries(nodes._replace(visible_BQW=seen), state, cache.entries, layer)
            write_states(cache.own, slots_BQ, wide, made.next_BQE, layer)
            own = (drafted_BQ.clamp(max=head.depth - 1) == layer)[..., None]
            read = made.read_BQE if read is None else torch.where(own, made.read_BQE, read)
        assert read is not None
        if last is not None:
            read = read[:, -last:]
        return head.logits(HeadStates(read, read))

    def _first(self, drafted_BQ: Tensor, last: int | None) -> int:
        """The first layer that any of the nodes, or what is drafted below them, needs."""
        if last is not None or drafted_BQ.device.type != "cpu":
            return 0  # a device's values are not waited for: all layers run there
        return min(int(drafted_BQ.min()), self.head.depth - 1)

    def _before(
        self, cache: HeadCache, parent_BQ: Tensor, layer: int, drafted_BQ: Tensor
    ) -> Tensor:
        """What a layer reads of the tokens before the nodes, [B, Q, E]."""
        if layer == 0:
            return self._states(cache, parent_BQ)
        head, at_BQ = self.head, parent_BQ.clamp(min=0)
        state = read_states(cache.own, at_BQ, head.width, head.dtype, layer - 1)
        if layer == head.depth - 1:  # below all layers it goes on by itself
            own = read_states(cache.own, at_BQ, head.width, head.dtype, layer)
            state = torch.where((drafted_BQ > layer)[..., None], own, state)
        return state.masked_fill(parent_BQ[..., None] < 0, 0.0)
