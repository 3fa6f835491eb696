"""Launch shapes: block sizes by a rule instead of a search, and tickets that outlive a call."""

import torch
from torch import Tensor

_tickets: dict[tuple[torch.device, int, str], Tensor] = {}
_forced: list[tuple[int, int]] = []  #: block size and warps that tests and benchmarks ask for

#: Parameters that bound a loop. Triton makes an argument of 1 a constant; a loop that starts at 1
#: is dead then, and dead loops break a compiler pass of Triton 3.6 (TritonGPUCoalesce).
LOOPS = ("depth",)


def next_power(value: int) -> int:
    """The smallest power of two that is at least `value`.

    >>> next_power(5), next_power(8)
    (8, 8)
    """
    return 1 << max(value - 1, 0).bit_length()


def block_size(vocab: int, dtype: torch.dtype, rows: int) -> tuple[int, int]:
    """Elements of a slice and warps: 64 bytes in flight a thread.

    In half precision 4096 elements and 4 warps were the quickest of five shapes on an H200, at 8
    rows and at 384 (docs/gpu.md); wide slices of float32, if rows are many, were not timed.
    """
    if _forced:
        return _forced[-1]
    half = dtype.itemsize == 2
    if rows >= 96 and vocab >= 50_000 and not half:
        return 4096, 8
    size = 2048 if vocab < 100_000 or not half else 4096
    return min(size, max(next_power(vocab), 16)), 4


def race_size(block: int) -> int:
    """Elements of a slice in kernels that also hash: fewer, to spare registers."""
    return min(block, 2048)


def programs(vocab: int, block: int) -> int:
    """How many slices a row has."""
    return -(-vocab // block)


def workspace(device: torch.device, name: str, size: int) -> Tensor:
    """Zeroed int32 tickets of a kernel on the current stream. Kernels leave them zeroed.

    They are kept, never freed, so that a captured graph may use them.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _tickets.get((device, stream, name))
    if found is None or found.numel() < size:
        found = torch.zeros(next_power(max(size, 1024)), dtype=torch.int32, device=device)
        _tickets[device, stream, name] = found
    return found
