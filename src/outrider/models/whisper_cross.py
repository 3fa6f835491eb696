"""What a lean Whisper decoder keeps of a window: keys and values of the encoder's states."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models import batch_invariance
from outrider.models.attention import BatchInvariantAttention, unscaled
from outrider.models.batch_invariance import PaddingPolicy
from outrider.models.cpu_kernels import cross_attention


class Kept(NamedTuple):
    """How keys and values are kept, and how they are read."""

    compiled: bool  #: as `cpu_kernels.cross_attention` reads them; else as torch's operators do
    attention: BatchInvariantAttention = BatchInvariantAttention(unscaled, PaddingPolicy())

    @classmethod
    def best(cls, like: Tensor) -> "Kept":
        """The fastest way on this machine for states as `like`.

        torch rounds several queries over 1,500 states otherwise than one. Where that shows, in
        half precision, they are gone through one by one.
        """
        if not cross_attention.unsupported_reason(like):
            return cls(True)
        each = batch_invariance.applies_to(like.dtype, like.device)
        return cls(
            False,
            BatchInvariantAttention(unscaled, PaddingPolicy((1,), 0) if each else PaddingPolicy()),
        )

    def planes(self, keys_BHTE: Tensor, values_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are kept."""
        if not self.compiled:
            return keys_BHTE, values_BHTE
        return cross_attention.laid_keys(keys_BHTE), cross_attention.laid_values(values_BHTE)


class Cross:
    """Keys and values of the encoder's states, made once per row. A `RowStore`.

    `table` is [planes, seats, H, ...]: keys of layer i in plane 2 i, its values in 2 i + 1, each as
    `kept` has them. Newcomers are written into free seats; nobody else's entries are copied while
    there are any.
    """

    def __init__(self, table: Tensor, rows: int, slots: int, kept: Kept) -> None:
        self.table, self.rows, self.slots, self.kept = table, rows, slots, kept
        self._planes = table[:, :rows].unbind(0)  # once: every layer of every call reads two

    def attend(self, layer: int, q_BQHE: Tensor) -> Tensor:
        """Attention [B, Q, H E] of scaled queries over all states."""
        keys, values = self._planes[2 * layer], self._planes[2 * layer + 1]
        if self.kept.compiled:
            return cross_attention.attend(q_BQHE, keys, values, self.slots).flatten(2)
        x_BHQE = self.kept.attention(q_BQHE.transpose(1, 2), keys, values)
        return x_BHQE.transpose(1, 2).reshape(*q_BQHE.shape[:2], -1)

    def take(self, rows: Sequence[int]) -> "Cross":
        """A copy of these rows, in this order."""
        table = torch.cat([self.table[:, :0], *(self.table[:, r : r + 1] for r in rows)], 1)
        return Cross(table, len(rows), self.slots, self.kept)

    def put(self, seats: Sequence[int], other: "Cross") -> "Cross":
        """The rows of `other` in these seats; seats behind the last row add rows."""
        rows = max(self.rows, 1 + max(seats, default=-1))
        have = self.table.shape[1]
        if rows > have:
            more = max(rows, 2 * have) - have
            self.table = F.pad(self.table, (*(0, 0) * (self.table.dim() - 2), 0, more))
        for row, seat in enumerate(seats):
            self.table[:, seat] = other.table[:, row]
        return Cross(self.table, rows, self.slots, self.kept)

    def narrow(self, rows: int) -> "Cross":
        """The first rows; the seats behind them are free for `put`."""
        return Cross(self.table, rows, self.slots, self.kept)
