# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Kernels of the baselines.

paper_tile    tau(x) = min(1, p/q), a(x) = max(0, p - q), b = sum a, for every x of every drafted
              row (Wagner et al. 2024, section 3.2); p and q probabilities, or sigmoids of logits
sigmoid_one   accept and next token of the sigmoid variant in one launch over our skeleton
"""

import triton
import triton.language as tl

from outrider.ops.triton import noise
from outrider.ops.triton.side import scaled
from outrider.ops.triton.tables import kid_of, row_of, token_of


@triton.jit
def squash(z, alpha, beta):
    """sigmoid((z - alpha) / (beta - alpha)); 0 below alpha, 1 above beta."""
    s = 1.0 / (1.0 + tl.exp(-(z - alpha) / (beta - alpha)))
    return tl.where(z < alpha, 0.0, tl.where(z > beta, 1.0, s))


@triton.jit
def paper_tile(
    zp, zq, ratio, rest, mass, vocab, alpha, beta, TILE: tl.constexpr, SIGMOID: tl.constexpr
):
    """One program per drafted token walks the vocabulary tile by tile. Grid (gamma, batch)."""
    i = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    gamma = tl.num_programs(0)
    p_row = (b * (gamma + 1) + i) * vocab
    q_row = (b * gamma + i) * vocab
    total = 0.0
    c = tl.program_id(0) * 0
    while c < vocab:
        offs = c + tl.arange(0, TILE)
        inside = offs < vocab
        p = tl.load(zp + p_row + offs, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(zq + q_row + offs, mask=inside, other=0.0).to(tl.float32)
        if SIGMOID:
            p = tl.where(inside, squash(p, alpha, beta), 0.0)
            q = tl.where(inside, squash(q, alpha, beta), 0.0)
        tau = tl.where(q > 0, tl.minimum(p / tl.where(q > 0, q, 1.0), 1.0), 0.0)
        a = tl.maximum(p - q, 0.0)
        tl.store(ratio + q_row + offs, tau, mask=inside)
        tl.store(rest + q_row + offs, a, mask=inside)
        total += tl.sum(a, axis=0)
        c += TILE
    tl.store(mass + b * gamma + i, total)


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
