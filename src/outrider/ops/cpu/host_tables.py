"""Small tables of drafts and verdicts as Python lists: read once a verification.

An operation on a tensor of a few elements costs as much as a pass over a vocabulary, more after a
model has swept the processor's caches.
"""

import math
import threading
from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from outrider.types import Draft, Verdict

# Memory that the CPU rules write to and never give away: one of each kind in every thread.
#
# Two requests may be decoded in two threads; a rule reads its rows again after it has written them.

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]  #: memory that a kernel reads or writes
_MOST = 8  #: of each kind, then the oldest goes: shapes change with the request

_own = threading.local()


def per_thread(make: Callable[..., T]) -> Callable[..., T]:
    """Remember what `make` made for its arguments, in the thread that asked.

    >>> room = per_thread(lambda size: [0] * size)
    >>> room(2) is room(2)
    True
    """

    @wraps(make)
    def made(*key: Hashable) -> T:
        try:
            kept: dict[Hashable, T] = _own.kept[made]
        except (AttributeError, KeyError):
            if not hasattr(_own, "kept"):
                _own.kept = {}
            kept = _own.kept.setdefault(made, {})
        found = kept.get(key)
        if found is None:
            if len(kept) >= _MOST:
                kept.pop(next(iter(kept)))
            found = kept[key] = make(*key)
        return found

    return made


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


def native(logits: torch.Tensor) -> Array:
    """Logits as an array: where they lie in float32 and float64, else widened to float32."""
    logits = logits.detach()
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    array: Array = wide.numpy()
    return array


def numbers(values: list[Any]) -> torch.Tensor:
    """Whole numbers as a tensor: NumPy reads lists at a fraction of what `torch.tensor` takes."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def verdict(
    walks: list[tuple[list[int], int, list[float]]], depth: int, overlaps: str | None
) -> Verdict:
    """The verdict from one (path, next token, overlaps) per row; `overlaps` is their dtype."""
    paths: list[list[int]] = []
    counts, following = [], []
    shares = None
    for path, token, _ in walks:
        paths.append(path + [-1] * (depth - len(path)))
        counts.append(len(path))
        following.append(token)
    if overlaps is not None:
        padded = [shared + [math.nan] * (depth - len(shared)) for _, _, shared in walks]
        shares = torch.from_numpy(np.array(padded, dtype=overlaps))
    if not depth:
        none = nothing(len(walks))
        return Verdict(none.path_BD, none.whole_B, numbers(following), shares)
    return Verdict(numbers(paths), numbers(counts), numbers(following), shares)


class Nothing(NamedTuple):
    """What rows without a draft have: no path, and zeros."""

    path_BD: torch.Tensor
    whole_B: torch.Tensor
    float_B: torch.Tensor


@cache
def nothing(rows: int) -> Nothing:
    """Of so many rows. It is never written to, so that it is made once."""
    with torch.inference_mode(False):
        whole_B = torch.zeros(rows, dtype=torch.int64, device="cpu")
        float_B = whole_B.new_zeros(rows, dtype=torch.float32)
        return Nothing(whole_B.new_zeros(rows, 0), whole_B, float_B)
