# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""What a step emits, and why rows end, in one launch behind the largest logits.

Equal to `outrider.ops.reference.walking`, which takes dozens of launches of a few numbers each.
"""

import torch
import triton
import triton.language as tl

from outrider.ops.triton.launch import next_power
from outrider.types import FAULT, RUNNING, STOP, Draft, Ends, Scores, StepTensors, Verdict

_RUNNING, _STOP, _FAULT = tl.constexpr(RUNNING), tl.constexpr(STOP), tl.constexpr(FAULT)
COUNTS = ("depth", "nodes", "stops", "guesses", "table")


@triton.jit(do_not_specialize=COUNTS)
def settle(
    tokens, tokens_b, path, count, following, length, limit, limit_reason, stop, reason, top, dead,
    guess, guess_b, draws, draws_b, overlap, out, emitted, why, drafted, shared, examined,
    depth, nodes, stops, guesses, table,
    HAS_DEAD: tl.constexpr, HAS_OVERLAP: tl.constexpr, DEPTH: tl.constexpr, NODES: tl.constexpr,
    STOPS: tl.constexpr, GUESSES: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """One row. Grid (batch,)."""
    b = tl.program_id(0).to(tl.int64)
    d, r, s = tl.arange(0, DEPTH), tl.arange(0, NODES), tl.arange(0, STOPS)
    on_path = d < depth
    node = tl.load(path + b * depth + d, mask=on_path, other=-1)
    token = tl.load(tokens + b * tokens_b + tl.maximum(node, 0), mask=on_path, other=0)
    accepted, last = tl.load(count + b), tl.load(following + b)
    token = tl.where(on_path & (d != accepted), token, last)
    tl.store(out + b * (depth + 1) + d, token, mask=d <= depth)

    old = tl.load(reason + b)
    running = old == _RUNNING
    emit = tl.where(running, accepted + 1, 0)
    stopping = tl.load(stop + b * stops + s, mask=s < stops, other=-1)
    same = (token[:, None] == stopping[None]) & (s < stops)[None]
    hit = (tl.max(same.to(tl.int32), axis=1) > 0) & (d < emit)
    before = tl.min(tl.where(hit, d, DEPTH), axis=0).to(tl.int64)
    stopped = (before < DEPTH) & (before < emit)
    emit = tl.where(stopped, before + 1, emit)
    ends = tl.where(stopped, _STOP, old)
    room = tl.load(limit + b) - tl.load(length + b)
    full, cut = running & (emit >= room), running & (emit > room)
    ends = tl.where(full & ((ends == _RUNNING) | cut), tl.load(limit_reason + b), ends)
    emit = tl.where(running, tl.minimum(emit, tl.maximum(room, 0)), 0)

    above = tl.load(path + b * depth + d - 1, mask=(d > 0) & (d <= depth), other=0)
    kept = tl.maximum(above, 0)
    highest = tl.load(top + b * nodes + kept, mask=d <= depth, other=0.0).to(tl.float32)
    every = tl.load(top + b * nodes + r, mask=r < nodes, other=0.0).to(tl.float32)
    if HAS_DEAD:
        never = tl.load(dead + b * nodes + kept, mask=d <= depth, other=0) != 0
        highest = tl.where(never, float("-inf"), highest)
        every = tl.where(tl.load(dead + b * nodes + r, mask=r < nodes, other=0) != 0, 0.0, every)
    g = tl.arange(0, GUESSES)
    guessed = tl.load(guess + b * guess_b + g, mask=g < guesses, other=0.0).to(tl.float32)
    finite = tl.abs(highest) < float("inf")
    wrong = tl.max(((d < emit) & (finite == 0)).to(tl.int32), axis=0)
    wrong += tl.max(((every < float("inf")) == 0).to(tl.int32), axis=0)
    wrong += tl.max(((guessed < float("inf")) == 0).to(tl.int32), axis=0)
    ends = tl.where(running & (wrong > 0), _FAULT, ends)
    tl.store(emitted + b, emit)
    tl.store(why + b, ends)

    t = tl.arange(0, TABLE)
    offered = tl.load(draws + b * draws_b + t, mask=t < table, other=-1) >= 0
    tl.store(drafted + b, tl.where(running, tl.sum(offered.to(tl.int64), axis=0), 0))
    if HAS_OVERLAP:
        share = tl.load(overlap + b * depth + d, mask=on_path, other=float("nan"))
        known = (share == share) & running
        tl.store(shared + b, tl.sum(tl.where(known, share, 0.0), axis=0).to(tl.float32))
        tl.store(examined + b, tl.sum(known.to(tl.int64), axis=0))


def commit_tokens(draft: Draft, scores: Scores, verdict: Verdict, ends: Ends) -> StepTensors:
    """The tokens of a step and why rows end."""
    batch, depth = verdict.path_BD.shape
    like = verdict.next_B
    top = scores.laws.logits_BRV.amax(-1)
    nodes, stops = top.shape[1], ends.stop_BS.shape[1]
    guess = top[:, :0] if draft.laws is None else draft.laws.logits_BRV.amax(-1)
    draws = draft.draws_BNK.contiguous()
    table = draws[0].numel()
    tokens = draft.tokens_BN.contiguous()
    out = like.new_empty(batch, depth + 1)
    emitted, reason, drafted, examined = (like.new_empty(batch) for _ in range(4))
    shared = torch.empty(batch, dtype=torch.float32, device=like.device)
    overlap = verdict.overlap_BD
    if overlap is None:
        shared, examined = shared.zero_(), examined.zero_()
    dead = None if scores.dead_BN is None else scores.dead_BN.contiguous().view(torch.uint8)
    settle[(batch,)](
        tokens, _stride(tokens), verdict.path_BD.contiguous(), verdict.count_B.contiguous(),
        like.contiguous(), ends.length_B.contiguous(), ends.limit_B.contiguous(),
        ends.limit_reason_B.contiguous(), ends.stop_BS.contiguous(), ends.reason_B.contiguous(),
        top.contiguous(), top if dead is None else dead, guess, _stride(guess), draws,
        _stride(draws), shared if overlap is None else overlap.contiguous(), out, emitted, reason,
        drafted, shared, examined, depth, nodes, stops, guess.shape[1], table,
        HAS_DEAD=dead is not None, HAS_OVERLAP=overlap is not None, DEPTH=next_power(depth + 1),
        NODES=next_power(nodes), STOPS=next_power(max(stops, 1)),
        GUESSES=next_power(max(guess.shape[1], 1)), TABLE=next_power(max(table, 1)), num_warps=1,
    )  # fmt: skip
    return StepTensors(
        out, emitted, reason.to(ends.reason_B.dtype), verdict.count_B, drafted, shared, examined,
        ends.length_B,
    )  # fmt: skip


def _stride(table: torch.Tensor) -> int:
    """From a row to the next; 0 where all rows share one."""
    return 0 if table.shape[0] == 1 else table.stride(0)
