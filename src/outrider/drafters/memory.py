"""Drafters' memories: what they keep per row, as the engine's rows come, move and go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from outrider.rows import Columns, seated
from outrider.types import Cache


class Copied(Protocol):
    """What a row keeps on the host."""

    def copy(self) -> Self:
        """The same, to be continued apart."""


R = TypeVar("R", bound=Copied)


class Nothing(NamedTuple):
    """The memory of a drafter that keeps none: the committed tokens are all it needs."""

    def take(self, rows: Sequence[int]) -> Self:
        """Nothing of these rows."""
        return self

    def put(self, seats: Sequence[int], other: Self) -> Self:
        """Nothing more."""
        return self

    def narrow(self, rows: int) -> Self:
        """Nothing less."""
        return self


@dataclass(frozen=True)
class Several(Columns):
    """The caches of several draft models side by side."""

    stores: tuple[Cache, ...]


@dataclass(frozen=True)
class Rows(Generic[R]):
    """An object of the host for every row."""

    rows: tuple[R, ...]

    def take(self, rows: Sequence[int]) -> "Rows[R]":
        """Copies of these."""
        return Rows(tuple(self.rows[row].copy() for row in rows))

    def put(self, seats: Sequence[int], other: "Rows[R]") -> "Rows[R]":
        """The other's in these seats."""
        return Rows(seated(self.rows, seats, other.rows))

    def narrow(self, rows: int) -> "Rows[R]":
        """The first ones."""
        return Rows(self.rows[:rows])
