"""Draft-step sampler on a CPU: one token per law by inverse transform, and its log-sum-exp.

    lse = log sum exp(z / T);  x ~ exp(z / T - lse)

The log-sum-exp is a by-product of the draw: kept, it spares the verification every draft row.
"""

import math

import torch
from torch import Tensor

from outrider.ops.cpu import keys
from outrider.ops.cpu.rows import Rows, pick
from outrider.types import Laws


def sample(laws: Laws, keys_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, R] and log-sum-exps [B, R] of the scaled, filtered logits (0 for greedy rows)."""
    rows = Rows(laws, 0)
    tokens, sums = [], []
    for b, streams in enumerate(keys_BR.tolist()):
        for r, key in enumerate(streams):
            rows.fill(b, r)
            token, mass = pick(rows.row, keys.fine_uniform(key, 0))
            tokens.append(min(token, rows.vocab - 1))
            sums.append(math.log(mass) + rows.shift if mass > 0 else -math.inf)
    dtype = torch.float64 if rows.double else torch.float32
    return torch.tensor(tokens).view(keys_BR.shape), torch.tensor(sums, dtype=dtype).view(
        keys_BR.shape
    )
