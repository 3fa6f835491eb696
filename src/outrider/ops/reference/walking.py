"""Down a tree along tokens that are known, and along a chain as transformers calls it."""

import math

import torch
from torch import Tensor

from outrider.ops.reference.probs import residual
from outrider.tree import numbers
from outrider.types import FAULT, RUNNING, STOP, Draft, Ends, Scores, StepTensors, Verdict

# What a step emits: the accepted path and one more token, cut where the row ends.


def commit_tokens(draft: Draft, scores: Scores, verdict: Verdict, ends: Ends) -> StepTensors:
    """The tokens of a step and why rows end: at the first stop token, their limit, or a fault.

    Rows that have ended emit nothing.
    """
    length = ends.length_B
    device = length.device
    count = verdict.count_B
    at = numbers(verdict.path_BD.shape[1] + 1, device)

    path_tokens = draft.tokens_BN.gather(1, verdict.path_BD.clamp(min=0))
    following = verdict.next_B[:, None]
    tokens = torch.cat([path_tokens, following], 1)
    tokens = torch.where(at == count[:, None], following, tokens)

    running = ends.reason_B == RUNNING
    emitted = torch.where(running, count + 1, 0)
    reason = ends.reason_B
    if ends.stop_BS.shape[1]:
        stops = (tokens[:, :, None] == ends.stop_BS[:, None, :]).any(-1)
        stops &= at < emitted[:, None]
        before = (~stops).long().cumprod(1).sum(1)  # tokens ahead of the first stop
        hit = before < emitted
        emitted = torch.where(hit, before + 1, emitted)
        reason = torch.where(hit, STOP, reason)
    room = ends.limit_B - length
    full = running & (emitted >= room)
    cut = running & (emitted > room)
    reason = torch.where(full & ((reason == RUNNING) | cut), ends.limit_reason_B, reason)
    emitted = torch.minimum(emitted, room.clamp(min=0))
    emitted = torch.where(running, emitted, 0)
    reason = torch.where(running & _fault(draft, scores, verdict, emitted), FAULT, reason)

    overlap = torch.zeros((), dtype=torch.float32, device=device).expand(length.shape)
    overlaps = torch.zeros((), dtype=torch.int64, device=device).expand(length.shape)
    if verdict.overlap_BD is not None:
        known = ~verdict.overlap_BD.isnan() & running[:, None]
        overlap = torch.where(known, verdict.overlap_BD, 0).sum(1).float()
        overlaps = known.sum(1)
    drafted = (draft.draws_BNK >= 0).sum((1, 2)).expand(length.shape)
    drafted = torch.where(running, drafted, 0)
    return StepTensors(tokens, emitted, reason, count, drafted, overlap, overlaps, length)


def _fault(draft: Draft, scores: Scores, verdict: Verdict, emitted_B: Tensor) -> Tensor:
    """Rows [B] with NaN or +inf anywhere, or without any possible token where one was emitted.

    Elsewhere there may be none: a grammar masks everything behind a drafted token that it forbids,
    and nothing need be possible behind a stop token or beyond the budget.
    """
    top = scores.laws.logits_BRV.amax(-1)
    if scores.dead_BN is not None:
        top = top.masked_fill(scores.dead_BN, -torch.inf)
    kept = torch.nn.functional.pad(verdict.path_BD, (1, 0), value=0).clamp(min=0)
    emits = numbers(kept.shape[1], kept.device) < emitted_B[:, None]
    fault = (emits & ~torch.isfinite(top.gather(1, kept))).any(-1) | _wild(top)
    if draft.laws is not None:
        fault |= _wild(draft.laws.logits_BRV.amax(-1))
    return fault


def _wild(top_BN: Tensor) -> Tensor:
    return (top_BN.isnan() | (top_BN == math.inf)).any(-1)


def follow(draft: Draft, chosen_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root to the child that carries each node's chosen token, while there is one.

    Returns the path [B, D] (-1 padded), its length [B] and the node where the walk stands [B].
    """
    batch = draft.tokens_BN.shape[0]
    depth = draft.tree.max_depth
    device = draft.tokens_BN.device
    if depth == 0:
        none = torch.zeros(batch, dtype=torch.int64, device=device)
        return none.new_zeros(batch, 0), none, none
    draws = draft.draws_BNK.expand(batch, -1, -1)
    if draft.tree.is_chain:
        kid = draws[:, :depth, 0]
        hit = (kid >= 0) & (draft.tokens_BN[:, 1 : depth + 1] == chosen_BN[:, :depth])
        going = hit.long().cumprod(1)
        count = going.sum(1)
        return torch.where(going > 0, kid, -1), count, count
    rows = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    path = []
    for _ in range(depth):
        kids = draws[rows, node]
        same = draft.tokens_BN.gather(1, kids.clamp(min=0)) == chosen_BN[rows, node][:, None]
        hit = (same & (kids >= 0)).to(torch.int64)
        alive = alive & (hit.amax(1) > 0)
        there = kids.gather(1, hit.argmax(1, keepdim=True))[:, 0]
        path.append(torch.where(alive, there, -1))
        node = torch.where(alive, there, node)
    path_BD = torch.stack(path, 1)
    return path_BD, (path_BD >= 0).sum(1), node


def assisted(
    ids_n: Tensor, drafted_1nV: Tensor, target_1mV: Tensor, uniforms: Tensor, weight: float | None
) -> tuple[Tensor, Tensor]:
    """Chain verification of one sequence as transformers' assisted generation calls it.

    Accepts token i iff u_i q_i < w p_i + (1 - w) q_i (w = 1 without a weight), n of them; one more
    token by inverse transform from the last two uniforms. Tokens [1, n + 1], and n.
    """
    count = drafted_1nV.shape[1]
    p, q = (logits[0].double().softmax(-1) for logits in (target_1mV, drafted_1nV))
    q = torch.nn.functional.pad(q, (0, p.shape[-1] - q.shape[-1], 0, 1))
    u = uniforms.double()
    owed, drawn = (law[:count].gather(1, ids_n[:count, None])[:, 0] for law in (p, q))
    owed = owed if weight is None else (1.0 - weight) * drawn + weight * owed
    n = (u[:count] * drawn < owed).long().cumprod(0).sum()
    left = residual(p[n], q[n]).cumsum(0)
    token = torch.searchsorted(left, (u[count] + u[count + 1] * 2.0**-24) * left[-1], right=True)
    token = token.clamp(max=p.shape[-1] - 1)
    return torch.cat([ids_n[:count][numbers(count, n.device) < n], token[None]])[None], n
