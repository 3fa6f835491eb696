# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Token-level verification of a chain from logits (Leviathan et al. 2023, algorithm 1).

    accept x_i iff u_i q_i(x_i) < p_i(x_i)
    at the first refusal y ~ norm((p_i - q_i)+), after the last acceptance y ~ p

Two kernels when the draft's log-sum-exps were kept, three if not. The first makes the only full
pass over the target's rows; its last program tests all drafted tokens at once, since a test
needs two scalars of each law. The second races over the one row where the walk stopped.
"""

import torch
import triton
import triton.language as tl

from outrider.ops.triton import noise
from outrider.ops.triton.launch import LOOPS, block_size, next_power, programs, race_size, workspace
from outrider.ops.triton.law_slices import law, row_done, row_stats, side_of, slices_of
from outrider.ops.triton.residual_race import FIXED, following, race_of, stand_of
from outrider.ops.triton.tables import keys_of, kid_of, kind_of, row_of, tables_of, token_of
from outrider.types import Draft, Draws, Scores, Verdict


@triton.jit(do_not_specialize=LOOPS)
def chain_decide(
    target, drafted, tables, keys, slices, ticket, stand, path, count, depth, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, DEPTH_P2: tl.constexpr,
    TARGET_FLOOR: tl.constexpr, DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr,
    INJECTED: tl.constexpr,
):  # fmt: skip
    """Log-sum-exps of all target rows, then the accept tests. Grid (slices, rows, batch)."""
    r = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    done = row_done(target, slices, tl.program_id(0), b, r, NPROG, BLOCK, NPROG_P2, TARGET_FLOOR)
    if done:
        tl.debug_barrier()
        if tl.atomic_add(ticket + b, 1, sem="acq_rel", scope="gpu") == target.rows - 1:
            tl.debug_barrier()
            tl.store(ticket + b, 0)
            i = tl.arange(0, DEPTH_P2).to(tl.int64)
            there = i < depth
            at = tl.where(there, i, 0)
            kid = tl.where(there, kid_of(tables, b, at, 0), -1)
            token = token_of(tables, b, kid)
            owed = law(target, b, at, token, TARGET_FLOOR)
            drawn = tl.full([DEPTH_P2], 1.0, tl.float32)
            if HAS_DRAFT:
                soft = law(drafted, b, row_of(tables, b, at, 0), token, DRAFT_FLOOR)
                drawn = tl.where(kind_of(tables, b, at, 0) == FIXED, drawn, soft)
            if INJECTED:
                u = tl.load(keys.uniform + b * keys.uniform_b + at * tables.most)
            else:
                key = noise.stream(tl.load(keys.seed + b), tl.load(keys.start + b), noise.ACCEPT)
                u = noise.uniform(key, at * tables.most)
            accept = (u * drawn < owed) & (kid >= 0)
            n = tl.min(tl.where(there & (accept == 0), i, depth), axis=0)
            tl.store(path + b * depth + i, tl.where(i < n, kid, -1), mask=there)
            tl.store(count + b, n)
            tl.store(stand.node + b, n)
            tl.store(stand.refused + b, tl.max(((i == n) & (kid >= 0)).to(tl.int32), axis=0))


def verify(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Path, count and next token, equal to the reference's for the same keys."""
    laws = scores.laws
    batch, rows, vocab = laws.logits_BRV.shape
    device = laws.logits_BRV.device
    depth = draft.tree.max_depth
    target, target_floor = side_of(laws)
    has_draft = draft.laws is not None
    drafted, draft_floor = (target, False) if draft.laws is None else side_of(draft.laws, vocab)
    tables = tables_of(draft)
    keys, uniform, race_given = keys_of(draws, draws.race_BV)
    block, warps = block_size(vocab, laws.logits_BRV.dtype, batch * rows)
    count_p = programs(vocab, block)
    if draft.laws is not None:
        draft_sums(draft.laws, drafted, block, warps, draft_floor)
    path = torch.empty(batch, depth, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    following_B = torch.empty(batch, dtype=torch.int64, device=device)
    stand = stand_of(device, batch)
    chain_decide[count_p, rows, batch](
        target, drafted, tables, keys, slices_of(device, batch * rows, count_p, "chain rows"),
        workspace(device, "chain", batch), stand, path, count, depth, count_p,
        BLOCK=block, NPROG_P2=next_power(count_p), DEPTH_P2=next_power(max(depth, 1)),
        TARGET_FLOOR=target_floor, DRAFT_FLOOR=draft_floor, HAS_DRAFT=has_draft,
        INJECTED=uniform, num_warps=warps,
    )  # fmt: skip
    size = race_size(block)
    slices = programs(vocab, size)
    following[slices, batch](
        target, drafted, tables, keys, stand, race_of(device, batch, slices), following_B,
        slices, BLOCK=size, NPROG_P2=next_power(slices), TARGET_FLOOR=target_floor,
        DRAFT_FLOOR=draft_floor, HAS_DRAFT=has_draft, INJECTED=race_given, num_warps=warps,
    )  # fmt: skip
    return Verdict(path, count, following_B)


def draft_sums(laws, side, block, warps, floor) -> None:
    """Log-sum-exps of the draft's rows, unless its sampler kept them."""
    if laws.lse_BR is not None and laws.greedy == "none":
        return
    batch, rows, _ = laws.logits_BRV.shape
    count = programs(side.vocab, block)
    row_stats[count, rows, batch](
        side, slices_of(laws.logits_BRV.device, batch * rows, count, "draft rows"), count,
        BLOCK=block, NPROG_P2=next_power(count), HAS_FLOOR=floor, num_warps=warps,
    )  # fmt: skip
