"""Who sits where: the seats of a run and the queue in front of them. Host only."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class SlotTable:
    """`count` seats, of which the first `len(rows)` are taken, without a hole.

    >>> seats = SlotTable(8, [10, 11, 12, 13])
    >>> seats.moves([1, 3])
    ([1], [2])
    >>> seats.leave([1, 3]); seats.rows
    [10, 12]
    """

    count: int
    rows: list[int] = field(default_factory=list)  #: request of each row of the batch
    waiting: deque[int] = field(default_factory=deque)  #: requests, first come first served

    def ahead(self) -> list[int]:
        """Those of the queue for whom there is a seat."""
        free = self.count - len(self.rows)
        return [number for number, _ in zip(self.waiting, range(free), strict=False)]

    def moves(self, gone: Sequence[int]) -> tuple[list[int], list[int]]:
        """If these rows left, in order: (holes, rows from the end that would move there)."""
        left = len(self.rows) - len(gone)
        holes = [row for row in gone if row < left]
        return holes, [row for row in range(left, len(self.rows)) if row not in gone]

    def leave(self, gone: Sequence[int]) -> None:
        """Free the seats of these rows."""
        for hole, mover in zip(*self.moves(gone), strict=True):
            self.rows[hole] = self.rows[mover]
        del self.rows[len(self.rows) - len(gone) :]
