"""Several processes on one machine: one per core (gloo) or one per GPU (nccl).

Started by `torchrun --nproc-per-node N -m training.train ...`; alone, `start` sets the number of
threads (one, or what `OMP_NUM_THREADS` says) and the other functions do nothing. Two processes of
one thread beat one process of two threads on a shared machine: OpenMP's threads spin at barriers
and starve as soon as a neighbour is busy.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


def start() -> torch.device:
    """Join the other processes if there are any; the device this one computes on."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # A run may be stopped for hours and go on; the usual timeout would end it.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(days=30))
    return device or torch.device("cpu")


def stop() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def seed_of(seed: int, number: int) -> int:
    """A seed for this process's `number`-th pool of texts in a run."""
    return (seed * 1_000_003 + number) * count() + rank()


def add_up(values: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def average(tensors: dict[str, Tensor]) -> None:
    """Replace each tensor by its mean over the processes; one message for all of them."""
    if not dist.is_initialized():
        return
    flat = torch.cat([t.flatten() for t in tensors.values()])
    add_up(flat).div_(count())
    parts = flat.split([t.numel() for t in tensors.values()])
    for tensor, part in zip(tensors.values(), parts, strict=True):
        tensor.copy_(part.view_as(tensor))
