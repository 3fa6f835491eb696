"""Top-p (with top-k) as a floor on a CPU, sorting only the tokens that can be in the nucleus.

    floor = the smallest z_i, in descending order, with  sum_{j < i} p_j < top_p

A threshold on p is lowered until the tokens above it reach top_p; they alone are sorted. On the
laws of language models that is a few hundred tokens of the vocabulary. Ties at the floor stay in.
"""

import math

import numpy as np
import torch
from torch import Tensor

from outrider.ops.cpu.host_tables import Array
from outrider.ops.reference.probs import floors as reference_floors, least, partial, unscaled
from outrider.row_params import SamplingRows

_FIRST, _NEXT, _LAST = 1e-2, 3e-2, 1e-12


def floors(logits_BRV: Tensor, sampling: SamplingRows) -> Tensor:
    """Floors [B, R], float32; the reference's where a few of the largest logits tell them."""
    batch, rows, vocab = logits_BRV.shape
    if not sampling.any_top_p or partial(sampling, vocab):
        return reference_floors(logits_BRV, sampling)
    wide = logits_BRV.detach().float()
    logits = wide.numpy()
    inverse, limits = unscaled(sampling).tolist(), sampling.top_p_B.tolist()
    counts = sampling.top_k_B.tolist()
    table = np.full((batch, rows), -np.inf, dtype=np.float32)
    for b in range(batch):
        count = counts[b] if counts[b] < vocab else 0
        for r in range(rows if count or limits[b] < 1 else 0):
            row = logits[b, r]
            if count:
                table[b, r] = np.partition(row, vocab - count)[vocab - count]
            if limits[b] < 1:
                table[b, r] = _floor(row, inverse[b], limits[b], float(table[b, r]))
    return least(wide, torch.from_numpy(table), sampling)


def _floor(row: Array, inverse: float, limit: float, floor: float) -> float:
    top = float(row.max())
    if not math.isfinite(top):
        return floor
    weights = np.subtract(row, np.float32(top))
    if inverse != 1.0:
        weights *= np.float32(inverse)
    np.exp(weights, out=weights)
    if floor > -math.inf:
        weights *= row >= floor
    need = limit * float(weights.sum())
    cut = _FIRST
    while True:
        chosen = np.flatnonzero(weights > cut)
        if cut <= 0 or float(weights[chosen].sum(dtype=np.float64)) >= need:
            break
        cut = cut * _NEXT if cut > _LAST else 0.0
    values = np.sort(row[chosen])[::-1]
    part = np.sort(weights[chosen])[::-1].astype(np.float64)  # in the same order: exp is monotone
    inside = int((np.cumsum(part) - part).searchsorted(need, "left"))
    return float(values[max(inside, 1) - 1])
