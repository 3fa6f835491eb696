"""All rows of a batch in one compiled call, bit for bit what Python does with one after another.

block  block verification (`models/cpu_kernels/block_verification.c`): of vocabularies below
       `law_slices.LONG` tokens, of rows whose draft carries the weights that it was drawn from,
       with the noise of their seeds; what it does not take is walked in NumPy
draw   a token of every urn (`models/cpu_kernels/draws.c`)
"""

import ctypes
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.models.cpu_kernels import build
from outrider.ops.cpu.host_tables import Array, per_thread
from outrider.ops.cpu.law_slices import LEAST, LONG, MOST, weights_of
from outrider.ops.cpu.rejection_walk import LARGEST, NOTHING
from outrider.ops.reference.probs import EMPTY
from outrider.types import Draft, Draws, Laws, Scores

_AT_ONCE = 1 << 19  #: weights
_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_DRAW = (*(_WHOLE,) * 5, *(_POINTER,) * 3, _WHOLE, _POINTER, _POINTER)
_FLOAT = np.dtype(np.float32).str
_LIMITS = (ctypes.c_double * 5)(LEAST, MOST, LARGEST, NOTHING, EMPTY)


class _KernelSizes(ctypes.Structure):
    """`Sizes` of block_verification.c."""

    _fields_ = [
        (name, _WHOLE)
        for name in ("first", "stop", "batch", "nodes", "vocab", "draws", "laws", "depth", "shared")
    ]


class BlockVerdict(NamedTuple):
    """A verdict's tables, and which rows of them are not written."""

    path_BD: Tensor
    count_B: Tensor
    next_B: Tensor
    overlap_BD: Tensor | None
    left: list[int]


def block(draft: Draft, scores: Scores, draws: Draws, overlap: bool) -> BlockVerdict | None:
    """The verdicts of `outrider.ops.cpu.block`; None where every row is left to it."""
    laws = scores.laws
    batch, nodes, vocab = laws.logits_BRV.shape
    if vocab >= LONG or laws.logits_BRV.dtype is torch.float64 or build.unbuilt() is not None:
        return None
    if draws.uniform_BNK is not None or draws.race_BV is not None:
        return None
    guesses = _Guesses.of(draft.laws, batch, vocab)
    if guesses is None:
        return None
    depth = draft.tree.max_depth
    tables = [draft.draws_BNK, draft.kind_BNK, draft.row_BNK]
    shared = all(table.shape[0] == 1 for table in tables)
    if not shared:
        tables = [table.expand(batch, -1, -1) for table in tables]
    tokens_BN = draft.tokens_BN.expand(batch, -1)
    read = [t.contiguous() for t in (tokens_BN, *tables, draws.seed_B, draws.start_B)]
    given = (_POINTER * 9)(*(table.data_ptr() for table in read), *guesses.at)
    path_BD = tokens_BN.new_empty(batch, depth)
    count_B, next_B = (tokens_BN.new_empty(batch) for _ in range(2))
    told = overlap and draft.laws is not None and depth > 0
    overlap_BD = tokens_BN.new_empty(batch, depth, dtype=torch.float32) if told else None
    done = np.zeros(batch, dtype=np.uint8)
    out = [None if t is None else t.data_ptr() for t in (path_BD, count_B, next_B, overlap_BD)]
    run = build.function("outrider_block", (_POINTER,) * 9)
    group = max(_AT_ONCE // (nodes * vocab), 1)
    room = _room(min(group, batch), nodes, vocab)
    most = draft.draws_BNK.shape[2]
    sizes = _KernelSizes(0, 0, batch, nodes, vocab, most, guesses.laws, depth, shared)
    for first in range(0, batch, group):
        sizes.first, sizes.stop = first, min(first + group, batch)
        _weigh(laws, first, sizes.stop, room)
        run(_LIMITS, ctypes.addressof(sizes), given, room.ctypes.data, *out, done.ctypes.data)
    return BlockVerdict(path_BD, count_B, next_B, overlap_BD, np.flatnonzero(done == 0).tolist())


class _Guesses(NamedTuple):
    """Where the draft's weights are."""

    laws: int
    at: tuple[int | None, int | None, int | None]
    kept: tuple[object, ...]  #: what must live as long

    @classmethod
    def of(cls, laws: Laws | None, batch: int, vocab: int) -> "_Guesses | None":
        """None: they are not as the kernel reads them."""
        if laws is None:
            return cls(0, (None, None, None), ())
        weights = weights_of(laws)
        if weights is None:
            return None
        found = [row.__array_interface__ for row in weights.values]  # all of it at once
        strides = [row["strides"] or (4 * vocab, 4) for row in found]
        for row, stride in zip(found, strides, strict=True):
            if row["shape"] != (batch, vocab) or row["typestr"] != _FLOAT or stride[1] != 4:
                return None
        count = len(found)
        rows = (_POINTER * count)(*[row["data"][0] for row in found])
        apart = (_WHOLE * count)(*[stride[0] // 4 for stride in strides])
        sums = (ctypes.c_double * (count * batch))(*chain.from_iterable(weights.sums))
        at = ctypes.addressof(rows), ctypes.addressof(apart), ctypes.addressof(sums)
        return cls(count, at, (rows, apart, sums))


def draw(weights: Array, sums: Array, block: int, keys: Array, index: int) -> tuple[Array, Array]:
    """`DrawsWithoutReplacement.draw_one` of every row of `weights` [rows, V], whose blocks have
    these `sums`.

    Word `index` of each of the `keys` is its noise. Weights are float32 or float64.
    """
    weights, sums, keys = map(np.ascontiguousarray, (weights, sums, keys))
    rows, vocab = weights.shape
    tokens, masses = np.empty(rows, dtype=np.int64), np.empty(rows)
    build.function("outrider_draw", _DRAW)(
        rows, vocab, block, sums.shape[1], weights.itemsize == 8, weights.ctypes.data,
        sums.ctypes.data, keys.ctypes.data, index, tokens.ctypes.data, masses.ctypes.data,
    )  # fmt: skip
    return tokens, masses


@per_thread
def _room(count: int, nodes: int, vocab: int) -> Array:
    return np.empty((count, nodes, vocab), dtype=np.float32)


def _weigh(laws: Laws, first: int, stop: int, room: Array) -> None:
    """exp(z / T) of rows first..stop, 0 below the floor."""
    z = laws.logits_BRV.detach()[first:stop].float().numpy()
    out, inverse = room[: stop - first], laws.inverse_temperature_B[first:stop].tolist()
    with np.errstate(over="ignore", invalid="ignore"):  # rows where it matters are left
        if inverse.count(1.0) < len(inverse):
            scaled = np.multiply(z, np.array(inverse, dtype=np.float32)[:, None, None], out=out)
            np.exp(scaled, out=out)
        else:
            np.exp(z, out=out)
        if laws.floor_BR is not None:
            floor = laws.floor_BR.detach()[first:stop, :, None].numpy()
            np.multiply(out, z >= floor, out=out)
