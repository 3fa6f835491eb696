# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Draft-step sampler: one token per law by an exponential race, and its log-sum-exp, in one launch.

    x = argmax(z / T - log E),  lse = log sum exp(z / T)

The log-sum-exp is kept with the logits, where the draft's head wrote them: verification then reads
single entries of the draft's rows instead of all of them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.ops.reference import draws as reference
from outrider.ops.triton import noise
from outrider.ops.triton.launch import block_size, next_power, programs, race_size
from outrider.ops.triton.law_slices import row_done, scaled, side_of, slices_of
from outrider.types import Laws


@triton.jit
def sample_rows(
    side, slices, keys, value, index, token, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, HAS_FLOOR: tl.constexpr,
):  # fmt: skip
    """One token and one log-sum-exp per row. Grid (slices, rows, batch)."""
    pid = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = b * side.rows + r
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    z = scaled(side, b, r, offs, HAS_FLOOR)
    hot = tl.load(side.inverse + b) == float("inf")
    merit = z - tl.where(hot, 0.0, tl.log(noise.exponential(tl.load(keys + row), offs)))
    best, at = tl.max(merit, axis=0, return_indices=True)
    tl.store(value + row * NPROG + pid, best)
    tl.store(index + row * NPROG + pid, pid * BLOCK + at)
    done = row_done(side, slices, pid, b, r, NPROG, BLOCK, NPROG_P2, HAS_FLOOR)
    if done:
        lanes = tl.arange(0, NPROG_P2)
        values = tl.load(
            value + row * NPROG + lanes,
            mask=lanes < NPROG,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        _, first = tl.max(values, axis=0, return_indices=True)
        winner = tl.load(index + row * NPROG + first, cache_modifier=".cg")
        tl.store(token + row, winner.to(tl.int64))
        if hot:
            tl.store(side.lse + row, 0.0)


def several(
    laws: Laws, keys_BR: Tensor, count: int, placed: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None, Laws]:
    """The reference's draws; a single one of each law takes one launch."""
    if count > 1 or any(placed):
        return reference.several(laws, keys_BR, count, placed)
    tokens, drawn = sample(laws, keys_BR)
    tokens_BR1 = tokens[..., None]
    return tokens_BR1, laws.logits_BRV.gather(-1, tokens_BR1) > -torch.inf, drawn


def sample(laws: Laws, keys_BR: Tensor) -> tuple[Tensor, Laws]:
    """Tokens [B, R] and the laws with their log-sum-exps, the reference's for the same keys."""
    batch, rows, vocab = laws.logits_BRV.shape
    device = laws.logits_BRV.device
    side, floor = side_of(laws._replace(lse_BR=None))
    block, warps = block_size(vocab, laws.logits_BRV.dtype, batch * rows)
    block = race_size(block)
    count = programs(vocab, block)
    value = torch.empty(batch * rows * count, dtype=torch.float32, device=device)
    index = torch.empty(batch * rows * count, dtype=torch.int32, device=device)
    token = torch.empty(batch, rows, dtype=torch.int64, device=device)
    sample_rows[count, rows, batch](
        side, slices_of(device, batch * rows, count, "sample rows"), keys_BR.contiguous(), value,
        index, token, count, BLOCK=block,
        NPROG_P2=next_power(count), HAS_FLOOR=floor, num_warps=warps,
    )  # fmt: skip
    return token, laws._replace(lse_BR=side.lse)
