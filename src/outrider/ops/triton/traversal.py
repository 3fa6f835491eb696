# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Traversal verification of a tree from logits (Weng et al. 2025): leaves first.

    child x of v, the k-th draw:  w_x = min(1, m(x) / q_k(x)),  q_k = q / R
    when it was refused:  m <- (m - q_k)+ / (S + 1 - w),  w <- S / (S + 1 - w),  S = sum (m - q_k)+
    v is kept iff u_v < w; the first kept node in post-order is where the walk stops, y ~ m there

A mass is m = g (p - sum_j c_j q_j)+ (`left`), so a node is five numbers. They depend on the draft
alone, never on a test: one launch for every draw of a level, all nodes of the level and all slices
of their rows at once, then one program a request finds the stop, then the race. Nodes that cannot
be reached, and placed children, read no rows.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.ops.triton import chain, noise
from outrider.ops.triton.chain import draft_sums
from outrider.ops.triton.launch import LOOPS, block_size, next_power, programs, race_size, workspace
from outrider.ops.triton.law_slices import law, row_stats, side_of, slices_of
from outrider.ops.triton.residual_race import (
    EMPTY,
    FIXED,
    WITHOUT,
    Race,
    drawn_at,
    left_over,
    race_of,
    run_race,
)
from outrider.ops.triton.tables import keys_of, kid_of, kind_of, tables_of, token_of
from outrider.types import Draft, Draws, Scores, Verdict

_NEVER = tl.constexpr(1e-30)  # a chance below this is none


class NodePointers(NamedTuple):
    """w, g and R of every node [B, N], and c_j of its draws [B, N, K]."""

    weight: Tensor
    scale: Tensor
    rest: Tensor
    taken: Tensor
    most: int  #: K
    nodes: int  #: N


@triton.jit
def traversal_begin(state, NODES_P2: tl.constexpr):
    """The root may be kept for sure, the others not yet. Grid (batch,)."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, NODES_P2)
    inside = n < state.nodes
    at = b * state.nodes + n
    tl.store(state.weight + at, (n == 0).to(tl.float32), mask=inside)
    tl.store(state.scale + at, (n == 0).to(tl.float32), mask=inside)
    tl.store(state.rest + at, n * 0.0 + 1.0, mask=inside)


@triton.jit
def traversal_draw(
    target, drafted, tables, state, partial, ticket, start, k, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, TARGET_FLOOR: tl.constexpr,
    DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Draw k of the nodes of a level: its child's chance, and what its refusal leaves.

    Grid (slices, nodes of the level, batch).
    """
    pid = tl.program_id(0)
    node = start + tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    at = b * state.nodes + node
    own = state.taken + at * state.most
    w = tl.load(state.weight + at)
    kid = kid_of(tables, b, node, k)
    if (w > _NEVER) & (kid >= 0):
        g = tl.load(state.scale + at)
        rest = tl.load(state.rest + at)
        kind = kind_of(tables, b, node, k)
        done = pid == 0
        if kind != FIXED:
            share = g * tl.where(kind == WITHOUT, tl.maximum(rest, _NEVER), 1.0)
            tl.store(own + k, 1.0 / share)  # the same number from every slice
            tl.debug_barrier()
            offs = pid * BLOCK + tl.arange(0, BLOCK)
            left, remains = left_over(
                target, drafted, tables, own, b, node, k + 1, offs, TARGET_FLOOR, DRAFT_FLOOR,
                HAS_DRAFT,
            )  # fmt: skip
            slot = (at * NPROG + pid) * 2
            tl.store(partial + slot, tl.sum(left, axis=0))
            tl.store(partial + slot + 1, tl.sum(remains, axis=0))
            tl.debug_barrier()
            done = tl.atomic_add(ticket + at, 1, sem="acq_rel", scope="gpu") == NPROG - 1
        if done:
            tl.debug_barrier()
            tl.store(ticket + at, 0)
            token = token_of(tables, b, kid)
            here, _ = left_over(
                target, drafted, tables, own, b, node, k, token, TARGET_FLOOR, DRAFT_FLOOR,
                HAS_DRAFT,
            )  # fmt: skip
            owed = g * here
            q = drawn_at(drafted, tables, b, node, k, rest, DRAFT_FLOOR, HAS_DRAFT)
            chance = tl.minimum(owed / tl.where(q > 0, q, 1.0), 1.0)
            chance = tl.where(q > 0, chance, (owed > 0).to(tl.float32))
            # a draw that repeats an earlier one has no mass left and changes nothing
            below = b * state.nodes + kid
            chance = tl.maximum(chance, tl.load(state.weight + below))
            tl.store(state.weight + below, chance)
            tl.store(state.scale + below, chance)
            surplus = tl.maximum(w - owed, 0.0)
            if kind != FIXED:
                lanes = tl.arange(0, NPROG_P2)
                slots = partial + (at * NPROG + lanes) * 2
                sums = tl.load(slots, mask=lanes < NPROG, other=0.0, cache_modifier=".cg")
                surplus = g * tl.sum(sums, axis=0)
                if kind == WITHOUT:
                    sums = tl.load(slots + 1, mask=lanes < NPROG, other=0.0, cache_modifier=".cg")
                    tl.store(state.rest + at, tl.sum(sums, axis=0))
            bottom = surplus + (1.0 - w)
            if bottom > EMPTY:
                tl.store(state.scale + at, g / bottom)
                tl.store(state.weight + at, surplus / bottom)


@triton.jit(do_not_specialize=LOOPS)
def traversal_walk(
    tables, keys, state, ancestors, ancestor_b, hit, stop, path, count, depth,
    PART: tl.constexpr, NODES_P2: tl.constexpr, MOST_P2: tl.constexpr, DEPTH_P2: tl.constexpr,
    INJECTED: tl.constexpr,
):  # fmt: skip
    """Test every node, then go down to the first kept one in post-order. Grid (batch,)."""
    b = tl.program_id(0).to(tl.int64)
    key = noise.stream(tl.load(keys.seed + b), tl.load(keys.start + b), noise.ACCEPT)
    v = tl.arange(0, NODES_P2)
    kept_below = tl.zeros([NODES_P2], tl.int32)  # whether v or a node below it was kept
    c = tl.program_id(0) * 0
    while c < state.nodes:
        n = c + tl.arange(0, PART)
        live = n < state.nodes
        if INJECTED:
            at = keys.uniform + b * keys.uniform_b + n * state.most
            u = tl.load(at, mask=live, other=2.0)
        else:
            u = noise.uniform(key, n * state.most)
        w = tl.load(state.weight + b * state.nodes + n, mask=live, other=-1.0)
        kept = ((u < w) & (w > _NEVER)) | (n == 0)
        over = tl.load(
            ancestors + b * ancestor_b + n[:, None].to(tl.int64) * state.nodes + v[None, :],
            mask=live[:, None] & (v < state.nodes)[None, :],
            other=0,
        )
        found = (over != 0) & kept[:, None]
        kept_below = tl.maximum(kept_below, tl.max(found.to(tl.int32), axis=0))
        c += PART
    tl.store(hit + b * state.nodes + v, kept_below, mask=v < state.nodes)
    tl.debug_barrier()
    k = tl.arange(0, MOST_P2)
    node = b * 0
    n = tl.program_id(0) * 0
    going = n < depth
    while going:
        draws = tables.draws + b * tables.draw_b + node * tables.most + k
        kid = tl.load(draws, mask=k < tables.most, other=-1)
        good = tl.load(hit + b * state.nodes + tl.maximum(kid, 0)) != 0
        first = tl.min(tl.where(good & (kid >= 0), k, MOST_P2), axis=0)
        going = first < MOST_P2
        if going:
            node = tl.max(tl.where(k == first, kid, -1), axis=0)
            tl.store(path + b * depth + n, node)
            n += 1
            going = n < depth
    tl.store(stop + b, node)
    tl.store(count + b, n.to(tl.int64))
    d = tl.arange(0, DEPTH_P2)
    none = tl.full([DEPTH_P2], -1, tl.int64)
    tl.store(path + b * depth + d, none, mask=(d >= n) & (d < depth))


@triton.jit
def traversal_race(
    target, drafted, tables, keys, state, stop, race, next_token, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, TARGET_FLOOR: tl.constexpr,
    DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """The next token from what is left at the stop, all of whose draws were refused.

    Grid (slices, batch).
    """
    pid = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    node = tl.load(stop + b)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    own = state.taken + (b * state.nodes + node) * state.most
    plain = law(target, b, node, offs, TARGET_FLOOR)
    left, _ = left_over(
        target, drafted, tables, own, b, node, state.most, offs, TARGET_FLOOR, DRAFT_FLOOR,
        HAS_DRAFT,
    )  # fmt: skip
    run_race(
        keys, race, next_token, b, pid, offs, offs < target.vocab, left, plain, NPROG, BLOCK,
        NPROG_P2, INJECTED,
    )  # fmt: skip


def _state(batch: int, count: int, most: int, device: torch.device) -> NodePointers:
    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=device)

    each = (batch, count)
    return NodePointers(new(*each), new(*each), new(*each), new(*each, most), most, count)


def verify(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Path, count and next token, equal to the reference's for the same keys."""
    if draft.tree.max_depth == 0:
        return chain.verify(draft, scores, draws)
    laws = scores.laws
    batch, rows, vocab = laws.logits_BRV.shape
    device = laws.logits_BRV.device
    depth, most = draft.tree.max_depth, draft.draws_BNK.shape[2]
    target, target_floor = side_of(laws._replace(lse_BR=None))
    drafted, draft_floor = (target, False) if draft.laws is None else side_of(draft.laws, vocab)
    tables = tables_of(draft)
    keys, uniforms, race_given = keys_of(draws, draws.race_BV)
    size, warps = block_size(vocab, laws.logits_BRV.dtype, batch * rows)
    slices = programs(vocab, size)
    row_stats[slices, rows, batch](
        target, slices_of(device, batch * rows, slices, "traversal rows"), slices, BLOCK=size,
        NPROG_P2=next_power(slices), HAS_FLOOR=target_floor, num_warps=warps,
    )  # fmt: skip
    if draft.laws is not None:
        draft_sums(draft.laws, drafted, size, warps, draft_floor)
    state = _state(batch, rows, most, device)
    wide = next_power(rows)
    traversal_begin[batch,](state, NODES_P2=wide)
    flags = {
        "TARGET_FLOOR": target_floor,
        "DRAFT_FLOOR": draft_floor,
        "HAS_DRAFT": draft.laws is not None,
    }
    partial = torch.empty(batch, rows, slices, 2, dtype=torch.float32, device=device)
    ticket = workspace(device, "traversal", batch * rows)
    for start, end in pairwise(draft.tree.levels[:-1]):  # the levels that may have children
        for k in range(most):
            traversal_draw[slices, end - start, batch](
                target, drafted, tables, state, partial, ticket, start, k, slices, BLOCK=size,
                NPROG_P2=next_power(slices), num_warps=warps, **flags,
            )  # fmt: skip
    stop = torch.empty(batch, dtype=torch.int64, device=device)
    hit = torch.empty(batch, rows, dtype=torch.int32, device=device)
    path = torch.empty(batch, depth, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    next_token = torch.empty(batch, dtype=torch.int64, device=device)
    ancestors = draft.tree.ancestors_BNN.contiguous().view(torch.int8)
    traversal_walk[batch,](
        tables, keys, state, ancestors, ancestors.stride(0) if ancestors.shape[0] > 1 else 0, hit,
        stop, path, count, depth, PART=16, NODES_P2=wide, MOST_P2=next_power(most),
        DEPTH_P2=next_power(depth), INJECTED=uniforms, num_warps=4,
    )  # fmt: skip
    small = race_size(size)
    slices = programs(vocab, small)
    race: Race = race_of(device, batch, slices)
    traversal_race[slices, batch](
        target, drafted, tables, keys, state, stop, race, next_token, slices, BLOCK=small,
        NPROG_P2=next_power(slices), INJECTED=race_given, num_warps=warps, **flags,
    )  # fmt: skip
    return Verdict(path, count, next_token)
