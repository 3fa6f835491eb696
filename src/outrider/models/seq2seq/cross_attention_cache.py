"""What a decoder keeps of its sources: cross-attention keys and values, computed once per row."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicLayer

from outrider.models.decoder import additive


class CrossAttentionCache:
    """Cross-attention keys and values of rows whose sources differ in length. A `RowStore`.

    Each plane is [seats, H, T, E], keys and values of a layer one after the other; the first `rows`
    seats are in use. Nothing here ever moves while a row decodes, and `take`, `put` and `narrow`
    copy the rows they name.
    """

    def __init__(self, planes: Sequence[Tensor], mask_BT: Tensor, wide: int) -> None:
        """`mask_BT` says which states are there; `wide` is the width of the encoder's states."""
        self.planes, self.wide = list(planes), wide
        self.rows = mask_BT.shape[0]
        self._mask = mask_BT
        self._ragged = not bool(mask_BT.all())  # a wait, once a source: no call asks the device
        self._seen: Tensor | None = None
        self._cache: DynamicCache | None = None

    @property
    def length(self) -> int:
        """T, the states of the longest source."""
        return self._mask.shape[1]

    def cache(self) -> DynamicCache:
        """The planes of the rows in use as transformers' cache; nothing is copied."""
        if self._cache is None:
            self._cache = DynamicCache()
            for keys, values in zip(self.planes[::2], self.planes[1::2], strict=True):
                layer = DynamicLayer()
                layer.keys, layer.values = keys[: self.rows], values[: self.rows]
                layer.is_initialized = True
                self._cache.layers.append(layer)
        return self._cache

    def seen(self, queries: int) -> Tensor | None:
        """Additive mask [B, 1, Q, T] of the states that are there; None if all are."""
        if not self._ragged:
            return None
        if self._seen is None:
            self._seen = additive(self._mask[: self.rows, None], self.planes[0].dtype)
        return self._seen.expand(-1, -1, queries, -1)

    def states(self) -> Tensor:
        """[B, T, E] in place of the encoder's states, which are not read again; takes no memory."""
        nothing = self.planes[0].new_zeros(1, 1, 1)
        return nothing.expand(self.rows, self.length, self.wide)

    def take(self, rows: Sequence[int]) -> "CrossAttentionCache":
        """A copy of these rows, in this order."""
        picked = [_picked(plane, rows) for plane in self.planes]
        return CrossAttentionCache(picked, _picked(self._mask, rows), self.wide)

    def put(self, seats: Sequence[int], other: "CrossAttentionCache") -> Self:
        """The rows of `other` in these seats, in place; shorter sources are masked behind."""
        rows = max(self.rows, 1 + max(seats, default=-1))
        old_seats, old_length = self._mask.shape
        more = max(other.length - old_length, 0)
        free = 0 if rows <= old_seats else max(rows, 2 * old_seats) - old_seats
        if more or free:
            self.planes = [pad(plane, (0, 0, 0, more, 0, 0, 0, free)) for plane in self.planes]
            self._mask = pad(self._mask, (0, more, 0, free))
        used = slice(0, other.length)
        for mine, theirs in zip(self.planes, other.planes, strict=True):
            for row, seat in enumerate(seats):
                mine[seat, :, used].copy_(theirs[row])
        for row, seat in enumerate(seats):
            self._mask[seat] = False
            self._mask[seat, used] = other._mask[row]
        shorter = other.length < self.length
        self._ragged = self._ragged or other._ragged or shorter or (more > 0 and self.rows > 0)
        return self._show(rows)

    def narrow(self, rows: int) -> Self:
        """The first rows, without a copy."""
        return self._show(rows)

    def _show(self, rows: int) -> Self:
        self.rows, self._seen, self._cache = rows, None, None
        return self


def _picked(plane: Tensor, rows: Sequence[int]) -> Tensor:
    """Copies of these rows, by numbers known on the host."""
    return torch.cat([plane[:0], *(plane[row : row + 1] for row in rows)])
