"""Drafters' memories: what they keep per row, as the engine's rows come, move and go."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from outrider.types import Cache


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


class Several(NamedTuple):
    """The caches of several draft models side by side."""

    stores: tuple[Cache, ...]

    def take(self, rows: Sequence[int]) -> "Several":
        """These rows of each."""
        return Several(tuple(store.take(rows) for store in self.stores))

    def put(self, seats: Sequence[int], other: "Several") -> "Several":
        """The other's rows into each."""
        pairs = zip(self.stores, other.stores, strict=True)
        return Several(tuple(mine.put(seats, theirs) for mine, theirs in pairs))

    def narrow(self, rows: int) -> "Several":
        """The first seats of each."""
        return Several(tuple(store.narrow(rows) for store in self.stores))
