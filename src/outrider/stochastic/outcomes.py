"""Outcomes out of 0 .. V - 1: g's are drawn, and verified, as drafted tokens are.

Children of a node are drawn from g's law there without replacement; the rules are those of
`outrider.verifiers`, in float64. With shared noise g's draws take the noise that f's take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.stochastic.laws import LawTable, Probabilities
from outrider.tree import children
from outrider.types import Draft, DrawKind, Draws, Laws, Scores, Tree, Verifier

# What g has run ahead in one round, and what the rules make of it: plain lists, row by row.

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
        return len(self.states)


class RoundVerdict(NamedTuple):
    """The verdict on each row."""

    paths: list[list[int]]  #: accepted nodes
    following: list[Any]  #: the outcome behind them; of no meaning behind a state that ended
    overlap: float  #: sum of sum min(f, g) over examined positions, or an unbiased guess of it
    overlaps: int  #: how many there were


def laws_of(probs_BNV: Tensor) -> Laws:
    """Probabilities as the laws that rules read."""
    one = probs_BNV.new_ones(len(probs_BNV), dtype=torch.float64)
    return Laws(probs_BNV.log(), one, greedy="none")


def drawn(table: Probabilities, keys_n: Tensor, count: int) -> list[list[int]]:
    """Up to `count` different outcomes of each law, in draw order: fewer if it has no more."""
    scores = ops.merit(laws_of(table.probs_nV[:, None]), keys_n[:, None])
    found, there = ops.largest(scores, count)
    both = zip(found[:, 0].tolist(), there[:, 0].tolist(), strict=True)
    return [[v for v, is_there in zip(*pair, strict=True) if is_there] for pair in both]


def draft_keys(seed_n: Tensor, start_n: Tensor, node: Tensor, depth: int, shared: bool) -> Tensor:
    """The stream that g's draws at a node of this depth come from."""
    if shared:
        return noise.stream(seed_n, start_n + 1 + depth, noise.Purpose.TARGET)
    keys = noise.stream(seed_n, start_n, noise.Purpose.DRAFT)
    return noise.stream(keys, node, noise.Purpose.DRAFT)


def as_draft(proposal: Proposal, shared: bool) -> tuple[Draft, Scores]:
    """The proposal as a draft of tokens, and f's laws as a target's scores."""
    target = proposal.target
    assert isinstance(target, Probabilities)
    counts = proposal.counts
    rows, nodes, vocab = proposal.rows, proposal.tree.nodes, target.probs_nV.shape[1]
    # where nobody looks
    even = torch.full((rows, nodes, vocab), 1 / vocab, dtype=torch.float64, device="cpu")
    said, guess = even.clone(), even
    said[_columns(proposal.asked)] = target.probs_nV
    for places, table in proposal.guesses:
        assert isinstance(table, Probabilities)
        guess[_columns(places)] = table.probs_nV
    there = torch.tensor(proposal.there, device="cpu")
    outcomes = [[value or 0 for value in row] for row in proposal.outcomes]
    tokens = torch.tensor(outcomes, device="cpu")
    table_1NK = children(counts)
    draws = torch.where((table_1NK >= 0) & there[:, table_1NK[0].clamp(min=0)], table_1NK, -1)
    kind = DrawKind.COUPLED if shared else DrawKind.WITHOUT
    node = torch.arange(nodes, device="cpu")[None, :, None]
    draft = Draft(
        tokens,
        proposal.tree,
        draws,
        torch.full_like(draws, int(kind)),
        torch.where(draws >= 0, node, -1),
        laws_of(guess) if counts else None,
        frozenset({kind} if counts else ()),
    )
    return draft, Scores(laws_of(said))


def _columns(places: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    where = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, 2)
    return where[:, 0], where[:, 1]


def verify(rule: Verifier, proposal: Proposal, shared: bool) -> RoundVerdict:
    """The rule's verdict on every row."""
    draft, scores = as_draft(proposal, shared)
    verdict = rule(draft, scores, Draws(proposal.seeds_B, proposal.starts_B))
    paths = [[node for node in row if node >= 0] for row in verdict.path_BD.tolist()]
    overlap, overlaps = 0.0, 0
    if verdict.overlap_BD is not None:
        seen = verdict.overlap_BD[~verdict.overlap_BD.isnan()]
        overlap, overlaps = float(seen.sum()), len(seen)
    return RoundVerdict(paths, verdict.next_B.tolist(), overlap, overlaps)
