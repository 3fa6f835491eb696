"""Heads driven as draft models: each token's entry is made with the state of the token before it.

Below committed tokens that state is the target's, which it has been told (`learn`); below drafted
ones it is the head's own. So every drafter that grows chains and trees from a draft model grows
them from a head: the state flows along the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.models.heads.eagle3 import HeadStates
from outrider.models.heads.model import open_states, read_states, write_states
from outrider.row_params import RowTable
from outrider.tree import numbers
from outrider.types import Nodes, TargetStates


class StateHead(Protocol):
    """A module that makes a token's entry from the token and the state before it."""

    aux_layers: tuple[int, ...]  #: the target's states that it reads
    depth: int  #: how many layers write cache entries
    width: int  #: of its states
    window: int | None  #: how many positions back its attention reaches; None: all

    @property
    def ids_K(self) -> Tensor | None:
        """The tokens that it can propose; None: all."""

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights."""

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """One state [B, Q, E] of the target's states [B, Q, E'] at the aux layers."""

    def entries(self, nodes: Nodes, states_BQE: Tensor, cache: SlotCache) -> HeadStates:
        """Write entries of nodes, each with the state of the token before it.

        Where the cache's layers write is set already (`SlotCache.begin`).
        """

    def logits(self, states: HeadStates) -> Tensor:
        """[B, Q, K]: over the tokens that it can propose."""


@dataclass(frozen=True)
class HeadCache(RowTable):
    """What a head keeps of its rows."""

    entries: SlotCache
    told: SlotCache  #: the target's states of the tokens below `known_B`, fused
    own: SlotCache  #: the head's states of all tokens it has read, of one kind or of several
    known_B: Tensor

    @classmethod
    def of(
        cls, layers: int, rows: int, capacity: int, device: torch.device, kinds: int = 1
    ) -> "HeadCache":
        """An empty one for a head of so many layers, with states of so many kinds of its own."""
        return cls(
            SlotCache(layers, rows, capacity),
            open_states(rows, capacity),
            open_states(rows, capacity, kinds),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )

    @property
    def capacity(self) -> int:
        return self.entries.capacity

    def states(self, slots_BQ: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The states [B, Q, width] in these slots: the target's, or the head's own; none in -1."""
        at_BQ = slots_BQ.clamp(min=0)
        told = read_states(self.told, at_BQ, width, dtype)
        own = read_states(self.own, at_BQ, width, dtype)
        known = (slots_BQ < self.known_B[:, None])[..., None]
        return torch.where(known, told, own).masked_fill(slots_BQ[..., None] < 0, 0.0)


class AutoregressiveHead:
    """A `HeadRunner` over a head whose state flows along the tree."""

    follows = True

    def __init__(self, head: StateHead) -> None:
        self.head, self.aux_layers, self.ids_K = head, head.aux_layers, head.ids_K
        self.device, self.dtype = head.device, head.dtype

    def open(self, rows: int, capacity: int) -> HeadCache:
        return HeadCache.of(self.head.depth, rows, capacity, self.device)

    def learn(self, cache: HeadCache, target: TargetStates) -> None:
        if target.hidden:
            fused = self.head.fuse([state.to(self.dtype) for state in target.hidden])
            write_states(cache.told, target.slots_BQ, target.wide, fused)
        cache.known_B.copy_(target.known_B)

    def keep(self, cache: HeadCache, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the states that it was told of accepted paths next to their roots.

        Its own entries stay: they are made anew, with the target's states.
        """
        cache.told.keep(first_B, path_BD)

    def logits(self, cache: HeadCache, nodes: Nodes, last: int | None) -> Tensor:
        """Write the nodes' entries; [B, Q or last, K]."""
        slots_BQ, wide = nodes.slots_BQ, nodes.visible_BQW.shape[-1]
        state = cache.states(parents(nodes), self.head.width, self.head.dtype)
        # no state stands before the first token: its entry has no meaning to others
        seen = within(nodes, 1, self.head.window)
        cache.entries.begin(slots_BQ, wide, 0)
        made = self.head.entries(nodes._replace(visible_BQW=seen), state, cache.entries)
        write_states(cache.own, slots_BQ, wide, made.next_BQE)
        if last is not None:
            made = HeadStates(*(state[:, -last:] for state in made))
        return self.head.logits(made)


def parents(nodes: Nodes) -> Tensor:
    """The slots [B, Q] of the tokens before the nodes: the last ones that they see before their
    own; -1: there is none."""
    slots_BQ, visible_BQW = nodes.slots_BQ, nodes.visible_BQW
    slot_W = numbers(visible_BQW.shape[-1], slots_BQ.device)
    before = visible_BQW & (slot_W < slots_BQ[..., None])
    return torch.where(before, slot_W, -1).amax(-1)


def within(nodes: Nodes, first: int, window: int | None) -> Tensor:
    """What nodes see [B, Q, W] of slots from `first` on, and not beyond a window.

    Nodes ahead of it see what they see: nobody reads what is made of them.
    """
    _, positions_BQ, slots_BQ, visible_BQW, _ = nodes
    slot_W = numbers(visible_BQW.shape[-1], slots_BQ.device)
    seen = visible_BQW & ((slot_W >= first) | (slots_BQ[..., None] < first))
    if window is not None:  # nodes of a tree stand at slots of their own: near enough
        seen = seen & (positions_BQ[..., None] - slot_W < window)
    return seen
