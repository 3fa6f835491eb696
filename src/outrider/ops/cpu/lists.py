"""Small tables of drafts and verdicts as Python lists: read once a step, not once a function.

An operation on a tensor of a few elements costs as much as a pass over a vocabulary, more after a
model has swept the processor's caches.
"""

import numpy as np
import torch

from outrider.types import Draft, DraftLists, Verdict, VerdictLists


def of_draft(draft: Draft) -> DraftLists:
    """The draft's tables as lists; those it carries if they still stand for its tensors."""
    own = (draft.tokens_BN, draft.draws_BNK, draft.kind_BNK, draft.row_BNK)
    carried = draft.lists
    if carried is not None and all(a is b for a, b in zip(carried.of, own, strict=True)):
        return carried
    batch = draft.tokens_BN.shape[0]
    draws, kinds, rows = (shared(table, batch) for table in own[1:])
    return DraftLists(draft.tokens_BN.tolist(), draws, kinds, rows, own)


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


def largest(logits_BRV: torch.Tensor) -> list[list[float]]:
    """The largest logit of every law, NaN if there is one."""
    logits = logits_BRV.detach()
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    tops: list[list[float]] = wide.numpy().max(-1).tolist()
    return tops


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
