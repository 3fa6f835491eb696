"""Small tables of drafts and verdicts as Python lists: read once a step, not once a function.

An operation on a tensor of a few elements costs as much as a pass over a vocabulary, more after a
model has swept the processor's caches.
"""

import math
from typing import Any

import numpy as np
import torch

from outrider.ops.cpu.rows import upto
from outrider.types import Draft, DraftLists, Verdict, VerdictLists


def of_draft(draft: Draft) -> DraftLists:
    """The draft's tables as lists; those it carries if they still stand for its tensors."""
    own = (draft.tokens_BN, draft.draws_BNK, draft.kind_BNK, draft.row_BNK)
    carried = draft.lists
    if carried is not None:
        tokens, draws, kinds, rows = carried.of
        if tokens is own[0] and draws is own[1] and kinds is own[2] and rows is own[3]:
            return carried
    batch = draft.tokens_BN.shape[0]
    tables = [shared(table, batch) for table in own[1:]]
    return DraftLists(draft.tokens_BN.tolist(), tables[0], tables[1], tables[2], own)


def shared(table: torch.Tensor, batch: int) -> list[list[list[int]]]:
    """A table [B or 1, N, K] as one list per row."""
    lists: list[list[list[int]]] = table.tolist()
    return lists * batch if len(lists) == 1 else lists


def of_verdict(verdict: Verdict) -> VerdictLists:
    """The verdict as lists; those it carries if they still stand for its tensors."""
    own = (verdict.path_BD, verdict.count_B, verdict.next_B, verdict.overlap_BD)
    carried = verdict.lists
    if carried is not None and all(a is b for a, b in zip(carried.of, own, strict=True)):
        return carried
    overlap = None if own[3] is None else own[3].tolist()
    return VerdictLists(own[0].tolist(), own[1].tolist(), own[2].tolist(), overlap, own)


def numbers(values: list[Any]) -> torch.Tensor:
    """Whole numbers as a tensor: NumPy reads lists at a fraction of what `torch.tensor` takes."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def append(tokens_BL: torch.Tensor, length_B: torch.Tensor, blocks: list[list[int]]) -> None:
    """Write every row's block behind its committed tokens."""
    committed = tokens_BL.numpy()
    for row, (start, block) in enumerate(zip(length_B.tolist(), blocks, strict=True)):
        committed[row, start : start + len(block)] = block


def verdict(
    found: list[tuple[list[int], int, list[float]]],
    depth: int,
    overlaps: str | None,
    *,
    sane: torch.Tensor | None = None,
) -> Verdict:
    """The verdict from one (path, next token, overlaps) per row; `overlaps` is their dtype."""
    path = [kept + [-1] * (depth - len(kept)) for kept, _, _ in found]
    count = [len(kept) for kept, _, _ in found]
    following = [token for _, token, _ in found]
    shares = None
    if overlaps is not None:
        shares = [shared + [math.nan] * (depth - len(shared)) for _, _, shared in found]
    own = (
        numbers(path).view(len(found), depth),
        numbers(count),
        numbers(following),
        None if shares is None else torch.from_numpy(np.array(shares, dtype=overlaps)),
    )
    return Verdict(*own, VerdictLists(path, count, following, shares, own, sane))


def largest(logits_BRV: torch.Tensor, dead_BR: torch.Tensor | None = None) -> list[list[float]]:
    """The largest logit of every law, NaN if there is one; -inf where the law is `dead_BR`."""
    logits = logits_BRV.detach()
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    highest = wide.numpy().max(-1)
    if dead_BR is not None:
        highest = np.where(dead_BR.numpy(), -math.inf, highest)
    tops: list[list[float]] = highest.tolist()
    return tops


def chain_places(
    length_B: torch.Tensor, draft: Draft, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [B, N] of a chain's nodes; what they see [B, N, W] ends at their own."""
    known = None if draft.lists is None else draft.lists.places
    if known is not None and known.length_B is length_B:  # a changed draft has another shape
        nodes = draft.tree.nodes
        if known.visible_BNW.shape == (length_B.shape[0], nodes, width):
            return known.slots_BN, known.visible_BNW
    slots = length_B.numpy()[:, None] + upto(draft.tree.nodes) - 1
    return torch.from_numpy(slots), torch.from_numpy(upto(width) <= slots[..., None])


def visible(
    ancestors: torch.Tensor, first_B: torch.Tensor, start: int, stop: int, width: int
) -> torch.Tensor:
    """`outrider.tree.visible` for a few rows on a CPU."""
    below = ancestors.numpy()
    seen = np.zeros((first_B.shape[0], stop - start, width), dtype=bool)
    for b, first in enumerate(first_B.tolist()):
        room = min(stop, width - first)
        seen[b, :, :first] = True
        seen[b, :, first : first + room] = below[b if len(below) > 1 else 0, start:stop, :room]
    return torch.from_numpy(seen)
