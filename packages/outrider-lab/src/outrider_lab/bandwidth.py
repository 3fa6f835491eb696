"""How fast this machine reads memory: the ceiling of plain decoding (Chen et al. 2023).

Every token of plain decoding reads every weight once, so bytes of weights over bandwidth is the
least time that a token can take, whatever the software. The bandwidth is measured here, on as many
bytes as the weights have: what fits into a cache is read from it, now as in decoding.
"""

import time
from dataclasses import dataclass
from functools import partial

import torch

from outrider.models.sources import DTYPES, ModelSource
from outrider_lab.certify.report import Row
from outrider_lab.flops import sizes

_LEAST_S, _TIMES = 0.15, 5


@dataclass(frozen=True)
class BandwidthCeiling:
    """What a token reads, and how fast it can be read."""

    bytes_a_token: int
    bytes_a_second: float

    @property
    def ms_per_token(self) -> float:
        """The least time of a token of plain decoding.

        >>> BandwidthCeiling(2_000_000, 1e9).ms_per_token
        2.0
        """
        return 1e3 * self.bytes_a_token / self.bytes_a_second

    def row(self) -> Row:
        """For a table."""
        return {
            "weights, MB": self.bytes_a_token / 1e6,
            "memory, GB/s": self.bytes_a_second / 1e9,
            "least ms/token": self.ms_per_token,
        }


def ceiling(target: str, dtype: str, device: str = "cpu") -> BandwidthCeiling:
    """Of a model in this dtype; an embedding table is a look-up unless it is the output layer."""
    size = int(sizes(ModelSource(target, "target"), dtype).weight_bytes)
    return BandwidthCeiling(size, bandwidth(size, dtype, device))


def bandwidth(size: int, dtype: str = "float32", device: str = "cpu") -> float:
    """Bytes a second of reading `size` bytes again and again, the best of several ways and times.

    A product of a matrix and a vector in the models' dtype, and a sum in float32: what is faster.
    """
    wide, kind = 1024, DTYPES.get(dtype, torch.bfloat16)
    rows = max(size // (kind.itemsize * wide), 1)
    matrix = torch.ones(rows, wide, dtype=kind, device=device)
    vector = torch.ones(wide, dtype=matrix.dtype, device=device)
    numbers = torch.ones(max(size // 4, 1), device=device)
    product = partial(torch.mv, matrix, vector), matrix.numel() * matrix.element_size()
    total = partial(torch.sum, numbers), numbers.numel() * 4
    best = 0.0
    for way, read in (product, total):
        way()
        for _ in range(_TIMES):
            count, start = 0, time.perf_counter()
            while count == 0 or time.perf_counter() - start < _LEAST_S / _TIMES:
                way()
                count += 1
            if numbers.is_cuda:
                torch.cuda.synchronize(numbers.device)
            best = max(best, count * read / (time.perf_counter() - start))
    return best
