# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Chain verification in one launch and one pass over the target (two launches without kept sums).

The pass leaves a sum of exponentials for each sub-block. The last program of a request tests all
drafted tokens at once and then draws the next one without reading the row again:

    propose x ~ p by inverse transform (slice, sub-block, element), keep it with probability
    max(0, 1 - q(x)/p(x)), else propose again:  the kept x has density (p - q)+ exactly

NTRY proposals run as tile rows. A row rejected with total variation t fails all N tries in a share
t (1 - t)^N of cases, at most 1/(e N); then the program races over the whole residual.

Path and count equal the reference's; the next token is another draw from the same law. The engine
runs the two kernels of `outrider.ops.triton.chain`, which `contestants.py` compares with this one.
"""

import torch
import triton
import triton.language as tl

from outrider.ops.triton import noise
from outrider.ops.triton.chain import draft_sums
from outrider.ops.triton.launch import LOOPS, block_size, next_power, programs, workspace
from outrider.ops.triton.law_slices import law, scaled, side_of, slices_of
from outrider.ops.triton.residual_race import EMPTY, FIXED, drawn_from
from outrider.ops.triton.tables import keys_of, kid_of, kind_of, row_of, tables_of, token_of
from outrider.types import Draft, Draws, Scores, Verdict

TRIES, ROUNDS = 16, 4


def one_shape(vocab: int, dtype: torch.dtype, rows: int) -> tuple[int, int, int]:
    """Sub-blocks of a slice, elements of a sub-block and warps of the one-launch kernel."""
    size, warps = block_size(vocab, dtype, rows)
    part = min(256 if size >= 8192 else 128, max(size // 4, 1))
    return size // part, part, warps


@triton.jit
def fine(key, index):
    """53-bit uniform in [0, 1), float64: word `index` of a stream."""
    bits = (noise.word(key, index) >> 11) & 0x1FFFFFFFFFFFFF
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=LOOPS)
def chain_one(
    target, drafted, tables, keys, slices, sub, ticket, path, count, next_token, tries, depth,
    NPROG, NB: tl.constexpr, SUB: tl.constexpr, NTRY: tl.constexpr, NROUND: tl.constexpr,
    NPROG_P2: tl.constexpr, DEPTH_P2: tl.constexpr, TARGET_FLOOR: tl.constexpr,
    DRAFT_FLOOR: tl.constexpr, HAS_DRAFT: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """Grid (slices, rows, batch)."""
    pid = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    BLOCK: tl.constexpr = NB * SUB
    CHUNK: tl.constexpr = min(NB * SUB, 1024)
    offs = pid * BLOCK + tl.arange(0, NB)[:, None] * SUB + tl.arange(0, SUB)[None, :]
    z = scaled(target, b, r, offs, TARGET_FLOOR)
    top = tl.max(tl.max(z, axis=1), axis=0)
    lanes_b = tl.arange(0, NB)
    greedy = tl.load(target.inverse + b) == float("inf")
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.sum(tl.exp(z - base), axis=1)
    row = b * target.rows + r
    tl.store(sub + (row * NPROG + pid) * NB + lanes_b, sums)
    tl.store(slices.top + row * NPROG + pid, top)
    tl.store(slices.sum + row * NPROG + pid, tl.sum(sums, axis=0))
    if greedy:
        tops, ats = tl.max(z, axis=1, return_indices=True)
        _, at = tl.max(tops, axis=0, return_indices=True)
        best = tl.sum(tl.where(lanes_b == at, lanes_b * SUB + ats, 0), axis=0)
        tl.store(slices.best + row * NPROG + pid, pid * BLOCK + best)
    tl.debug_barrier()
    # a ticket for the row, then one for the request: no counter takes many arrivals
    done = tl.atomic_add(slices.ticket + row, 1, sem="acq_rel", scope="gpu") == NPROG - 1
    lanes = tl.arange(0, NPROG_P2)
    live = lanes < NPROG
    if done:
        tl.debug_barrier()
        tl.store(slices.ticket + row, 0)
        row_tops = tl.load(
            slices.top + row * NPROG + lanes, mask=live, other=float("-inf"), cache_modifier=".cg"
        )
        row_sums = tl.load(
            slices.sum + row * NPROG + lanes, mask=live, other=0.0, cache_modifier=".cg"
        )
        peak, first = tl.max(row_tops, axis=0, return_indices=True)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(
            target.lse + row, safe + tl.log(tl.sum(row_sums * tl.exp(row_tops - safe), axis=0))
        )
        if greedy:
            winner = tl.load(slices.best + row * NPROG + first, cache_modifier=".cg")
            tl.store(target.best + row, winner)
        tl.debug_barrier()
        if tl.atomic_add(ticket + b, 1, sem="acq_rel", scope="gpu") == target.rows - 1:
            tl.debug_barrier()
            tl.store(ticket + b, 0)
            i = tl.arange(0, DEPTH_P2).to(tl.int64)
            there = i < depth
            node = tl.where(there, i, 0)
            kid = tl.where(there, kid_of(tables, b, node, 0), -1)
            token = token_of(tables, b, kid)
            owed = law(target, b, node, token, TARGET_FLOOR)
            drawn = tl.full([DEPTH_P2], 1.0, tl.float32)
            if HAS_DRAFT:
                soft = law(drafted, b, row_of(tables, b, node, 0), token, DRAFT_FLOOR)
                drawn = tl.where(kind_of(tables, b, node, 0) == FIXED, drawn, soft)
            seed = tl.load(keys.seed + b)
            start = tl.load(keys.start + b)
            if INJECTED:
                u = tl.load(keys.uniform + b * keys.uniform_b + node * tables.most)
            else:
                u = noise.uniform(noise.stream(seed, start, noise.ACCEPT), node * tables.most)
            accept = (u * drawn < owed) & (kid >= 0)
            n = tl.min(tl.where(there & (accept == 0), i, depth), axis=0)
            refused = tl.max(((i == n) & (kid >= 0)).to(tl.int32), axis=0) != 0
            tl.store(path + b * depth + i, tl.where(i < n, kid, -1), mask=there)
            tl.store(count + b, n)

            key = noise.stream(seed, start, noise.RESIDUAL)
            stop = b * target.rows + n
            hot = tl.load(target.inverse + b) == float("inf")
            stop_tops = tl.load(
                slices.top + stop * NPROG + lanes,
                mask=live,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            stop_sums = tl.load(
                slices.sum + stop * NPROG + lanes, mask=live, other=0.0, cache_modifier=".cg"
            )
            peak_n = tl.max(stop_tops, axis=0)
            peak_n = tl.where(peak_n == float("-inf"), 0.0, peak_n)
            cdf = tl.cumsum((stop_sums * tl.exp(stop_tops - peak_n)).to(tl.float64), axis=0)
            whole = tl.max(cdf, axis=0)
            t = tl.arange(0, NTRY)
            e = tl.arange(0, SUB)
            won = n * 0 + NTRY
            tried = n * 0
            chosen = n * 0
            while (won == NTRY) & (tried < NROUND):
                word = (tried * NTRY + t) * 4
                mark = fine(key, word) * whole
                slot = tl.sum((cdf[None, :] <= mark[:, None]).to(tl.int64), axis=1)
                slot = tl.minimum(slot, NPROG - 1)
                parts = tl.load(
                    sub + ((stop * NPROG + slot) * NB)[:, None] + lanes_b[None, :],
                    cache_modifier=".cg",
                ).to(tl.float64)
                inner = tl.cumsum(parts, axis=1)
                mark = fine(key, word + 1) * tl.max(inner, axis=1)
                part = tl.sum((inner <= mark[:, None]).to(tl.int64), axis=1)
                part = tl.minimum(part, NB - 1)
                at_x = slot * BLOCK + part * SUB
                p = law(target, b, n, at_x[:, None] + e[None, :], TARGET_FLOOR)
                deep = tl.cumsum(p, axis=1)
                mark32 = fine(key, word + 2).to(tl.float32) * tl.max(deep, axis=1)
                x = tl.sum((deep <= mark32[:, None]).to(tl.int64), axis=1)
                x = tl.minimum(at_x + tl.minimum(x, SUB - 1), target.vocab - 1)
                p_x = law(target, b, n, x, TARGET_FLOOR)
                q_x = p_x * 0.0
                if refused:
                    q_x = drawn_from(drafted, tables, b, n, 0, x, HAS_DRAFT, DRAFT_FLOOR)
                # strict, division-free: u p < p - q; a proposal without mass is never kept
                keep = (fine(key, word + 3).to(tl.float32) * p_x < p_x - q_x) & (hot == 0)
                won = tl.min(tl.where(keep, t, NTRY), axis=0).to(tl.int64)
                chosen = tl.sum(tl.where(t == won, x, 0), axis=0)
                tried += 1
            tl.store(tries + b, tl.where(won == NTRY, -1, (tried - 1) * NTRY + won).to(tl.int32))
            if won == NTRY:  # rare, greedy rows, and when tests ask for it: the whole row
                top_w = -1.0
                top_p = -1.0
                spare = n * 0
                mass = 0.0
                c = pid * 0
                while c < target.vocab:
                    o = c + tl.arange(0, CHUNK)
                    inside = o < target.vocab
                    plain = law(target, b, n, o, TARGET_FLOOR)
                    left = plain
                    if refused:
                        guess = drawn_from(drafted, tables, b, n, 0, o, HAS_DRAFT, DRAFT_FLOOR)
                        left = tl.maximum(plain - guess, 0.0)
                    noise_E = noise.exponential(key, o)
                    v, j = tl.max(
                        tl.where(inside, left / noise_E, -1.0), axis=0, return_indices=True
                    )
                    w, k = tl.max(
                        tl.where(inside, plain / noise_E, -1.0), axis=0, return_indices=True
                    )
                    chosen = tl.where(v > top_w, (c + j).to(tl.int64), chosen)
                    top_w = tl.maximum(top_w, v)
                    spare = tl.where(w > top_p, (c + k).to(tl.int64), spare)
                    top_p = tl.maximum(top_p, w)
                    mass += tl.sum(left, axis=0)
                    c += CHUNK
                chosen = tl.where(mass > EMPTY, chosen, spare)
            tl.store(next_token + b, chosen)


def chain_one_launch(
    draft: Draft, scores: Scores, draws: Draws, *, tries: int = TRIES, rounds: int = ROUNDS
) -> tuple[Verdict, torch.Tensor]:
    """Verdict, and per request the proposal that was kept (-1: the whole row was raced)."""
    laws = scores.laws
    batch, rows, vocab = laws.logits_BRV.shape
    device = laws.logits_BRV.device
    depth = draft.tree.max_depth
    target, target_floor = side_of(laws._replace(lse_BR=None))
    has_draft = draft.laws is not None
    drafted, draft_floor = (target, False) if draft.laws is None else side_of(draft.laws, vocab)
    keys, uniforms, _ = keys_of(draws)
    parts, part, warps = one_shape(vocab, laws.logits_BRV.dtype, batch * rows)
    block = parts * part
    count_p = programs(vocab, block)
    if draft.laws is not None:
        draft_sums(draft.laws, drafted, block, warps, draft_floor)
    path = torch.empty(batch, depth, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    next_token = torch.empty(batch, dtype=torch.int64, device=device)
    kept = torch.empty(batch, dtype=torch.int32, device=device)
    chain_one[count_p, rows, batch](
        target, drafted, tables_of(draft), keys,
        slices_of(device, batch * rows, count_p, "one rows"),
        torch.empty(batch * rows * count_p * parts, dtype=torch.float32, device=device),
        workspace(device, "one", batch), path, count, next_token, kept, depth, count_p,
        NB=parts, SUB=part, NTRY=tries, NROUND=rounds, NPROG_P2=next_power(count_p),
        DEPTH_P2=next_power(max(depth, 1)), TARGET_FLOOR=target_floor, DRAFT_FLOOR=draft_floor,
        HAS_DRAFT=has_draft, INJECTED=uniforms, num_warps=warps,
    )  # fmt: skip
    return Verdict(path, count, next_token), kept
