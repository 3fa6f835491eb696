# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""The next token: a race over what the target still owes at the row where the walk stopped.

    y = argmax w / E,  w = (scale p - q)+ after a refusal, w = p after a leaf or if w has no mass

E is the reference's RESIDUAL stream, so the token equals the reference's up to rounding. On two
levels: every program races its slice, the last one of a request compares the winners in order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.ops.reference.probs import EMPTY as _EMPTY
from outrider.ops.triton import noise
from outrider.ops.triton.launch import workspace
from outrider.ops.triton.law_slices import law
from outrider.ops.triton.tables import kid_of, kind_of, row_of, token_of

EMPTY = tl.constexpr(_EMPTY)
FIXED = tl.constexpr(0)
WITHOUT = tl.constexpr(1)


class Stand(NamedTuple):
    """Where each request's walk stopped: node, whether its child was refused, and the scale."""

    node: Tensor
    refused: Tensor
    scale: Tensor


class Race(NamedTuple):
    """Per-slice winners of both races and the slice's mass."""

    mass: Tensor
    value: Tensor
    token: Tensor
    plain_value: Tensor
    plain_token: Tensor
    ticket: Tensor


@triton.jit
def drawn_from(
    drafted, tables, b, node, k, offs, HAS_DRAFT: tl.constexpr, DRAFT_FLOOR: tl.constexpr
):
    """The law that draw k came from, on a slice: the draft's row, or one-hot for a placed child."""
    token = token_of(tables, b, kid_of(tables, b, node, k))
    guess = (offs == token).to(tl.float32)
    if HAS_DRAFT:
        placed = kind_of(tables, b, node, k) == FIXED
        soft = law(drafted, b, row_of(tables, b, node, k), offs, DRAFT_FLOOR)
        guess = tl.where(placed, guess, soft)
    return guess


@triton.jit
def run_race(
    keys, race, next_token, b, pid, offs, inside, weight, plain, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """Race a slice of `weight`, and of `plain` for a weight without mass; the last one decides."""
    if INJECTED:
        noise_E = tl.load(keys.race + b * keys.race_b + offs, mask=inside, other=1.0)
    else:
        key = noise.stream(tl.load(keys.seed + b), tl.load(keys.start + b), noise.RESIDUAL)
        noise_E = noise.exponential(key, offs)
    value, at = tl.max(tl.where(inside, weight / noise_E, -1.0), axis=0, return_indices=True)
    other, there = tl.max(tl.where(inside, plain / noise_E, -1.0), axis=0, return_indices=True)
    row = b * NPROG + pid
    tl.store(race.mass + row, tl.sum(weight, axis=0))
    tl.store(race.value + row, value)
    tl.store(race.token + row, pid * BLOCK + at)
    tl.store(race.plain_value + row, other)
    tl.store(race.plain_token + row, pid * BLOCK + there)
    tl.debug_barrier()
    if tl.atomic_add(race.ticket + b, 1, sem="acq_rel", scope="gpu") == NPROG - 1:
        tl.debug_barrier()
        tl.store(race.ticket + b, 0)
        lanes = tl.arange(0, NPROG_P2)
        live = lanes < NPROG
        rows = b * NPROG + lanes
        mass = tl.sum(tl.load(race.mass + rows, mask=live, other=0.0, cache_modifier=".cg"), axis=0)
        values = tl.load(race.value + rows, mask=live, other=-2.0, cache_modifier=".cg")
        others = tl.load(race.plain_value + rows, mask=live, other=-2.0, cache_modifier=".cg")
        _, first = tl.max(values, axis=0, return_indices=True)
        _, second = tl.max(others, axis=0, return_indices=True)
        token = tl.load(race.token + b * NPROG + first, cache_modifier=".cg")
        spare = tl.load(race.plain_token + b * NPROG + second, cache_modifier=".cg")
        tl.store(next_token + b, tl.where(mass > EMPTY, token, spare).to(tl.int64))


@triton.jit
def following(
    target, drafted, tables, keys, stand, race, next_token, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, TARGET_FLOOR: tl.constexpr,
    DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """Draw the next token of every request. Grid (slices, batch)."""
    pid = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    node = tl.load(stand.node + b)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    inside = offs < target.vocab
    plain = law(target, b, node, offs, TARGET_FLOOR)
    weight = plain
    if tl.load(stand.refused + b) != 0:
        guess = drawn_from(drafted, tables, b, node, 0, offs, HAS_DRAFT, DRAFT_FLOOR)
        weight = tl.maximum(tl.load(stand.scale + b) * plain - guess, 0.0)
    run_race(
        keys, race, next_token, b, pid, offs, inside, weight, plain, NPROG, BLOCK, NPROG_P2,
        INJECTED,
    )  # fmt: skip


def race_of(device: torch.device, batch: int, programs: int) -> Race:
    """Scratch for the race of `batch` requests."""

    def new(dtype: torch.dtype) -> Tensor:
        return torch.empty(batch * programs, dtype=dtype, device=device)

    return Race(
        new(torch.float32), new(torch.float32), new(torch.int32), new(torch.float32),
        new(torch.int32), workspace(device, "race", batch),
    )  # fmt: skip


def stand_of(device: torch.device, batch: int) -> Stand:
    """Where a deciding kernel writes its stop."""
    return Stand(
        torch.empty(batch, dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.ones(batch, dtype=torch.float32, device=device),
    )


# What the target still owes at a node after its first draws were refused, slice by slice.
#
#     left(x) = (p(x) - sum_j c_j q_j(x))+,  0 at the tokens of the refused draws
#     rest(x) = q(x) of the draws without replacement, 0 at those of them that were refused
#
# Taking positive parts once, at the end, is the same as after every draw, because only what is not
# negative is taken away. So a refused draw is one number c_j, and no residual row is stored. The
# sum of `rest` is the mass that the next draw without replacement came from; summed over the tokens
# that are left it keeps its precision where 1 - sum of the gone would lose it.


@triton.jit
def left_over(
    target, drafted, tables, taken, b, node, refused, offs,
    TARGET_FLOOR: tl.constexpr, DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """(left, rest) at the tokens `offs`; `taken` points to the c_j of this node."""
    left = law(target, b, node, offs, TARGET_FLOOR)
    rest = left * 0.0
    if HAS_DRAFT:  # neighbours that share a law row are taken away together
        row = b * 0 - 1
        share = 0.0
        j = refused * 0
        while j < refused:
            drawn = kind_of(tables, b, node, j) != FIXED
            if drawn & (kid_of(tables, b, node, j) >= 0):
                other = row_of(tables, b, node, j)
                if (other != row) & (row >= 0):
                    left -= share * law(drafted, b, row, offs, DRAFT_FLOOR)
                    share = 0.0
                share += tl.load(taken + j)
                row = other
            j += 1
        if row >= 0:
            last = law(drafted, b, row, offs, DRAFT_FLOOR)
            left = tl.maximum(left - share * last, 0.0)
            rest += last
    j = refused * 0
    while j < refused:
        kid = kid_of(tables, b, node, j)
        gone = (kid >= 0) & (offs == token_of(tables, b, kid))
        left = tl.where(gone, 0.0, left)
        rest = tl.where(gone & (kind_of(tables, b, node, j) == WITHOUT), 0.0, rest)
        j += 1
    return left, rest


@triton.jit
def drawn_at(drafted, tables, b, node, k, rest, DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr):
    """The probability with which draw k gave its token, when `rest` of its law was left."""
    q = 1.0
    if HAS_DRAFT:
        kind = kind_of(tables, b, node, k)
        if kind != FIXED:
            token = token_of(tables, b, kid_of(tables, b, node, k))
            q = law(drafted, b, row_of(tables, b, node, k), token, DRAFT_FLOOR)
            q = tl.where(kind == WITHOUT, q / tl.maximum(rest, 1e-30), q)
    return q
