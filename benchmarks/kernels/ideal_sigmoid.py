# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""The sigmoid approximation on our own skeleton: what it would cost if it were written well.

It needs no log-sum-exp, so the accept tests read two entries a token and the residual two rows a
request, in one launch. Lossy: with the paper's alpha and beta nearly every draft is accepted.
"""

import torch
import triton
import triton.language as tl

from outrider.ops.triton import noise
from outrider.ops.triton.launch import block_size, next_power, programs, race_size
from outrider.ops.triton.law_slices import scaled, side_of
from outrider.ops.triton.residual_race import race_of
from outrider.ops.triton.tables import keys_of, kid_of, row_of, tables_of, token_of
from outrider.types import Draft, Draws, Scores, Verdict
from outrider_lab.baselines.kernels import squash

EXACT = False


@triton.jit
def sigmoid_one(
    target, drafted, tables, keys, race, path, count, next_token, alpha, beta, depth, NPROG,
    BLOCK: tl.constexpr, NPROG_P2: tl.constexpr, DEPTH_P2: tl.constexpr,
    TARGET_FLOOR: tl.constexpr, DRAFT_FLOOR: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """Accept tests from two gathers a token, then a race over one row. Grid (slices, batch)."""
    pid = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, DEPTH_P2).to(tl.int64)
    there = i < depth
    at = tl.where(there, i, 0)
    kid = tl.where(there, kid_of(tables, b, at, 0), -1)
    token = token_of(tables, b, kid)
    owed = squash(scaled(target, b, at, token, TARGET_FLOOR), alpha, beta)
    row = row_of(tables, b, at, 0)
    drawn = squash(scaled(drafted, b, row, token, DRAFT_FLOOR), alpha, beta)
    if INJECTED:
        u = tl.load(keys.uniform + b * keys.uniform_b + at * tables.most)
    else:
        key = noise.stream(tl.load(keys.seed + b), tl.load(keys.start + b), noise.ACCEPT)
        u = noise.uniform(key, at * tables.most)
    accept = (u * drawn < owed) & (kid >= 0)
    n = tl.min(tl.where(there & (accept == 0), i, depth), axis=0)
    refused = tl.max(((i == n) & (kid >= 0)).to(tl.int32), axis=0) != 0

    offs = pid * BLOCK + tl.arange(0, BLOCK)
    inside = offs < target.vocab
    stream = noise.stream(tl.load(keys.seed + b), tl.load(keys.start + b), noise.RESIDUAL)
    noise_E = noise.exponential(stream, offs)
    z = scaled(target, b, n, offs, TARGET_FLOOR)
    merit = z - tl.log(noise_E)  # the bonus token comes from the exact law
    mass = 1.0
    if refused:
        left = squash(z, alpha, beta)
        there_row = row_of(tables, b, n, 0)
        left -= squash(scaled(drafted, b, there_row, offs, DRAFT_FLOOR), alpha, beta)
        left = tl.where(inside, tl.maximum(left, 0.0), 0.0)
        merit = left / noise_E
        mass = tl.sum(left, axis=0)
    value, best = tl.max(tl.where(inside, merit, float("-inf")), axis=0, return_indices=True)
    slot = b * NPROG + pid
    tl.store(race.value + slot, value)
    tl.store(race.token + slot, pid * BLOCK + best)
    tl.store(race.mass + slot, mass)
    tl.debug_barrier()
    if tl.atomic_add(race.ticket + b, 1, sem="acq_rel", scope="gpu") == NPROG - 1:
        tl.debug_barrier()
        tl.store(race.ticket + b, 0)
        lanes = tl.arange(0, NPROG_P2)
        values = tl.load(
            race.value + b * NPROG + lanes,
            mask=lanes < NPROG,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        _, first = tl.max(values, axis=0, return_indices=True)
        winner = tl.load(race.token + b * NPROG + first, cache_modifier=".cg")
        tl.store(next_token + b, winner.to(tl.int64))
        tl.store(count + b, n)
        tl.store(path + b * depth + i, tl.where(i < n, kid, -1), mask=there)


def ideal_sigmoid(
    draft: Draft, scores: Scores, draws: Draws, *, alpha: float = -1e4, beta: float = 1e4
) -> Verdict:
    """Path, count and next token under the sigmoid rule; a chain of drawn children only."""
    laws = scores.laws
    assert draft.laws is not None
    assert draft.tree.is_chain
    batch, _, vocab = laws.logits_BRV.shape
    device = laws.logits_BRV.device
    depth = draft.tree.max_depth
    target, target_floor = side_of(laws)
    drafted, draft_floor = side_of(draft.laws, vocab)
    keys, uniforms, _ = keys_of(draws)
    block, warps = block_size(vocab, laws.logits_BRV.dtype, batch)
    block = race_size(block)
    slices = programs(vocab, block)
    path = torch.empty(batch, depth, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    next_token = torch.empty(batch, dtype=torch.int64, device=device)
    sigmoid_one[slices, batch](
        target, drafted, tables_of(draft), keys, race_of(device, batch, slices), path, count,
        next_token, alpha, beta, depth, slices, BLOCK=block, NPROG_P2=next_power(slices),
        DEPTH_P2=next_power(max(depth, 1)), TARGET_FLOOR=target_floor, DRAFT_FLOOR=draft_floor,
        INJECTED=uniforms, num_warps=warps,
    )  # fmt: skip
    return Verdict(path, count, next_token)
