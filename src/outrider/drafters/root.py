"""The root-only drafter: a tree with nothing below the pending token. Plain decoding."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.drafters.memory import Nothing
from outrider.tree import branching, children
from outrider.types import Context, Draft, Kind, Scores, Shape, Verdict


@dataclass(frozen=True)
class Root:
    """Proposes nothing: every step emits one token of the target. Every benchmark's baseline."""

    name: str = "root"
    kinds: frozenset[Kind] = frozenset()
    is_chain: bool = True
    max_nodes: int = 1
    hidden: ClassVar[bool] = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape that it was made for."""
        return (Shape(self.max_nodes, self.max_nodes, 0, self.is_chain),)

    def open(self, context: Context, capacity: int) -> Nothing:
        """Nothing to remember."""
        return Nothing()

    def propose(self, memory: Nothing, context: Context, shape: Shape) -> Draft:
        """Node 0 alone."""
        return bare(context)

    def commit(
        self, memory: Nothing, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Nothing to learn."""


def bare(context: Context) -> Draft:
    """The draft with only the pending token."""
    device = context.length_B.device
    table = children((), device)
    none = torch.full_like(table, -1)
    return Draft(
        pending(context),
        branching((), device),
        none,
        torch.zeros_like(none),
        none,
        None,
        frozenset(),
    )


def pending(context: Context) -> Tensor:
    """The last committed token of each row, [B, 1]."""
    return context.tokens_BL.gather(1, context.length_B[:, None] - 1)
