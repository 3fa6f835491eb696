# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Top-k, top-p and min-p as a floor of each row, by radix selection: nothing is sorted.

    top-k   the k-th largest logit
    top-p   the smallest logit z with  sum_{z' > z, z' >= top-k floor} p(z') < top_p sum p
    min-p   max z + T log min_p

Logits become integers of the same order and the floor is found digit by digit from the top. For
top-k a digit has 8 bits and its tokens are counted; for top-p it has 4 bits and their mass is
summed as well. Every launch reads the rows once in slices; the last program of a row (a ticket)
combines the slices in a fixed order and chooses the digit. Counts are integers, so that atomic
additions give the same sum in any order; masses are added in float64 in the order of the slices.
Ties at a floor stay in. Launches: one for the largest logit (top-p and min-p), then 2 for top-k and
4 for top-p with 16-bit logits, 4 and 8 with float32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.ops.triton.launch import block_size, next_power, programs, race_size, workspace
from outrider.ops.triton.law_slices import row_done, side_of, slices_of
from outrider.row_params import SamplingRows
from outrider.types import Laws

COUNT_BITS, MASS_BITS = 8, 4
COUNT_BINS = tl.constexpr(1 << COUNT_BITS)
MASS_BINS = tl.constexpr(1 << MASS_BITS)


class FloorLimits(NamedTuple):
    """The filters of each batch row, [B]: k (0: off), p (1: off) and min_p (0: off)."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class FloorSearch(NamedTuple):
    """What is known of each row: digits found, what lies above them, and the floors, [B, R]."""

    prefix: Tensor  #: digits of the floor so far, as an integer
    above: Tensor  #: float64: how many tokens (top-k) or how much mass (top-p) lie above the prefix
    need: Tensor  #: float64: mass that the nucleus must reach
    kth: Tensor  #: top-k floor
    low: Tensor  #: min-p floor
    out: Tensor  #: the largest of the floors
    ticket: Tensor


@triton.jit
def ordered(z, HALF: tl.constexpr):
    """Logits as non-negative int64 with the order of the floats: 16 or 32 bits."""
    if HALF:
        half = z.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        key = tl.where(half >= 0x8000, 0xFFFF - half, half + 0x8000)
    else:
        full = z.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        key = tl.where(full >= 0x80000000, 0xFFFFFFFF - full, full + 0x80000000)
    return key


@triton.jit
def restored(key, kind, HALF: tl.constexpr):
    """The float32 logit of an integer of `ordered`; `kind` is any logit of the same dtype."""
    if HALF:
        half = tl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key)
        z = half.to(tl.int16).to(kind.dtype, bitcast=True).to(tl.float32)
    else:
        full = tl.where(key >= 0x80000000, key - 0x80000000, 0xFFFFFFFF - key)
        z = full.to(tl.int32).to(tl.float32, bitcast=True)
    return z


@triton.jit
def floor_top(
    side, limits, slices, search, NPROG, BLOCK: tl.constexpr, NPROG_P2: tl.constexpr,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of every row and the min-p floor. Grid (slices, rows, batch)."""
    r = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    pid = tl.program_id(0)
    if row_done(side, slices, pid, b, r, NPROG, BLOCK, NPROG_P2, False, HAS_MIN) and HAS_MIN:
        tl.debug_barrier()
        row = b * side.rows + r
        best = tl.load(side.best + row, cache_modifier=".cg")
        top = tl.load(side.z + b * side.stride_b + r * side.stride_r + best).to(tl.float32)
        inverse = tl.load(side.inverse + b)
        inverse = tl.where(inverse == float("inf"), 1.0, inverse)
        least = tl.load(limits.min_p + b)
        low = top + tl.log(tl.where(least > 0, least, 1.0)) / inverse
        low = tl.where(least > 0, low, float("-inf"))
        tl.store(search.low + row, low)
        if not (HAS_K or HAS_P):
            tl.store(search.out + row, low)


@triton.jit
def floor_count(
    side, limits, search, counts, NPROG, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
    FIRST: tl.constexpr, HALF: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr,
):  # fmt: skip
    """One digit of the top-k floor of every row. Grid (slices, rows, batch)."""
    pid = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = b * side.rows + r
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    live = offs < side.vocab
    z = tl.load(side.z + b * side.stride_b + r * side.stride_r + offs, mask=live, other=0.0)
    key = ordered(z, HALF)
    if not FIRST:
        live = live & ((key >> (SHIFT + 8)) == tl.load(search.prefix + row))
    digit = ((key >> SHIFT) & 255).to(tl.int32)
    bins = tl.arange(0, COUNT_BINS)
    seen = tl.histogram(tl.where(live, digit, 0), COUNT_BINS)  # dead lanes count as digit 0
    dead = BLOCK - tl.sum(live.to(tl.int32), axis=0)
    seen -= tl.where(bins == 0, dead, 0)
    tl.atomic_add(counts + row * COUNT_BINS + bins, seen, mask=seen > 0, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(search.ticket + row, 1, sem="acq_rel", scope="gpu") == NPROG - 1:
        tl.debug_barrier()
        tl.store(search.ticket + row, 0)
        total = tl.load(counts + row * COUNT_BINS + bins, cache_modifier=".cg")
        tl.store(counts + row * COUNT_BINS + bins, tl.zeros_like(total))
        k = tl.load(limits.top_k + b)
        wanted = tl.minimum(tl.maximum(k, 1), side.vocab).to(tl.int32)
        above = 0
        prefix = row * 0
        if not FIRST:
            above = tl.load(search.above + row).to(tl.int32)
            prefix = tl.load(search.prefix + row)
        up_to = above + tl.cumsum(total, axis=0, reverse=True)
        here = (up_to >= wanted) & (up_to - total < wanted)
        prefix = (prefix << 8) + tl.sum(tl.where(here, bins, 0), axis=0)
        above = tl.sum(tl.where(here, up_to - total, 0), axis=0)
        tl.store(search.prefix + row, prefix)
        tl.store(search.above + row, above.to(tl.float64))
        if SHIFT == 0:
            floor = restored(prefix, z, HALF)
            floor = tl.where(k > 0, floor, float("-inf"))
            tl.store(search.kth + row, floor)
            if not HAS_P:
                if HAS_MIN:
                    floor = tl.maximum(floor, tl.load(search.low + row))
                tl.store(search.out + row, floor)


@triton.jit
def floor_mass(
    side, limits, search, masses, NPROG, BLOCK: tl.constexpr, NPROG_P2: tl.constexpr,
    SHIFT: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr, HAS_K: tl.constexpr,
    HAS_MIN: tl.constexpr,
):  # fmt: skip
    """One digit of the top-p floor of every row. Grid (slices, rows, batch)."""
    pid = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = b * side.rows + r
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    live = offs < side.vocab
    raw = tl.load(side.z + b * side.stride_b + r * side.stride_r + offs, mask=live, other=0.0)
    key = ordered(raw, HALF)
    z = raw.to(tl.float32)
    if HAS_K:
        live = live & (z >= tl.load(search.kth + row))
    if not FIRST:
        live = live & ((key >> (SHIFT + 4)) == tl.load(search.prefix + row))
    inverse = tl.load(side.inverse + b)
    inverse = tl.where(inverse == float("inf"), 1.0, inverse)
    weight = tl.exp(z * inverse - tl.load(side.lse + row))
    weight = tl.where(live & (z > float("-inf")), weight, 0.0)
    digit = ((key >> SHIFT) & 15).to(tl.int32)
    bins = tl.arange(0, MASS_BINS)
    seen = tl.histogram(tl.where(live, digit, 0), MASS_BINS)  # dead lanes count as digit 0
    seen -= tl.where(bins == 0, BLOCK - tl.sum(live.to(tl.int32), axis=0), 0)
    mass = tl.zeros([MASS_BINS], tl.float32)
    for d in tl.static_range(0, 16):
        mass = tl.where(bins == d, tl.sum(tl.where(digit == d, weight, 0.0), axis=0), mass)
    # a digit that occurs with mass 0 is -1, one that does not occur 0: floors are logits of the row
    mass = tl.where((seen > 0) & (mass == 0.0), -1.0, mass)
    tl.store(masses + (row * NPROG + pid) * MASS_BINS + bins, mass)
    tl.debug_barrier()
    if tl.atomic_add(search.ticket + row, 1, sem="acq_rel", scope="gpu") == NPROG - 1:
        tl.debug_barrier()
        tl.store(search.ticket + row, 0)
        slots = tl.arange(0, NPROG_P2)
        parts = tl.load(
            masses + (row * NPROG + slots[:, None]) * MASS_BINS + bins[None, :],
            mask=(slots < NPROG)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        present = tl.max((parts != 0.0).to(tl.int32), axis=0) != 0
        total = tl.sum(tl.maximum(parts, 0.0).to(tl.float64), axis=0)
        limit = tl.load(limits.top_p + b)
        if FIRST:
            need = tl.sum(total, axis=0) * limit.to(tl.float64)
            tl.store(search.need + row, need)
            above = tl.zeros_like(need)
            prefix = row * 0
        else:
            need = tl.load(search.need + row)
            above = tl.load(search.above + row)
            prefix = tl.load(search.prefix + row)
        over = above + tl.cumsum(total, axis=0, reverse=True) - total
        highest = tl.max(tl.where(present, bins, 0), axis=0)  # a row without mass keeps this
        lowest = tl.min(tl.where(present & (over < need), bins, MASS_BINS), axis=0)
        lowest = tl.where(lowest == MASS_BINS, highest, lowest)
        prefix = (prefix << 4) + lowest
        tl.store(search.prefix + row, prefix)
        tl.store(search.above + row, tl.sum(tl.where(bins == lowest, over, 0.0), axis=0))
        if SHIFT == 0:
            floor = tl.where(limit < 1, restored(prefix, raw, HALF), float("-inf"))
            if HAS_K:
                floor = tl.maximum(floor, tl.load(search.kth + row))
            if HAS_MIN:
                floor = tl.maximum(floor, tl.load(search.low + row))
            tl.store(search.out + row, floor)


def floors(logits_BRV: Tensor, sampling: SamplingRows) -> Tensor:
    """Floors [B, R], float32: the reference's thresholds. At least one filter must be in use."""
    top_k_B = sampling.top_k_B if sampling.most_top_k else None
    top_p_B = sampling.top_p_B if sampling.any_top_p else None
    min_p_B = sampling.min_p_B if sampling.any_min_p else None
    batch, rows, vocab = logits_BRV.shape
    device, dtype = logits_BRV.device, logits_BRV.dtype
    side, _ = side_of(Laws(logits_BRV, sampling.inverse_temperature_B, greedy="some"))
    bits = 8 * dtype.itemsize
    block, warps = block_size(vocab, dtype, batch * rows)
    block = race_size(block)
    count = programs(vocab, block)
    grid = (count, rows, batch)
    has_k, has_p, has_min = top_k_B is not None, top_p_B is not None, min_p_B is not None

    def given(limit: Tensor | None) -> Tensor:
        return (
            torch.empty(1, dtype=torch.float32, device=device)
            if limit is None
            else limit.contiguous()
        )

    def new(dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, rows, dtype=dtype, device=device)

    limits = FloorLimits(given(top_k_B), given(top_p_B), given(min_p_B))
    search = FloorSearch(
        new(torch.int64), new(torch.float64), new(torch.float64), new(torch.float32),
        new(torch.float32), new(torch.float32), workspace(device, "floor rows", batch * rows),
    )  # fmt: skip
    if has_p or has_min:
        floor_top[grid](
            side, limits, slices_of(device, batch * rows, count, "floor top"), search, count,
            BLOCK=block, NPROG_P2=next_power(count), HAS_K=has_k, HAS_P=has_p, HAS_MIN=has_min,
            num_warps=warps,
        )  # fmt: skip
    if has_k:
        counts = workspace(device, "floor counts", batch * rows << COUNT_BITS)
        for shift in range(bits - COUNT_BITS, -1, -COUNT_BITS):
            floor_count[grid](
                side, limits, search, counts, count, BLOCK=block, SHIFT=shift,
                FIRST=shift == bits - COUNT_BITS, HALF=bits == 16, HAS_P=has_p, HAS_MIN=has_min,
                num_warps=warps,
            )  # fmt: skip
    if has_p:
        masses = torch.empty(batch * rows * count << MASS_BITS, dtype=torch.float32, device=device)
        for shift in range(bits - MASS_BITS, -1, -MASS_BITS):
            floor_mass[grid](
                side, limits, search, masses, count, BLOCK=block, NPROG_P2=next_power(count),
                SHIFT=shift, FIRST=shift == bits - MASS_BITS, HALF=bits == 16, HAS_K=has_k,
                HAS_MIN=has_min, num_warps=warps,
            )  # fmt: skip
    return search.out
