"""What a step emits: the accepted path and one more token, cut where the row ends."""

import math

import torch
from torch import Tensor

from outrider.tree import numbers
from outrider.types import FAULT, RUNNING, STOP, Draft, Ends, Scores, StepTensors, Verdict


def settle(draft: Draft, scores: Scores, verdict: Verdict, ends: Ends) -> StepTensors:
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

    overlap = torch.zeros((), device=device).expand(length.shape)
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
