"""What a lean decoder keeps of its sources, and how it attends to them.

The encoder's states become keys and values once per row. Attention is compiled for bfloat16 and
float32, in one order of sums for every number of nodes. Else it is two products, as torch's fused
kernel takes another path for one query than for several, eight times as slow over the 1,500 states
of a Whisper's window.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models import batch_invariance
from outrider.models.attention import BatchInvariantAttention, unscaled
from outrider.models.batch_invariance import PaddingPolicy
from outrider.models.cpu_kernels import cross_attention
from outrider.models.decoder import additive


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

    `table` is [planes, max_rows, H, ...]: keys of layer i in plane 2 i, its values in 2 i + 1, each
    as `kept` has them. `slots` says how many states a row has. Newcomers are written into free
    rows; nobody else's entries are copied while there are any, and no source is longer.
    """

    def __init__(self, table: Tensor, slots: Sequence[int], most: int, kept: Kept) -> None:
        """`most` is the number of states that the table has room for."""
        self.table, self.rows, self.slots, self.kept = table, len(slots), [*slots], kept
        self.most = most
        self._planes = table[:, : self.rows].unbind(0)  # once: every layer of every call reads two
        self._slots_B = torch.tensor(self.slots, dtype=torch.int64)
        self._masks: dict[int, Tensor | None] = {}

    def attend(self, layer: int, q_BQHE: Tensor, scale: float) -> Tensor:
        """softmax(scale q k') v [B, Q, H E] over the states of each row's source."""
        keys, values = self._planes[2 * layer], self._planes[2 * layer + 1]
        if self.kept.compiled:
            made = cross_attention.attend(q_BQHE, keys, values, self._slots_B, self.most, scale)
            return made.flatten(2)
        mask = self._mask(q_BQHE)
        x_BHQE = self.kept.attention(q_BQHE.transpose(1, 2) * scale, keys, values, mask)
        return x_BHQE.transpose(1, 2).reshape(*q_BQHE.shape[:2], -1)

    def compiled(self) -> tuple[Tensor, Tensor, int] | None:
        """Planes of the rows in use, states of each and most of them; None: not read by kernels."""
        return (
            (self.table[:, : self.rows], self._slots_B, self.most) if self.kept.compiled else None
        )

    def _mask(self, q_BQHE: Tensor) -> Tensor | None:
        """What queries see of shorter sources; None if all are of one length."""
        queries = q_BQHE.shape[1]
        if queries not in self._masks:
            there_BT = torch.arange(self.most) < self._slots_B[:, None]
            seen = additive(there_BT[:, None].expand(-1, queries, -1), q_BQHE.dtype)
            whole = all(slots == self.most for slots in self.slots)
            self._masks[queries] = None if whole else self.kept.attention.mask(seen)
        return self._masks[queries]

    def take(self, rows: Sequence[int]) -> "Cross":
        """A copy of these rows, in this order."""
        table = torch.cat([self.table[:, :0], *(self.table[:, r : r + 1] for r in rows)], 1)
        return Cross(table, [self.slots[row] for row in rows], self.most, self.kept)

    def put(self, into: Sequence[int], other: "Cross") -> "Cross":
        """The rows of `other` in these rows; numbers behind the last row add rows."""
        rows, most = max(self.rows, 1 + max(into, default=-1)), max(self.most, other.most)
        have = self.table.shape[1]
        if rows > have:
            more = max(rows, 2 * have) - have
            self.table = F.pad(self.table, (*(0, 0) * (self.table.dim() - 2), 0, more))
        self.table = self._room(other.table)
        slots = self.slots + [0] * (rows - self.rows)
        used = slice(0, other.table.shape[3])
        for row, at in enumerate(into):
            self.table[:, at, :, used] = other.table[:, row]
            slots[at] = other.slots[row]
        return Cross(self.table, slots, most, self.kept)

    def _room(self, other: Tensor) -> Tensor:
        """The table with as much room in a row as another one has: states lie in their order."""
        more = other.shape[3] - self.table.shape[3]
        behind = (0, 0) * (self.table.dim() - 4)
        return F.pad(self.table, (*behind, 0, more)) if more > 0 else self.table

    def narrow(self, rows: int) -> "Cross":
        """The first rows; those behind them are free for `put`."""
        return Cross(self.table, self.slots[:rows], self.most, self.kept)
