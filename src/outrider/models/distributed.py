"""One model held by several processes: transformers cuts the weights, rank 0 decides everything.

Rank 0 has the engine, the drafter and the user's program. The other ranks have a part of the target
and of its cache, and follow orders: which rows come and go, what a call reads, which path was kept.
So no choice is made twice, and a difference in rounding between processes cannot fork a text.
"""

import atexit
import itertools
import os
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from math import prod
from typing import NamedTuple, NoReturn, Self

import torch
from torch import Tensor, distributed

from outrider import arguments
from outrider.errors import ConfigurationError, ShardLost
from outrider.models.cache import SlotCache
from outrider.models.decoder import TreeDecoder
from outrider.models.model_wrapper import ModelWrapper
from outrider.types import Inputs, Nodes, Output

# What rank 0 tells the other ranks: rows that come and go, calls, accepted paths.
#
# An order repeats a call of the model or of one of its caches, which have numbers for this purpose.
# Orders that need no answer wait for the next call of the model and travel with it: one message for
# a step, whose tensors are what the call reads (four tables, [B, Q] and [B, Q, W]) and the accepted
# paths.

# The processes that hold one model, as torchrun starts them.

_START = "start it with: torchrun --nproc-per-node {} PROGRAM"
_EVER = timedelta(days=365)  #: how long a rank waits for orders


@dataclass(frozen=True)
class Group:
    """`size` processes with a part of the target each; this one is number `rank`."""

    rank: int
    size: int
    device: torch.device
    #: for orders alone: who waits for the next one waits as long as it takes
    orders: distributed.ProcessGroup

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that all of them do; what torch says when one is gone becomes ShardLost."""
        try:
            yield
        except RuntimeError as error:
            if not _of_the_connection(error):
                raise
            said = str(error).splitlines()[0][:200]
            raise ShardLost(
                f"one of the {self.size} processes that hold the target is gone, or cannot be "
                f"reached; rank {self.rank} got {said!r}; start the run again (a seeded text goes "
                "on where it stopped, from its prompt and what was told of it)"
            ) from error


def _of_the_connection(error: RuntimeError) -> bool:
    """Whether torch says so of another process; gloo's errors have no type of their own."""
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or "gloo" in text or "connection" in text


def join(size: int, device: str | torch.device | None) -> Group:
    """Meet the other processes. Raises ConfigurationError for a program that torchrun did not start
    with as many, and without the packages that it takes.
    """
    size = arguments.whole("tensor_parallel", size, "give the number of processes", least=2)
    given = os.environ.get("WORLD_SIZE")
    if given is None or not given.isdecimal() or int(given) != size:
        told = "no torchrun" if given is None else f"WORLD_SIZE={given}"
        raise ConfigurationError(
            f"tensor_parallel={size} needs {size} processes; got {told}; {_START.format(size)}"
        )
    if find_spec("accelerate") is None:
        raise ConfigurationError(
            f"tensor_parallel={size} needs the package accelerate, which transformers reads "
            "sharded weights with; got none; pip install 'outrider[tp]'"
        )
    if distributed.is_initialized():
        raise ConfigurationError(
            f"tensor_parallel={size} sets up torch.distributed by itself; got a process group that "
            "is there already; load one sharded target in a process, and set up none yourself"
        )
    place = _own(device)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    orders = distributed.new_group(backend="gloo", timeout=_EVER)
    assert orders is not None
    return Group(distributed.get_rank(), size, place, orders)


def _own(device: str | torch.device | None) -> torch.device:
    """This process's device: transformers takes an accelerator if there is one, by local rank."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if kind == "cuda" else kind)
    if device is not None and torch.device(device).type != kind:
        raise ConfigurationError(
            f"a sharded target runs on {kind} here, one device for each process; got "
            f"device={str(device)!r}; leave it out"
        )
    if place.type == "cuda":
        torch.cuda.set_device(place)
    return place


@dataclass
class Shard:
    """A rank's part of the model, and of its caches by number; rank 0 orders its methods."""

    model: TreeDecoder
    caches: dict[int, SlotCache] = field(default_factory=dict)

    def open(self, cache: int, rows: int, capacity: int) -> None:
        """An empty cache of so many rows."""
        self.caches[cache] = self.model.open(rows, capacity)

    def take(self, cache: int, made: int, rows: Sequence[int]) -> None:
        """Another cache with copies of these rows."""
        self.caches[made] = self.caches[cache].take(rows)

    def put(self, cache: int, into: Sequence[int], other: int) -> None:
        """The rows of another cache at these rows."""
        self.caches[cache].put(into, self.caches[other])

    def narrow(self, cache: int, rows: int) -> None:
        """The first rows alone: others have left."""
        self.caches[cache].narrow(rows)

    def drop(self, cache: int) -> None:
        """Nobody has this cache any more."""
        del self.caches[cache]

    def keep(self, cache: int, first_B: Tensor, path_BD: Tensor) -> None:
        """Move accepted paths next to their roots."""
        self.model.keep(self.caches[cache], first_B, path_BD)

    def forward(
        self, cache: int, last: int | None, aux_layers: tuple[int, ...], *nodes: Tensor
    ) -> None:
        """A call of the model. What comes out is rank 0's business."""
        read = Nodes(*nodes)
        self.model.forward(self.caches[cache], read, last=last, aux_layers=aux_layers)

    def stop(self) -> None:
        """There is nothing more to do."""
        raise SystemExit(0)


class Order(NamedTuple):
    """A method of `Shard`, and what it is called with ahead of tensors."""

    run: Callable[..., None]
    given: tuple[object, ...] = ()


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
            _broadcast(torch.tensor([len(head)], device="cpu"), self.group)
            _broadcast(head, self.group)
            if flat:
                distributed.broadcast(torch.cat(flat), 0)

    def receive(self) -> list[tuple[Order, list[Tensor]]]:
        """The next orders of rank 0, and their tensors. Raises ShardLost if it is gone."""
        with self.group.together():
            size = torch.zeros(1, dtype=torch.int64, device="cpu")
            _broadcast(size, self.group)
            head = torch.empty(int(size), dtype=torch.uint8, device="cpu")
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


class ShardedCache:
    """Rank 0's part of a cache, whose every change the other ranks repeat on theirs."""

    def __init__(self, own: SlotCache, wire: Broadcaster, numbers: "itertools.count[int]") -> None:
        self.own, self._wire, self._numbers = own, wire, numbers
        self.number = next(numbers)
        weakref.finalize(self, wire.later, Order(Shard.drop, (self.number,))).atexit = False

    @property
    def capacity(self) -> int:
        return self.own.capacity

    def take(self, rows: Sequence[int]) -> "ShardedCache":
        some = ShardedCache(self.own.take(rows), self._wire, self._numbers)
        self._wire.later(Order(Shard.take, (self.number, some.number, tuple(rows))))
        return some

    def put(self, into: Sequence[int], other: "ShardedCache") -> Self:
        """Write the rows of `other` at these rows; returns this cache."""
        self.own = self.own.put(into, other.own)
        self._wire.later(Order(Shard.put, (self.number, tuple(into), other.number)))
        return self

    def narrow(self, rows: int) -> Self:
        """This cache with its first rows alone."""
        self.own = self.own.narrow(rows)
        self._wire.later(Order(Shard.narrow, (self.number, rows)))
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
        self._wire.later(Order(Shard.open, (cache.number, rows, capacity)))
        return cache

    def forward(
        self,
        cache: ShardedCache,
        nodes: Nodes,
        *,
        last: int | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> Output:
        """Write Q entries and return the logits [B, Q, V], and their states at the aux layers.

        Raises ShardLost if another process is gone, and from then on: what it held is lost.
        """
        wire = self._wire
        with wire.turn:
            try:
                wire.send(Order(Shard.forward, (cache.number, last, aux_layers)), *nodes)
                with self.group.together():
                    return self.model.forward(cache.own, nodes, last=last, aux_layers=aux_layers)
            except BaseException as error:  # an interruption, too: the others went on
                wire.broken = error
                raise

    def keep(self, cache: ShardedCache, first_B: Tensor, path_BD: Tensor) -> None:
        self.model.keep(cache.own, first_B, path_BD)
        self._wire.later(Order(Shard.keep, (cache.number,)), first_B, path_BD)

    def close(self) -> None:
        """Send the other ranks home."""
        if self._wire.broken is None:
            with suppress(ShardLost):
                self._wire.send(Order(Shard.stop))
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
                    order.run(shard, *order.given, *tensors)
    except SystemExit:
        distributed.destroy_process_group()
        raise
    except ShardLost as error:
        sys.stderr.write(f"rank {group.rank} of {group.size} leaves: {error}\n")
        raise SystemExit(1) from None
