# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Laws in device memory: how a kernel reads a slice, and their log-sum-exp in one pass.

    lse = log sum exp(z / T) over z >= floor;  best = argmax z (lowest id on a tie), of greedy rows

Every program reduces one slice of one row; the last one to finish a row combines the slices in a
fixed order and re-arms its ticket, so that results are deterministic and a graph can be replayed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.ops.triton.launch import workspace
from outrider.types import Laws


class Side(NamedTuple):
    """One model's laws: pointers and strides. `floor`, `lse` and `best` are [B, R]."""

    z: Tensor
    stride_b: int
    stride_r: int
    inverse: Tensor
    floor: Tensor
    lse: Tensor
    best: Tensor
    rows: int
    vocab: int


class Slices(NamedTuple):
    """Per-slice results of every row, and the rows' tickets."""

    top: Tensor
    sum: Tensor
    best: Tensor
    ticket: Tensor


@triton.jit
def scaled(side, b, r, offs, HAS_FLOOR: tl.constexpr):
    """Filtered logits times inverse temperature; greedy rows keep temperature 1."""
    z = tl.load(
        side.z + b * side.stride_b + r * side.stride_r + offs,
        mask=offs < side.vocab,
        other=float("-inf"),
    ).to(tl.float32)
    if HAS_FLOOR:
        z = tl.where(z >= tl.load(side.floor + b * side.rows + r), z, float("-inf"))
    inverse = tl.load(side.inverse + b)
    return z * tl.where(inverse == float("inf"), 1.0, inverse)


@triton.jit
def law(side, b, r, offs, HAS_FLOOR: tl.constexpr):
    """Probabilities of the tokens `offs`; 0 beyond this model's vocabulary."""
    z = scaled(side, b, r, offs, HAS_FLOOR)
    lse = tl.load(side.lse + b * side.rows + r, cache_modifier=".cg")
    best = tl.load(side.best + b * side.rows + r, cache_modifier=".cg")
    hot = tl.load(side.inverse + b) == float("inf")
    soft = tl.where(z == float("-inf"), 0.0, tl.exp(z - lse))
    return tl.where(hot, (offs == best).to(tl.float32), soft)


@triton.jit
def row_done(
    side, slices, pid, b, r, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, HAS_FLOOR: tl.constexpr,
    BEST: tl.constexpr = False,
):  # fmt: skip
    """Reduce one slice; whether this finished the row, whose lse and best are then stored.

    Greedy rows have a best, others if `BEST`: carrying an index along is a good part of the work.
    """
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    z = scaled(side, b, r, offs, HAS_FLOOR)
    wanted = (tl.load(side.inverse + b) == float("inf")) | BEST
    top = tl.max(z, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    row = b * side.rows + r
    tl.store(slices.top + row * NPROG + pid, top)
    tl.store(slices.sum + row * NPROG + pid, tl.sum(tl.exp(z - base), axis=0))
    if wanted:
        _, at = tl.max(z, axis=0, return_indices=True)
        tl.store(slices.best + row * NPROG + pid, pid * BLOCK + at)
    tl.debug_barrier()
    done = tl.atomic_add(slices.ticket + row, 1, sem="acq_rel", scope="gpu") == NPROG - 1
    if done:
        tl.debug_barrier()
        tl.store(slices.ticket + row, 0)
        lanes = tl.arange(0, NPROG_P2)
        live = lanes < NPROG
        tops = tl.load(
            slices.top + row * NPROG + lanes, mask=live, other=float("-inf"), cache_modifier=".cg"
        )
        sums = tl.load(slices.sum + row * NPROG + lanes, mask=live, other=0.0, cache_modifier=".cg")
        peak, first = tl.max(tops, axis=0, return_indices=True)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.sum(sums * tl.exp(tops - safe), axis=0)
        tl.store(side.lse + row, safe + tl.log(mass))
        if wanted:
            winner = tl.load(slices.best + row * NPROG + first, cache_modifier=".cg")
            tl.store(side.best + row, winner)
    return done


@triton.jit
def row_stats(
    side, slices, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, HAS_FLOOR: tl.constexpr,
):  # fmt: skip
    """lse of every row, and best of greedy ones. Grid (slices, rows, batch)."""
    r = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row_done(side, slices, tl.program_id(0), b, r, NPROG, BLOCK, NPROG_P2, HAS_FLOOR)


def side_of(laws: Laws, vocab: int | None = None) -> tuple[Side, bool]:
    """Pointers for a kernel, and whether the laws have floors. Logits are read in place."""
    logits = laws.logits_BRV
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    batch, rows, width = logits.shape
    device = logits.device
    floor = laws.floor_BR
    lse = laws.lse_BR
    known = lse is not None and laws.greedy == "none"
    side = Side(
        logits,
        logits.stride(0),
        logits.stride(1),
        laws.inverse_temperature_B.to(torch.float32).contiguous(),
        torch.empty(1, dtype=torch.float32, device=device)
        if floor is None
        else floor.to(torch.float32).contiguous(),
        lse.to(torch.float32).contiguous()
        if known and lse is not None
        else torch.empty(batch, rows, dtype=torch.float32, device=device),
        torch.empty(batch, rows, dtype=torch.int32, device=device),  # read by greedy rows alone
        rows,
        width if vocab is None else min(width, vocab),
    )
    return side, floor is not None


def slices_of(device: torch.device, rows: int, programs: int, name: str) -> Slices:
    """Scratch for the slices of `rows` rows; tickets come zeroed and are left zeroed."""

    def new(dtype: torch.dtype) -> Tensor:
        return torch.empty(rows * programs, dtype=dtype, device=device)

    return Slices(
        new(torch.float32), new(torch.float32), new(torch.int32), workspace(device, name, rows)
    )
