"""The processes that hold one model, as torchrun starts them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec

import torch
from torch import distributed

from outrider import arguments
from outrider.errors import ConfigurationError, ShardLost

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
