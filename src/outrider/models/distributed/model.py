"""The sharded target as the engine sees it, on rank 0: a `LanguageModel` like any other."""

import atexit
import itertools
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, Self

import torch
from torch import Tensor, distributed

from outrider.errors import ShardLost
from outrider.models.cache import SlotCache
from outrider.models.decoder import TreeDecoder
from outrider.models.distributed.rpc import (
    Broadcaster,
    DropCache,
    ForwardCall,
    Group,
    KeepPath,
    NarrowRows,
    OpenCache,
    PutRows,
    Shard,
    StopWorker,
    TakeRows,
)
from outrider.models.model_wrapper import ModelWrapper
from outrider.types import Inputs, Nodes, Output


class ShardedCache:
    """Rank 0's part of a cache, whose every change the other ranks repeat on theirs."""

    def __init__(self, own: SlotCache, wire: Broadcaster, numbers: "itertools.count[int]") -> None:
        self.own, self._wire, self._numbers = own, wire, numbers
        self.number = next(numbers)
        weakref.finalize(self, wire.later, DropCache(self.number)).atexit = False

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.own.capacity

    def take(self, rows: Sequence[int]) -> "ShardedCache":
        """A copy of these rows, in this order."""
        some = ShardedCache(self.own.take(rows), self._wire, self._numbers)
        self._wire.later(TakeRows(self.number, some.number, tuple(rows)))
        return some

    def put(self, into: Sequence[int], other: "ShardedCache") -> Self:
        """Write the rows of `other` at these rows; returns this cache."""
        self.own = self.own.put(into, other.own)
        self._wire.later(PutRows(self.number, tuple(into), other.number))
        return self

    def narrow(self, rows: int) -> Self:
        """This cache with its first rows alone."""
        self.own = self.own.narrow(rows)
        self._wire.later(NarrowRows(self.number, rows))
        return self


class ShardedModel(ModelWrapper[TreeDecoder]):
    """Rank 0's part of a decoder, which calls the others' along."""

    def __init__(self, own: TreeDecoder, group: Group) -> None:
        super().__init__(own)
        self.group = group
        self._wire, self._numbers = Broadcaster(group), itertools.count()
        atexit.register(self.close)

    @property
    def capturable(self) -> bool:
        """No: the other ranks are called along."""
        return False

    def open(self, rows: int, capacity: int, inputs: Inputs | None = None) -> ShardedCache:
        """An empty cache for `rows` rows."""
        if inputs is not None:
            self.model.examine(inputs)
        cache = ShardedCache(self.model.open(rows, capacity), self._wire, self._numbers)
        self._wire.later(OpenCache(cache.number, rows, capacity))
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
                wire.send(ForwardCall(cache.number, last, taps), *nodes)
                with self.group.together():
                    return self.model.forward(cache.own, nodes, last=last, taps=taps)
            except BaseException as error:  # an interruption, too: the others went on
                wire.broken = error
                raise

    def keep(self, cache: ShardedCache, first_B: Tensor, path_BD: Tensor) -> None:
        """Move the accepted paths' entries next to their roots."""
        self.model.keep(cache.own, first_B, path_BD)
        self._wire.later(KeepPath(cache.number), first_B, path_BD)

    def close(self) -> None:
        """Send the other ranks home."""
        if self._wire.broken is None:
            with suppress(ShardLost):
                self._wire.send(StopWorker())
            self._wire.broken = RuntimeError("closed")
            distributed.destroy_process_group()


# What the other ranks do: they follow rank 0's orders until it ends, and never come back.


def split(own: TreeDecoder, group: Group) -> ShardedModel:
    """On rank 0 the model that calls the others along. The others stay here, and leave with it.

    All calls are padded as rank 0's are, whatever processor the others run on.
    """
    told: list[object] = [own.rounding]
    with group.together():
        distributed.broadcast_object_list(told, 0, group=group.orders)
    own.rounding = told[0]  # type: ignore[assignment]
    if group.rank == 0:
        return ShardedModel(own, group)
    serve(own, group)


@torch.inference_mode()
def serve(own: TreeDecoder, group: Group) -> NoReturn:
    """Follow orders. Leaves by SystemExit: 0 once rank 0 says so, 1 if a process is gone."""
    wire, shard = Broadcaster(group), Shard(own)
    try:
        while True:
            for order, tensors in wire.receive():
                with group.together():
                    order.run(shard, tensors)
    except SystemExit:
        distributed.destroy_process_group()
        raise
    except ShardLost as error:
        sys.stderr.write(f"rank {group.rank} of {group.size} leaves: {error}\n")
        raise SystemExit(1) from None
