"""Drafters' memories: what they keep per row, as the engine's rows come, move and go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from outrider.row_params import RowTable, scatter_items
from outrider.types import Cache, Context, Draft, Scores, Verdict


class Copied(Protocol):
    """What a row keeps on the host."""

    def copy(self) -> Self:
        """The same, to be continued apart."""


R = TypeVar("R", bound=Copied)


class NoMemory(NamedTuple):
    """The memory of a drafter that keeps none: the committed tokens are all it needs."""

    def take(self, rows: Sequence[int]) -> Self:
        return self

    def put(self, into: Sequence[int], other: Self) -> Self:
        return self

    def narrow(self, rows: int) -> Self:
        return self


class LearnsNothing:
    """What a drafter that reads no states and learns from no step says of both."""

    aux_layers: ClassVar[tuple[int, ...]] = ()

    def commit(
        self, memory: object, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Nothing to learn."""


class Forgetful(LearnsNothing):
    """What a drafter without a memory of its own does about one: nothing."""

    def open(self, context: Context, capacity: int) -> NoMemory:
        """The engine's own tokens, and the target's cache, are all the memory it needs."""
        return NoMemory()


@dataclass(frozen=True)
class Several(RowTable):
    """The caches of several draft models side by side."""

    stores: tuple[Cache, ...]


@dataclass(frozen=True)
class RowMemories(Generic[R]):
    """An object of the host for every row."""

    rows: tuple[R, ...]

    def take(self, rows: Sequence[int]) -> "RowMemories[R]":
        return RowMemories(tuple(self.rows[row].copy() for row in rows))

    def put(self, into: Sequence[int], other: "RowMemories[R]") -> "RowMemories[R]":
        return RowMemories(scatter_items(self.rows, into, other.rows))

    def narrow(self, rows: int) -> "RowMemories[R]":
        return RowMemories(self.rows[:rows])
