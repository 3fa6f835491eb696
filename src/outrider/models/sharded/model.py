"""The sharded target as the engine sees it, on rank 0: a `LanguageModel` like any other."""

import atexit
import itertools
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import torch
from torch import Tensor, distributed

from outrider.errors import ShardLost
from outrider.models.cache import SlotCache
from outrider.models.causal import CausalModel
from outrider.models.sharded.group import Group
from outrider.models.sharded.orders import Call, Drop, End, Keep, Narrow, Open, Put, Take, Wire
from outrider.types import Inputs, Nodes, Output, Reads


class ShardedCache:
    """Rank 0's part of a cache, whose every change the other ranks repeat on theirs."""

    def __init__(self, own: SlotCache, wire: Wire, numbers: "itertools.count[int]") -> None:
        self.own, self._wire, self._numbers = own, wire, numbers
        self.number = next(numbers)
        weakref.finalize(self, wire.later, Drop(self.number)).atexit = False

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.own.capacity

    def take(self, rows: Sequence[int]) -> "ShardedCache":
        """A copy of these rows, in this order."""
        some = ShardedCache(self.own.take(rows), self._wire, self._numbers)
        self._wire.later(Take(self.number, some.number, tuple(rows)))
        return some

    def put(self, seats: Sequence[int], other: "ShardedCache") -> Self:
        """Write the rows of `other` into these seats; returns this cache."""
        self.own = self.own.put(seats, other.own)
        self._wire.later(Put(self.number, tuple(seats), other.number))
        return self

    def narrow(self, rows: int) -> Self:
        """This cache with its first rows alone."""
        self.own = self.own.narrow(rows)
        self._wire.later(Narrow(self.number, rows))
        return self


class ShardedModel:
    """Rank 0's part of a decoder, which calls the others' along: a `LanguageModel`."""

    taps: tuple[int, ...] = ()
    reads: Reads = "text"
    follows = True

    def __init__(self, own: CausalModel, group: Group) -> None:
        self.own, self.group = own, group
        self._wire, self._numbers = Wire(group), itertools.count()
        self.vocab_size, self.context, self.trees = own.vocab_size, own.context, own.trees
        self.trees_alike = own.trees_alike
        atexit.register(self.close)

    @property
    def device(self) -> torch.device:
        """Where its inputs must lie."""
        return self.own.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.own.dtype

    def width(self, slots: int) -> int:
        """The least visible width of so many slots: calls of these widths round alike."""
        return self.own.width(slots)

    def examine(self, inputs: Inputs) -> None:
        """It reads text alone: ConfigurationError."""
        self.own.examine(inputs)

    def encode(self, inputs: Inputs) -> Inputs:
        """It reads text alone: ConfigurationError."""
        return self.own.encode(inputs)

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> ShardedCache:
        """An empty cache for `rows` rows."""
        if inputs is not None:
            self.own.examine(inputs)
        cache = ShardedCache(self.own.open(rows, capacity), self._wire, self._numbers)
        self._wire.later(Open(cache.number, rows, capacity))
        return cache

    def forward(
        self,
        cache: ShardedCache,
        nodes: Nodes,
        *,
        last: int | None = None,
        taps: tuple[int, ...] = (),
    ) -> Output:
        """Write Q entries and return the logits [B, Q, V], and their states at the taps.

        Raises ShardLost if another process is gone, and from then on: what it held is lost.
        """
        wire = self._wire
        with wire.turn:
            try:
                wire.send(Call(cache.number, last, taps), *nodes)
                with self.group.together():
                    return self.own.forward(cache.own, nodes, last=last, taps=taps)
            except BaseException as error:  # an interruption, too: the others went on
                wire.broken = error
                raise

    def keep(self, cache: ShardedCache, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the accepted paths' entries next to their roots."""
        self.own.keep(cache.own, first_B, path_BD)
        self._wire.later(Keep(cache.number), first_B, path_BD)

    def learn(
        self,
        cache: ShardedCache,
        slots_BQ: Tensor,
        positions_BQ: Tensor,
        wide: int,
        hidden: tuple[Tensor, ...],
        known_B: Tensor,
    ) -> None:
        """There is nothing to be told: it reads no other model's states."""

    def probe(self, rows: int) -> Inputs | None:
        """None: it reads text alone."""
        return None

    def close(self) -> None:
        """Send the other ranks home."""
        if self._wire.broken is None:
            with suppress(ShardLost):
                self._wire.send(End())
            self._wire.broken = RuntimeError("closed")
            distributed.destroy_process_group()
