"""What rank 0 tells the other ranks: rows that come and go, calls, accepted paths.

An order repeats a call of the model or of one of its caches, which have numbers for this purpose.
Orders that need no answer wait for the next call of the model and travel with it: one message for
a step, whose tensors are what the call reads (four tables, [B, Q] and [B, Q, W]) and the accepted
paths.
"""

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, distributed

from outrider.errors import ShardLost
from outrider.models.cache import SlotCache
from outrider.models.decoder import TreeDecoder
from outrider.models.distributed.group import Group
from outrider.types import Nodes


@dataclass
class Shard:
    """A rank's part of the model, and of its caches by number."""

    model: TreeDecoder
    caches: dict[int, SlotCache] = field(default_factory=dict)


class OpenCache(NamedTuple):
    """An empty cache of so many rows."""

    cache: int
    rows: int
    capacity: int

    def run(self, shard: Shard, tensors: Sequence[Tensor]) -> None:
        shard.caches[self.cache] = shard.model.open(self.rows, self.capacity)


class TakeRows(NamedTuple):
    """Another cache with copies of these rows."""

    cache: int
    made: int
    rows: tuple[int, ...]

    def run(self, shard: Shard, tensors: Sequence[Tensor]) -> None:
        shard.caches[self.made] = shard.caches[self.cache].take(self.rows)


class PutRows(NamedTuple):
    """The rows of another cache at these rows."""

    cache: int
    into: tuple[int, ...]
    other: int

    def run(self, shard: Shard, tensors: Sequence[Tensor]) -> None:
        shard.caches[self.cache].put(self.into, shard.caches[self.other])


class NarrowRows(NamedTuple):
    """The first rows alone: others have left."""

    cache: int
    rows: int

    def run(self, shard: Shard, tensors: Sequence[Tensor]) -> None:
        shard.caches[self.cache].narrow(self.rows)


class DropCache(NamedTuple):
    """Nobody has this cache any more."""

    cache: int

    def run(self, shard: Shard, tensors: Sequence[Tensor]) -> None:
        del shard.caches[self.cache]


class KeepPath(NamedTuple):
    """Move accepted paths next to their roots; tensors: first [B], path [B, D]."""

    cache: int

    def run(self, shard: Shard, tensors: Sequence[Tensor]) -> None:
        shard.model.keep(shard.caches[self.cache], *tensors)


class ForwardCall(NamedTuple):
    """A call of the model; tensors: its nodes. What comes out is rank 0's business."""

    cache: int
    last: int | None
    taps: tuple[int, ...]

    def run(self, shard: Shard, tensors: Sequence[Tensor]) -> None:
        nodes = Nodes(*tensors)
        shard.model.forward(shard.caches[self.cache], nodes, last=self.last, taps=self.taps)


class StopWorker(NamedTuple):
    """There is nothing more to do."""

    def run(self, shard: Shard, tensors: Sequence[Tensor]) -> None:
        raise SystemExit(0)


Order: TypeAlias = (
    OpenCache | TakeRows | PutRows | NarrowRows | DropCache | KeepPath | ForwardCall | StopWorker
)


class _Envelope(NamedTuple):
    """An order, and the forms of its tensors, which follow apart."""

    order: Order
    forms: tuple[tuple[torch.dtype, torch.Size], ...]


class Broadcaster:
    """Orders on their way from rank 0 to all others."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._waiting: deque[tuple[Order, tuple[Tensor, ...]]] = deque()
        self.turn = threading.RLock()  #: one call at a time: all ranks make them in one order
        self.broken: BaseException | None = None  #: why nobody can be sure of the others any more

    def later(self, order: Order, *tensors: Tensor) -> None:
        """Send this order ahead of the next one that is sent."""
        self._waiting.append((order, tensors))

    def send(self, order: Order, *tensors: Tensor) -> None:
        """Send what waits and this order. Raises ShardLost where nobody can follow it."""
        if self.broken is not None:
            raise ShardLost(
                f"the {self.group.size} processes that hold the target are out of step since an "
                f"earlier call failed ({type(self.broken).__name__}); start the run again"
            ) from self.broken
        self._waiting.append((order, tensors))
        some = [self._waiting.popleft() for _ in range(len(self._waiting))]
        letters = [_Envelope(o, tuple((t.dtype, t.shape) for t in ts)) for o, ts in some]
        head = torch.frombuffer(bytearray(pickle.dumps(letters)), dtype=torch.uint8)
        flat = [_bytes(t) for _, ts in some for t in ts]
        with self.group.together():
            _broadcast(torch.tensor([len(head)]), self.group)
            _broadcast(head, self.group)
            if flat:
                distributed.broadcast(torch.cat(flat), 0)

    def receive(self) -> list[tuple[Order, list[Tensor]]]:
        """The next orders of rank 0, and their tensors. Raises ShardLost if it is gone."""
        with self.group.together():
            size = torch.zeros(1, dtype=torch.int64)
            _broadcast(size, self.group)
            head = torch.empty(int(size), dtype=torch.uint8)
            _broadcast(head, self.group)
            letters: list[_Envelope] = pickle.loads(head.numpy().tobytes())
            sizes = [_length(form) for letter in letters for form in letter.forms]
            if not sizes:
                return [(letter.order, []) for letter in letters]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.group.device)
            distributed.broadcast(flat, 0)
        parts = iter(torch.split(flat, sizes))
        return [
            (o, [next(parts).clone().view(dtype).view(shape) for dtype, shape in forms])
            for o, forms in letters
        ]


def _broadcast(x: Tensor, group: Group) -> None:
    distributed.broadcast(x, 0, group=group.orders)


def _bytes(x: Tensor) -> Tensor:
    # a column of one row counts as contiguous whatever its stride
    return x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _length(form: tuple[torch.dtype, torch.Size]) -> int:
    dtype, shape = form
    return dtype.itemsize * prod(shape)
