"""One step, driven by hand or by the engine: begin, then propose, score, verify, commit.

    draft   = propose(drafter, state)                # a tree of guesses below the pending token
    scores  = score(target, state, draft)            # one call, one law per node
    verdict = verify(rule, state, draft, scores)     # the longest path kept, and one more token
    state, block = commit(target, drafter, state, draft, scores, verdict)

Nothing here reads a device value: every verb runs on the meta device. `length_B` counts committed
tokens, the pending one included; the caches hold one entry less; node 0 writes slot `length_B - 1`.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider import ops
from outrider.batch import Batch, begin
from outrider.nodes import of_tree
from outrider.ops.cpu import lists
from outrider.ops.cpu.rows import weights_of
from outrider.prefill import inference, width
from outrider.sampling import warp
from outrider.shaping import shape
from outrider.tree import numbers, offered, shallower
from outrider.types import (
    FAULT,
    RUNNING,
    STOP,
    Draft,
    Drafter,
    Draws,
    LanguageModel,
    Scores,
    Shape,
    Verdict,
    Verifier,
)

__all__ = ["Block", "begin", "commit", "log_probabilities", "propose", "score", "verify"]

_FEW_ROWS = 4  #: up to this many rows integers of Python are faster than tensors


class BlockLists(NamedTuple):
    """A block as Python lists, one entry per row: what the engine tells, without another read."""

    tokens: list[list[int]]
    emitted: list[int]
    reason: list[int]
    accepted: list[int]
    drafted: list[int]
    overlap: list[float]
    overlaps: list[int]


class Block(NamedTuple):
    """What a step emits, still on the device: `tokens_BT[b, :emitted_B[b]]`."""

    tokens_BT: Tensor
    emitted_B: Tensor
    reason_B: Tensor
    accepted_B: Tensor
    drafted_B: Tensor
    overlap_B: Tensor  #: sum of sum min(target, draft) over examined positions
    overlaps_B: Tensor
    start_B: Tensor  #: committed length before the step
    lists: BlockLists | None = None  #: the same as lists, if the step was made on the host


@inference
def propose(drafter: Drafter, state: Batch, shape: Shape | None = None) -> Draft:
    """A tree of guesses below each row's pending token, in one of the drafter's shapes.

    None takes the usual one. Rows that want less (`shape.most_B`) lose what lies deeper.
    """
    wanted = drafter.shapes[0] if shape is None else shape
    draft = drafter.propose(state.memory, state.context, wanted)
    if wanted.most_B is None:
        return draft
    return shallower(draft, wanted.most_B.to(draft.tokens_BN.device))


@inference
def score(target: LanguageModel, state: Batch, draft: Draft, hidden: bool = False) -> Scores:
    """The target's laws at every node, from one call. Siblings share a position, never a slot.

    With `hidden` the states that the laws were computed from come along, for a drafter that asks.
    """
    tree, context = draft.tree, state.context
    wide = width(context.bound, tree.nodes, state.cache.capacity)
    nodes = of_tree(draft.tokens_BN, tree, context.length_B - 1, wide)
    logits, states = target.forward(state.cache, nodes, hidden=hidden)
    shaping = context.sampling.shaping
    if shaping is None:
        return Scores(warp(logits, context.sampling), states)
    alive = None
    if shaping.processed:  # processors see no node that the drafter left empty
        alive = offered(draft.draws_BNK).expand(logits.shape[0], -1)
    shaped = shape(logits, shaping, context, draft.tokens_BN, tree, alive_BR=alive)
    dead = None
    if shaping.masks:  # rules need a law everywhere; any will do where none may be emitted from
        dead = shaped.amax(-1) == -torch.inf
        shaped = shaped.masked_fill(dead[..., None], 0.0)
    return Scores(warp(shaped, context.sampling), states, raw_BNV=logits, dead_BN=dead)


@inference
def verify(rule: Verifier, state: Batch, draft: Draft, scores: Scores) -> Verdict:
    """The rule's verdict with this step's noise. Rows that have ended keep nothing."""
    context = state.context
    verdict = rule(draft, scores, Draws(context.seed_B, context.length_B - 1))
    if _on_host(state) and _all_run_on_host(state):
        return verdict
    running = state.reason_B == RUNNING
    return verdict._replace(
        path_BD=torch.where(running[:, None], verdict.path_BD, -1),
        count_B=torch.where(running, verdict.count_B, 0),
    )


@inference
def commit(
    target: LanguageModel,
    drafter: Drafter,
    state: Batch,
    draft: Draft,
    scores: Scores,
    verdict: Verdict,
) -> tuple[Batch, Block]:
    """Keep the accepted path, append its tokens and the next one, and see which rows end.

    The first stop token, the row's limit or a fault cuts the block on the device.
    """
    context = state.context
    length = context.length_B
    device = length.device
    size = verdict.path_BD.shape[1] + 1
    if _on_host(state):
        block = _block_on_host(state, draft, scores, verdict)
    else:
        block = _block(state, draft, scores, verdict)

    # what lies past the block is rewritten later
    if block.lists is not None:
        lists.append(context.tokens_BL, length, block.lists.tokens)
    else:
        place = length[:, None] + numbers(size, device)
        context.tokens_BL.scatter_(1, place, block.tokens_BT)
    if not draft.tree.is_chain:
        target.keep(state.cache, length - 1, verdict.path_BD)
    drafter.commit(state.memory, context, draft, verdict, scores)

    context = context._replace(
        length_B=length + block.emitted_B,
        bound=min(context.bound + size, context.tokens_BL.shape[1]),
    )
    return state._replace(context=context, reason_B=block.reason_B), block


def _block(state: Batch, draft: Draft, scores: Scores, verdict: Verdict) -> Block:
    """The block of a step and why rows end, without reading a value."""
    length = state.context.length_B
    device = length.device
    count = verdict.count_B
    at = numbers(verdict.path_BD.shape[1] + 1, device)

    path_tokens = draft.tokens_BN.gather(1, verdict.path_BD.clamp(min=0))
    following = verdict.next_B[:, None]
    tokens = torch.cat([path_tokens, following], 1)
    tokens = torch.where(at == count[:, None], following, tokens)

    running = state.reason_B == RUNNING
    emitted = torch.where(running, count + 1, 0)
    reason = state.reason_B
    if state.stop_BS.shape[1]:
        stops = (tokens[:, :, None] == state.stop_BS[:, None, :]).any(-1)
        stops &= at < emitted[:, None]
        before = (~stops).long().cumprod(1).sum(1)  # tokens ahead of the first stop
        hit = before < emitted
        emitted = torch.where(hit, before + 1, emitted)
        reason = torch.where(hit, STOP, reason)
    room = state.limit_B - length
    full = running & (emitted >= room)
    cut = running & (emitted > room)
    reason = torch.where(full & ((reason == RUNNING) | cut), state.limit_reason_B, reason)
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
    return Block(tokens, emitted, reason, count, drafted, overlap, overlaps, length)


def _on_host(state: Batch) -> bool:
    """Whether this step is made of Python's integers: a few rows on a CPU."""
    length = state.context.length_B
    return length.shape[0] <= _FEW_ROWS and ops.on_host(length.device)


def _all_run_on_host(state: Batch) -> bool:
    return not any(state.reason_B.tolist())


def _block_on_host(state: Batch, draft: Draft, scores: Scores, verdict: Verdict) -> Block:
    """`_block` for a few rows on a CPU: Python's integers instead of tensors of one element."""
    told, tables = lists.of_verdict(verdict), lists.of_draft(draft)
    length, counts, following = state.context.length_B, told.counts, told.following
    stops, limits, why = state.stop_BS.tolist(), state.limit_B.tolist(), state.reason_B.tolist()
    limit_reasons, lengths = state.limit_reason_B.tolist(), length.tolist()
    sane = told.sane is scores.laws.logits_BRV and scores.dead_BN is None
    tops = None if sane else _tops_on_host(draft, scores)
    tokens_BT, emitted_B, reason_B, drawn_B = [], [], [], []
    overlap_B: list[float] = []
    overlaps_B: list[int] = []
    for b, path in enumerate(told.path):
        drafted = tables.tokens[b]
        tokens = [drafted[max(node, 0)] for node in path] + [following[b]]
        tokens[counts[b]] = following[b]
        tokens_BT.append(tokens)
        known: list[float] = []
        emitted, reason, drawn = 0, why[b], 0
        if reason == RUNNING:
            emitted = counts[b] + 1
            for place in range(emitted):
                if tokens[place] in stops[b]:
                    emitted, reason = place + 1, STOP
                    break
            room = limits[b] - lengths[b]
            if emitted > room or (emitted == room and reason == RUNNING):
                reason = limit_reasons[b]
            emitted = min(emitted, max(room, 0))
            if tops is not None and _fault_on_host(*tops[b], path, emitted):
                reason = FAULT
            drawn = sum(kid >= 0 for kids in tables.draws[b] for kid in kids)
            known = [] if told.overlap is None else [x for x in told.overlap[b] if x == x]
        emitted_B.append(emitted)
        reason_B.append(reason)
        drawn_B.append(drawn)
        overlap_B.append(float(sum(known)))
        overlaps_B.append(len(known))
    kept = BlockLists(tokens_BT, emitted_B, reason_B, counts, drawn_B, overlap_B, overlaps_B)
    ints = lists.numbers([emitted_B, reason_B, drawn_B, overlaps_B]).unbind(0)
    shares = torch.from_numpy(np.array(overlap_B, dtype=np.float32))
    text, count = lists.numbers(tokens_BT), verdict.count_B
    return Block(text, ints[0], ints[1], count, ints[2], shares, ints[3], length, kept)


def _tops_on_host(draft: Draft, scores: Scores) -> list[tuple[list[float], list[float]]]:
    """For each row the largest logits of the target's laws and of the draft's, if they may fail."""
    kept_weights = None if draft.laws is None else weights_of(draft.laws)
    tops = lists.largest(scores.laws.logits_BRV, scores.dead_BN)
    drawn: list[list[float]] = [[]] * len(tops)
    if draft.laws is not None and (kept_weights is None or kept_weights.fault):
        drawn = lists.largest(draft.laws.logits_BRV)
    return list(zip(tops, drawn, strict=True))


def _fault_on_host(tops: list[float], drawn: list[float], path: list[int], emitted: int) -> bool:
    """`_fault` for one row, from its laws' largest logits."""
    if any(map(_wild, tops)) or any(map(_wild, drawn)):
        return True
    return not all(math.isfinite(tops[node]) for node in (0, *path)[:emitted])


def _wild(top: float) -> bool:
    return top != top or top == math.inf


def _fault(draft: Draft, scores: Scores, verdict: Verdict, emitted_B: Tensor) -> Tensor:
    """Rows [B] with NaN or +inf anywhere, or without any possible token where one was emitted.

    Elsewhere there may be none: a grammar masks everything behind a drafted token that it forbids,
    and nothing need be possible behind a stop token or beyond the budget.
    """
    top = scores.laws.logits_BRV.amax(-1)
    if scores.dead_BN is not None:
        top = top.masked_fill(scores.dead_BN, -torch.inf)
    kept = torch.nn.functional.pad(verdict.path_BD, (1, 0), value=0).clamp(min=0)
    told = numbers(kept.shape[1], kept.device) < emitted_B[:, None]
    fault = (told & ~torch.isfinite(top.gather(1, kept))).any(-1) | _any_wild(top)
    if draft.laws is not None:
        fault |= _any_wild(draft.laws.logits_BRV.amax(-1))
    return fault


def _any_wild(top_BN: Tensor) -> Tensor:
    return (top_BN.isnan() | (top_BN == math.inf)).any(-1)


@inference
def log_probabilities(scores: Scores, verdict: Verdict, block: Block) -> Tensor:
    """Log-probability of every token of a block under the law it was emitted from, [B, T].

    That is the processed law: penalties, temperature and filters are in. Greedy rows, whose law is
    one-hot, report the law at temperature 1 instead.
    """
    root = torch.zeros_like(verdict.count_B)[:, None]
    nodes = torch.cat([root, verdict.path_BD.clamp(min=0)], 1)
    laws = scores.laws
    vocab = laws.logits_BRV.shape[-1]
    logits = laws.logits_BRV.gather(1, nodes[..., None].expand(-1, -1, vocab)).float()
    inverse = laws.inverse_temperature_B[:, None, None]
    inverse = torch.where(torch.isinf(inverse), 1.0, inverse)
    if laws.floor_BR is not None:
        floor = laws.floor_BR.gather(1, nodes)[..., None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    logs = (logits * inverse).log_softmax(-1)
    return logs.gather(2, block.tokens_BT.clamp(max=vocab - 1)[..., None])[..., 0]
