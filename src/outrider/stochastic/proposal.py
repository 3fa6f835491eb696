"""What g has run ahead in one round, and what the rules make of it: plain lists, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from outrider.stochastic.laws import LawTable
from outrider.types import Tree

Place = tuple[int, int]  #: a row, and a node of its tree


@dataclass
class Proposal:
    """Trees of states below the present state (node 0) of each row. One topology for all rows.

    A state is None where a row has no such node: the row ends before, or g has too few outcomes.
    """

    tree: Tree
    counts: tuple[int, ...]  #: children of a node, by depth
    children: Sequence[Sequence[int]]  #: of each node
    states: list[list[Any]]  #: [B][N]
    outcomes: list[list[Any]]  #: [B][N]: what led to each node from its parent
    there: list[list[bool]]  #: [B][N]
    ended: list[list[bool]]  #: [B][N]: nothing comes behind this state
    seeds_B: Tensor
    starts_B: Tensor  #: outcomes of each row before this round
    guesses: list[tuple[list[Place], LawTable]]  #: g's laws, level by level
    asked: list[Place]  #: where f was asked, and
    target: LawTable  #: what it said

    @property
    def rows(self) -> int:
        """B."""
        return len(self.states)


class RoundVerdict(NamedTuple):
    """The verdict on each row."""

    paths: list[list[int]]  #: accepted nodes
    following: list[Any]  #: the outcome behind them; of no meaning behind a state that ended
    overlap: float  #: sum of sum min(f, g) over examined positions, or an unbiased guess of it
    overlaps: int  #: how many there were
