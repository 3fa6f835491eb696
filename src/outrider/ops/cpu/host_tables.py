"""Small tables of drafts and verdicts as Python lists: read once a verification.

An operation on a tensor of a few elements costs as much as a pass over a vocabulary, more after a
model has swept the processor's caches.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.types import Draft, Verdict


class HostTables(NamedTuple):
    """A draft's small tables, one entry per row."""

    tokens: list[list[int]]
    draws: list[list[list[int]]]
    kinds: list[list[list[int]]]
    rows: list[list[list[int]]]


def of_draft(draft: Draft) -> HostTables:
    """The draft's tables as lists."""
    batch = draft.tokens_BN.shape[0]
    return HostTables(
        draft.tokens_BN.tolist(),
        shared(draft.draws_BNK, batch),
        shared(draft.kind_BNK, batch),
        shared(draft.row_BNK, batch),
    )


def shared(table: torch.Tensor, batch: int) -> list[list[list[int]]]:
    """A table [B or 1, N, K] as one list per row."""
    lists: list[list[list[int]]] = table.tolist()
    return lists * batch if len(lists) == 1 else lists


def numbers(values: list[Any]) -> torch.Tensor:
    """Whole numbers as a tensor: NumPy reads lists at a fraction of what `torch.tensor` takes."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def verdict(
    walks: list[tuple[list[int], int, list[float]]], depth: int, overlaps: str | None
) -> Verdict:
    """The verdict from one (path, next token, overlaps) per row; `overlaps` is their dtype."""
    paths = [path + [-1] * (depth - len(path)) for path, _, _ in walks]
    shares = None
    if overlaps is not None:
        padded = [shared + [math.nan] * (depth - len(shared)) for _, _, shared in walks]
        shares = torch.from_numpy(np.array(padded, dtype=overlaps))
    return Verdict(
        numbers(paths).view(len(walks), depth),
        numbers([len(path) for path, _, _ in walks]),
        numbers([token for _, token, _ in walks]),
        shares,
    )
