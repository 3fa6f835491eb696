# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Block verification of a chain from logits (Sun et al., ICLR 2025).

    r_0 = 1,  r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i))
    S_i = sum (r_i p_{i+1} - q_{i+1})+,  h_i = S_i / (S_i + 1 - r_i),  h_gamma = r_gamma
    tau = the largest i with u_i < h_i;  y ~ norm((r_tau p_{tau+1} - q_{tau+1})+), or p after gamma

Three kernels: statistics with the scan of r, the sums S of every position, the race at tau.

The bounds of loops are not specialised (`launch.LOOPS`).
"""

import torch
import triton
import triton.language as tl

from outrider.ops.triton import noise
from outrider.ops.triton.chain import draft_sums
from outrider.ops.triton.launch import LOOPS, block_size, next_power, programs, race_size, workspace
from outrider.ops.triton.law_slices import law, row_done, side_of, slices_of
from outrider.ops.triton.residual_race import drawn_from, following, race_of, stand_of
from outrider.ops.triton.tables import keys_of, kid_of, tables_of, token_of
from outrider.types import Draft, Draws, Scores, Verdict


@triton.jit(do_not_specialize=LOOPS)
def block_reach(
    target, drafted, tables, slices, ticket, reach, depth, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, TARGET_FLOOR: tl.constexpr,
    DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Statistics of the target's rows, then r_0..r_depth (0 past the drafted ones)."""
    r = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    done = row_done(target, slices, tl.program_id(0), b, r, NPROG, BLOCK, NPROG_P2, TARGET_FLOOR)
    if done:
        tl.debug_barrier()
        if tl.atomic_add(ticket + b, 1, sem="acq_rel", scope="gpu") == target.rows - 1:
            tl.debug_barrier()
            tl.store(ticket + b, 0)
            here = 1.0
            tl.store(reach + b * (depth + 1), here)
            i = b * 0
            while i < depth:
                kid = kid_of(tables, b, i, 0)
                token = token_of(tables, b, kid)
                owed = law(target, b, i, token, TARGET_FLOOR)
                drawn = drawn_from(drafted, tables, b, i, 0, token, HAS_DRAFT, DRAFT_FLOOR)
                ratio = owed / tl.where(drawn > 0, drawn, 1.0)
                ratio = tl.where(drawn > 0, ratio, (owed > 0).to(tl.float32))
                here = tl.where(kid >= 0, tl.minimum(here * ratio, 1.0), 0.0)
                i += 1
                tl.store(reach + b * (depth + 1) + i, here)


@triton.jit(do_not_specialize=LOOPS)
def block_sums(
    target, drafted, tables, keys, reach, partial, ticket, stand, path, count, depth, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, DEPTH_P2: tl.constexpr,
    TARGET_FLOOR: tl.constexpr, DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr,
    INJECTED: tl.constexpr,
):  # fmt: skip
    """S_1..S_{depth-1} slice by slice, then tau. Grid (slices, batch)."""
    pid = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    i = b * 0 + 1
    while i < depth:
        here = tl.load(reach + b * (depth + 1) + i)
        excess = 0.0
        if (here > 0) & (kid_of(tables, b, i, 0) >= 0):
            plain = law(target, b, i, offs, TARGET_FLOOR)
            guess = drawn_from(drafted, tables, b, i, 0, offs, HAS_DRAFT, DRAFT_FLOOR)
            excess = tl.sum(tl.maximum(here * plain - guess, 0.0), axis=0)
        tl.store(partial + (b * depth + i) * NPROG + pid, excess)
        i += 1
    tl.debug_barrier()
    if tl.atomic_add(ticket + b, 1, sem="acq_rel", scope="gpu") == NPROG - 1:
        tl.debug_barrier()
        tl.store(ticket + b, 0)
        lanes = tl.arange(0, NPROG_P2)
        key = noise.stream(tl.load(keys.seed + b), tl.load(keys.start + b), noise.ACCEPT)
        length = b * 0  # how many tokens were drafted
        tau = b * 0
        i = b * 0
        while i < depth:
            drafted_here = (kid_of(tables, b, i, 0) >= 0) & (length == i)
            length = tl.where(drafted_here, i + 1, length)
            i += 1
        i = b * 0 + 1
        while i <= length:
            here = tl.load(reach + b * (depth + 1) + i)
            keep = here
            if i < length:
                parts = tl.load(
                    partial + (b * depth + i) * NPROG + lanes,
                    mask=lanes < NPROG,
                    other=0.0,
                    cache_modifier=".cg",
                )
                excess = tl.sum(parts, axis=0)
                bottom = excess + 1.0 - here
                keep = tl.where(bottom > 0, excess / tl.where(bottom > 0, bottom, 1.0), 1.0)
            at = (i - 1) * tables.most
            if INJECTED:
                u = tl.load(keys.uniform + b * keys.uniform_b + at)
            else:
                u = noise.uniform(key, at)
            tau = tl.where(u < keep, i, tau)
            i += 1
        tl.store(count + b, tau)
        tl.store(stand.node + b, tau)
        tl.store(stand.refused + b, (tau < length).to(tl.int32))
        tl.store(stand.scale + b, tl.load(reach + b * (depth + 1) + tau))
        j = tl.arange(0, DEPTH_P2).to(tl.int64)
        kid = kid_of(tables, b, tl.where(j < depth, j, 0), 0)
        tl.store(path + b * depth + j, tl.where(j < tau, kid, -1), mask=j < depth)


def verify(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Path, count and next token, equal to the reference's for the same keys."""
    laws = scores.laws
    batch, rows, vocab = laws.logits_BRV.shape
    device = laws.logits_BRV.device
    depth = draft.tree.max_depth
    target, target_floor = side_of(laws)
    drafted, draft_floor = (target, False) if draft.laws is None else side_of(draft.laws, vocab)
    tables = tables_of(draft)
    keys, uniforms, race = keys_of(draws, draws.race_BV)
    size, warps = block_size(vocab, laws.logits_BRV.dtype, batch * rows)
    slices = programs(vocab, size)
    wide = next_power(slices)
    if draft.laws is not None:
        draft_sums(draft.laws, drafted, size, warps, draft_floor)
    reach = torch.empty(batch, depth + 1, dtype=torch.float32, device=device)
    partial = torch.empty(batch, max(depth, 1), slices, dtype=torch.float32, device=device)
    path = torch.empty(batch, depth, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    next_token = torch.empty(batch, dtype=torch.int64, device=device)
    stand = stand_of(device, batch)
    flags = {
        "TARGET_FLOOR": target_floor,
        "DRAFT_FLOOR": draft_floor,
        "HAS_DRAFT": draft.laws is not None,
    }
    block_reach[slices, rows, batch](
        target, drafted, tables, slices_of(device, batch * rows, slices, "block rows"),
        workspace(device, "block reach", batch), reach, depth, slices, BLOCK=size, NPROG_P2=wide,
        num_warps=warps, **flags,
    )  # fmt: skip
    block_sums[slices, batch](
        target, drafted, tables, keys, reach, partial, workspace(device, "block sums", batch),
        stand, path, count, depth, slices, BLOCK=size, NPROG_P2=wide,
        DEPTH_P2=next_power(max(depth, 1)), INJECTED=uniforms, num_warps=warps, **flags,
    )  # fmt: skip
    small = race_size(size)
    slices = programs(vocab, small)
    following[slices, batch](
        target, drafted, tables, keys, stand, race_of(device, batch, slices), next_token, slices,
        BLOCK=small, NPROG_P2=next_power(slices), INJECTED=race, num_warps=warps, **flags,
    )  # fmt: skip
    return Verdict(path, count, next_token)
