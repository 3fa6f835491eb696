"""The fallback where trees cannot be exact: one row at a time, a chain, the model's own mask.

The cache is shown to the model with the exact length it expects, so whatever the model derives from
that length is right. Each row has its own cache, because rows have different lengths.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.models.guard import evaluating
from outrider.models.hf import TransformersRunner


class RowCaches:
    """One cache for each row, a `RowStore`. Chains never move entries."""

    def __init__(self, rows: list[SlotCache], capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.slots_BQ: Tensor | None = None
        self.width = capacity

    def begin(self, slots_BQ: Tensor, width: int, seen: int) -> None:
        """Remember where the next call writes."""
        self.slots_BQ, self.width = slots_BQ, width

    def keep(self, first_B: Tensor, path_BD: Tensor) -> None:
        """A chain's accepted entries lie where they belong."""

    def take(self, rows: Sequence[int]) -> "RowCaches":
        """Copies of these rows' caches."""
        return RowCaches([self.rows[row].take([0]) for row in rows], self.capacity)

    def put(self, seats: Sequence[int], other: "RowCaches") -> Self:
        """The caches of `other` in these seats: `other` is not to be used any more."""
        for seat, cache in sorted(zip(seats, other.rows, strict=True), key=lambda pair: pair[0]):
            self.rows[seat : seat + 1] = [cache]
        self.capacity = max(self.capacity, other.capacity)
        return self

    def narrow(self, rows: int) -> Self:
        """The first rows' caches."""
        del self.rows[rows:]
        return self


class ChainRunner(TransformersRunner):
    """Runs each row's chain with `attention_mask=None`."""

    trees = False

    def open(self, rows: int, capacity: int) -> RowCaches:
        """Empty caches."""
        return RowCaches([SlotCache(self.layers, 1, capacity) for _ in range(rows)], capacity)

    def __call__(
        self,
        cache: Any,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        visible_BQW: Tensor,
        last: int | None,
    ) -> Tensor:
        """Logits of the (last) nodes of every row's chain."""
        slots_BQ: Tensor = cache.slots_BQ
        starts: list[int] = slots_BQ[:, 0].tolist()
        repeated: list[bool] = (slots_BQ[:, :1] == slots_BQ[:, 1:2]).any(1).tolist()
        logits = []
        for row, own in enumerate(cache.rows):
            # a one-token prompt re-feeds its only token twice, into one slot
            skip = int(repeated[row])
            tokens, slots = tokens_BQ[row : row + 1, skip:], slots_BQ[row : row + 1, skip:]
            own.begin(slots, starts[row] + slots.shape[1], starts[row])
            at = positions_BQ[row : row + 1, skip:]
            extra: dict[str, Any] = {"position_ids": at} if self._positions else {}
            with evaluating(self.model, self._parts):
                out: Tensor = self.model(
                    input_ids=tokens, past_key_values=own, use_cache=True, **extra
                ).logits
            logits.append(torch.cat([out[:, :skip], out], 1))
        whole = torch.cat(logits)
        return whole if last is None else whole[:, -last:]
