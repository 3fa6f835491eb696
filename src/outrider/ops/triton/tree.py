# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Recursive rejection over trees (Jeon et al. 2024, algorithm 6): one number for a refused draw.

What the target owes after refusals is (p - sum_j c_j q_j)+ / A, so a refused child costs one
reduction over the row and no stored residual (`left`). With R the mass that was left of q without
the tokens that are gone (1 for draws with replacement):

    accept c iff u q(c) / R < left(c) / A
    on refusal  c_k = A / R,  then A = sum left anew

A placed child is verified with a one-hot law: it drops out by its id and costs no reduction. Draws
of one node may come from several drafts, each with its own law row. One program walks a request;
the statistics pass before it is fully parallel.
"""

import torch
import triton
import triton.language as tl

from outrider.ops.triton import chain, noise
from outrider.ops.triton.chain import draft_sums
from outrider.ops.triton.launch import LOOPS, block_size, next_power, programs, race_size
from outrider.ops.triton.law_slices import law, row_stats, side_of, slices_of
from outrider.ops.triton.residual_race import EMPTY, FIXED, WITHOUT, drawn_at, left_over
from outrider.ops.triton.tables import keys_of, kid_of, kind_of, tables_of, token_of
from outrider.types import Draft, Draws, Scores, Verdict


@triton.jit(do_not_specialize=LOOPS)
def tree_walk(
    target, drafted, tables, taken, keys, path, count, next_token, depth, MOST,
    CHUNK: tl.constexpr, TARGET_FLOOR: tl.constexpr, DRAFT_FLOOR: tl.constexpr,
    HAS_DRAFT: tl.constexpr, UNIFORMS: tl.constexpr, RACE: tl.constexpr, DEPTH_P2: tl.constexpr,
):  # fmt: skip
    """Walk and draw. Grid (batch,)."""
    b = tl.program_id(0).to(tl.int64)
    seed = tl.load(keys.seed + b)
    start = tl.load(keys.start + b)
    accept_key = noise.stream(seed, start, noise.ACCEPT)
    race_key = noise.stream(seed, start, noise.RESIDUAL)
    vocab = target.vocab
    own = taken + b * MOST
    node = b * 0
    n = tl.program_id(0) * 0
    k = n
    going = n == 0
    while going:
        owed = 1.0
        rest = 1.0
        k = n * 0
        kept = b * 0 - 1
        most = tl.where(n < depth, MOST, 0)
        while (k < most) & (kept < 0):
            kid = kid_of(tables, b, node, k)
            if kid >= 0:
                token = token_of(tables, b, kid)
                left, _ = left_over(
                    target, drafted, tables, own, b, node, k, token, TARGET_FLOOR, DRAFT_FLOOR,
                    HAS_DRAFT,
                )  # fmt: skip
                guess = drawn_at(drafted, tables, b, node, k, rest, DRAFT_FLOOR, HAS_DRAFT)
                at = node * MOST + k
                if UNIFORMS:
                    u = tl.load(keys.uniform + b * keys.uniform_b + at)
                else:
                    u = noise.uniform(accept_key, at)
                if u * guess * owed < left:
                    kept = kid
                elif kind_of(tables, b, node, k) == FIXED:
                    owed = tl.maximum(owed - left, 0.0)
                else:
                    without = kind_of(tables, b, node, k) == WITHOUT
                    tl.store(own + k, owed / tl.where(without, tl.maximum(rest, 1e-30), 1.0))
                    tl.debug_barrier()
                    owed = 0.0
                    remains = 0.0
                    c = k * 0
                    while c < vocab:
                        offs = c + tl.arange(0, CHUNK)
                        left_C, rest_C = left_over(
                            target, drafted, tables, own, b, node, k + 1, offs, TARGET_FLOOR,
                            DRAFT_FLOOR, HAS_DRAFT,
                        )  # fmt: skip
                        owed += tl.sum(left_C, axis=0)
                        remains += tl.sum(rest_C, axis=0)
                        c += CHUNK
                    rest = tl.where(without, remains, rest)
            k += 1
        going = kept >= 0
        if going:
            tl.store(path + b * depth + n, kept)
            node = kept
            n += 1
    # k draws were refused at the last node: race over what is left there
    best = -1.0
    plain_best = -1.0
    token = b * 0
    spare = b * 0
    mass = 0.0
    c = k * 0
    while c < vocab:
        offs = c + tl.arange(0, CHUNK)
        inside = offs < vocab
        plain = law(target, b, node, offs, TARGET_FLOOR)
        left, _ = left_over(
            target, drafted, tables, own, b, node, k, offs, TARGET_FLOOR, DRAFT_FLOOR, HAS_DRAFT
        )
        if RACE:
            noise_E = tl.load(keys.race + b * keys.race_b + offs, mask=inside, other=1.0)
        else:
            noise_E = noise.exponential(race_key, offs)
        value, at = tl.max(tl.where(inside, left / noise_E, -1.0), axis=0, return_indices=True)
        other, there = tl.max(tl.where(inside, plain / noise_E, -1.0), axis=0, return_indices=True)
        token = tl.where(value > best, (c + at).to(tl.int64), token)
        best = tl.maximum(best, value)
        spare = tl.where(other > plain_best, (c + there).to(tl.int64), spare)
        plain_best = tl.maximum(plain_best, other)
        mass += tl.sum(left, axis=0)
        c += CHUNK
    tl.store(next_token + b, tl.where(mass > EMPTY, token, spare))
    tl.store(count + b, n.to(tl.int64))
    d = tl.arange(0, DEPTH_P2)
    none = tl.full([DEPTH_P2], -1, tl.int64)
    tl.store(path + b * depth + d, none, mask=(d >= n) & (d < depth))


def verify(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Path, count and next token, equal to the reference's for the same keys."""
    if draft.tree.is_chain:  # the bare root too: its row is raced by many programs
        return chain.verify(draft, scores, draws)
    laws = scores.laws
    batch, rows, vocab = laws.logits_BRV.shape
    device = laws.logits_BRV.device
    depth = draft.tree.max_depth
    target, target_floor = side_of(laws._replace(lse_BR=None))
    has_draft = draft.laws is not None
    drafted, draft_floor = (target, False) if draft.laws is None else side_of(draft.laws, vocab)
    keys, uniforms, race = keys_of(draws, draws.race_BV)
    block, warps = block_size(vocab, laws.logits_BRV.dtype, batch * rows)
    programs_ = programs(vocab, block)
    row_stats[programs_, rows, batch](
        target, slices_of(device, batch * rows, programs_, "tree rows"), programs_, BLOCK=block,
        NPROG_P2=next_power(programs_), HAS_FLOOR=target_floor, num_warps=warps,
    )  # fmt: skip
    if draft.laws is not None:
        draft_sums(draft.laws, drafted, block, warps, draft_floor)
    path = torch.empty(batch, depth, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    next_token = torch.empty(batch, dtype=torch.int64, device=device)
    most = draft.draws_BNK.shape[2]
    taken = torch.empty(batch, most, dtype=torch.float32, device=device)
    chunk = race_size(block)
    tree_walk[batch,](
        target, drafted, tables_of(draft), taken, keys, path, count, next_token, depth, most,
        CHUNK=chunk, TARGET_FLOOR=target_floor,
        DRAFT_FLOOR=draft_floor, HAS_DRAFT=has_draft, UNIFORMS=uniforms, RACE=race,
        DEPTH_P2=next_power(max(depth, 1)), num_warps=8,
    )  # fmt: skip
    return Verdict(path, count, next_token)
