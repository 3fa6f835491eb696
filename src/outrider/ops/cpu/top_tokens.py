"""The most probable tokens of laws on a CPU, and what the nucleus leaves of a law.

The likeliest few take two passes over a law, and nothing is sorted whole. Top-p (with top-k) is a
floor:

    floor = the smallest z_i, in descending order, with  sum_{j < i} p_j < top_p

A threshold on p is lowered until the tokens above it reach top_p; they alone are sorted. On the
laws of language models that is a few hundred tokens of the vocabulary. Ties at the floor stay in.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial as bound
from operator import mul
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.models.cpu_kernels import build
from outrider.ops.cpu.host_tables import Array, native
from outrider.ops.reference.probs import floors as reference_floors, least, partial, unscaled
from outrider.row_params import SamplingRows
from outrider.types import Laws
from outrider.types.drafts import Host

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_LIKELY = (_WHOLE, _WHOLE, _WHOLE, ctypes.c_float, *(_POINTER,) * 4)
MOST = 8  #: tokens of a law that are found in one pass
compiled = cache(build.function)  #: asking for one takes as long as some of them


class TopTokens(NamedTuple):
    """The likeliest tokens of each law, MOST at most and of equals the first, and their logits;
    -1 and -inf behind them, and where a logit is NaN or +inf."""

    tokens: list[list[int]]
    logits: list[list[float]]
    sound: bool  #: whether every law has one


@dataclass
class TopTokenCache:
    """What a step's target laws are asked for by the rule, what ends rows and the drafter: found in
    one pass over the logits, when somebody asks first. A `Host`."""

    peaks: TopTokens | None = None
    asked: bool = False  #: whether they were looked for

    def stack(self, others: Sequence[Host]) -> Host:
        """Nothing is to be known of laws put together."""
        return TopTokenCache(asked=True)


def cache_top_tokens(laws: Laws) -> Laws:
    """As `outrider.ops.reference.draws.cache_top_tokens`."""
    if laws.logits_BRV.dtype is not torch.float32:
        return laws
    return Laws(*laws[:-1], TopTokenCache())


def cached_top_tokens(laws: Laws) -> TopTokens | None:
    """The likeliest tokens, where a step finds them once; None: they are not looked for."""
    once = laws.host
    if not isinstance(once, TopTokenCache):
        return None
    if not once.asked:
        once.asked = True
        found = _in_one_pass(laws.logits_BRV, None, MOST, math.inf)
        if found is not None and found[0]:
            once.peaks = TopTokens(*found, min(found[0])[0] >= 0)
    return once.peaks


def top_tokens(laws: Laws, count: int, gap: float) -> Callable[[int], list[list[int]]]:
    """As `outrider.ops.reference.draws.top_tokens`; of equals the first."""
    known = cached_top_tokens(laws) if count <= MOST else None
    if known is None or not known.sound:
        return _searched(laws, count, gap).__getitem__
    return bound(_cut, known, laws.logits_BRV.shape[1], laws.floor_BR, count, gap)


def _cut(
    known: TopTokens, nodes: int, floor_BR: Tensor | None, count: int, gap: float, row: int
) -> list[list[int]]:
    """What was found of the laws of a row, as far as it is asked for."""
    floors = [-math.inf] * nodes if floor_BR is None else floor_BR[row].tolist()
    found = []
    for at, floor in enumerate(floors, row * nodes):
        tokens, logits = known.tokens[at], known.logits[at]
        least, size = max(logits[0] - gap, floor), min(count, len(logits))
        while tokens[size - 1] < 0 or logits[size - 1] < least:  # the best one never is
            size -= 1
        found.append(tokens[:size])
    return found


def _searched(laws: Laws, count: int, gap: float) -> list[list[list[int]]]:
    """The same where nothing was found before."""
    batch, rows, vocab = laws.logits_BRV.shape
    floors = [-math.inf] * (batch * rows)
    if laws.floor_BR is not None:
        floors = laws.floor_BR.ravel().tolist()
    whole = native(laws.logits_BRV).reshape(-1, vocab)
    limits = None if laws.floor_BR is None else laws.floor_BR.numpy().ravel()
    at_once = _in_one_pass(torch.from_numpy(whole), limits, count, gap)
    if at_once is not None:
        found = [[token for token in row if token >= 0] for row in at_once[0]]
    else:
        found = []
        for z, floor in zip(whole, floors, strict=True):
            index = np.flatnonzero(z >= max(z.max() - gap, floor))
            found.append(index[np.argsort(-z[index], kind="stable")[:count]].tolist())
    return [found[at : at + rows] for at in range(0, batch * rows, rows)]


#: Types of tables of so many numbers: ctypes forgets a type that nobody holds.
_wholes, _floats = cache(bound(mul, _WHOLE)), cache(bound(mul, ctypes.c_float))


def _in_one_pass(
    logits: Tensor, floors: Array | None, count: int, gap: float
) -> tuple[list[list[int]], list[list[float]]] | None:
    """`top_tokens` of every row of logits [..., V] by the compiled loop, and their logits, `count`
    of each; None: there is none."""
    if logits.dtype is not torch.float32:
        return None
    try:
        run = compiled("outrider_likely", _LIKELY)
    except RuntimeError:
        return None
    size = logits.shape[:-1].numel() * count
    whole, found, best = logits.contiguous(), _wholes(size)(), _floats(size)()
    least = None if floors is None else np.ascontiguousarray(floors, dtype=np.float32)
    run(
        size // count, logits.shape[-1], count, gap, whole.data_ptr(),
        None if least is None else least.ctypes.data, found, best,
    )  # fmt: skip
    tokens: list[list[int]] = []
    values: list[list[float]] = []
    for at in range(0, size, count):
        tokens.append(found[at : at + count])
        values.append(best[at : at + count])
    return tokens, values


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
