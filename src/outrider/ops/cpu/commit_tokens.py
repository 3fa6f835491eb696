"""What a step emits, for a few rows on a CPU: Python's integers instead of small tensors.

Equal to `outrider.ops.reference.walking`.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from outrider.ops.cpu import host_tables, top_tokens
from outrider.ops.cpu.host_tables import Array
from outrider.ops.cpu.law_slices import weights_of
from outrider.ops.reference import walking
from outrider.types import (
    FAULT,
    RUNNING,
    STOP,
    Draft,
    Ends,
    Laws,
    Scores,
    StepLists,
    StepTensors,
    Verdict,
)

_FEW_ROWS = 32  #: up to this many rows integers of Python are faster than tensors


class _CommittedRow(NamedTuple):
    """One row of `Ends`, as numbers."""

    length: int
    limit: int
    limit_reason: int
    stops: list[int]
    reason: int


def commit_tokens(draft: Draft, scores: Scores, verdict: Verdict, ends: Ends) -> StepTensors:
    """The tokens of a step and why rows end."""
    if ends.length_B.shape[0] > _FEW_ROWS:
        return walking.commit_tokens(draft, scores, verdict, ends)
    rows = list(map(_CommittedRow, *map(torch.Tensor.tolist, ends)))
    peaks = top_tokens.cached_top_tokens(scores.laws) if scores.dead_BN is None else None
    largest: tuple[Array, Array] | None = None
    if peaks is None or not peaks.sound or draft.laws is not None:  # seldom
        guesses = np.empty((len(rows), 0))
        tops = _largest(scores.laws.logits_BRV, scores.dead_BN)
        if draft.laws is not None:
            guesses = _guesses(draft.laws, len(rows))
        if not (np.isfinite(tops).all() and np.isfinite(guesses).all()):
            largest = tops, guesses
    block, none = _lists(draft, verdict, rows, largest), host_tables.nothing(len(rows))
    reason_B, drafted_B, overlaps_B, overlap_B = ends.reason_B, *[none.whole_B] * 2, none.float_B
    if block.reason != [row.reason for row in rows]:
        reason_B = host_tables.numbers(block.reason)
    if any(block.drafted):
        drafted_B = host_tables.numbers(block.drafted)
    if any(block.overlaps):
        overlap_B = torch.from_numpy(np.array(block.overlap, dtype=np.float32))
        overlaps_B = host_tables.numbers(block.overlaps)
    return StepTensors(
        host_tables.numbers(block.tokens),
        host_tables.numbers(block.emitted),
        reason_B,
        verdict.count_B,
        drafted_B,
        overlap_B,
        overlaps_B,
        ends.length_B,
        block,
    )


def _lists(
    draft: Draft, verdict: Verdict, rows: list[_CommittedRow], largest: tuple[Array, Array] | None
) -> StepLists:
    """What each row emits; with the largest logits of its laws, where some are not finite."""
    following: list[int] = verdict.next_B.tolist()
    counts, offered, paths = [0] * len(rows), [0], [list[int]()] * len(rows)
    if draft.tree.max_depth:
        counts, drafted = verdict.count_B.tolist(), draft.tokens_BN.tolist()
        paths = verdict.path_BD.tolist()
        offered = [int(np.count_nonzero(each)) for each in draft.draws_BNK.numpy() >= 0]
    offered = offered * (len(rows) // len(offered))  # a table may be shared
    shares = [[]] * len(rows) if verdict.overlap_BD is None else verdict.overlap_BD.tolist()
    block = StepLists([], [], [], counts, [], [], [])
    for b, row in enumerate(rows):
        tokens: list[int] = []
        for node in paths[b]:
            tokens.append(drafted[b][max(node, 0)])
        tokens.append(following[b])
        tokens[counts[b]] = following[b]
        emitted, reason = _cut(row, tokens[: counts[b] + 1])
        running = row.reason == RUNNING
        if running and largest is not None:
            tops, guesses = largest
            if _fault(tops[b], guesses[b], [0, *paths[b]][:emitted]):
                reason = FAULT
        overlap, overlaps = 0.0, 0
        for share in shares[b] if running else ():
            if share == share:
                overlap, overlaps = overlap + share, overlaps + 1
        block.tokens.append(tokens)
        block.emitted.append(emitted)
        block.reason.append(reason)
        block.drafted.append(offered[b] if running else 0)
        block.overlap.append(overlap)
        block.overlaps.append(overlaps)
    return block


def _cut(row: _CommittedRow, tokens: list[int]) -> tuple[int, int]:
    """How many of the tokens a row emits, and why it ends if it does."""
    if row.reason != RUNNING:
        return 0, row.reason
    emitted, reason = len(tokens), RUNNING
    for place, token in enumerate(tokens):
        if token in row.stops:
            emitted, reason = place + 1, STOP
            break
    room = row.limit - row.length
    if emitted > room or (emitted == room and reason == RUNNING):
        reason = row.limit_reason
    return min(emitted, max(room, 0)), reason


def _guesses(laws: Laws, rows: int) -> Array:
    """The largest logits of the draft's laws that may be at fault."""
    weights = weights_of(laws)
    if weights is not None and not weights.fault:
        return np.empty((rows, 0))
    return _largest(laws.logits_BRV)


def _largest(logits_BRV: torch.Tensor, dead_BR: torch.Tensor | None = None) -> Array:
    """The largest logit of every law, NaN if there is one; -inf where the law is `dead_BR`."""
    highest: Array = host_tables.native(logits_BRV).max(-1)
    if dead_BR is not None:
        highest = np.where(dead_BR.numpy(), -math.inf, highest)
    return highest


def _fault(tops: Array, guesses: Array, emitting: list[int]) -> bool:
    """NaN or +inf anywhere, or no possible token at a node that a token was emitted from."""
    if not (tops < math.inf).all() or not (guesses < math.inf).all():
        return True
    return bool((tops[emitting] == -math.inf).any())
