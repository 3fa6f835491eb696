"""Outcomes out of 0 .. V - 1: g's are drawn, and verified, as drafted tokens are.

Children of a node are drawn from g's law there without replacement; the rules are those of
`outrider.verifiers`, in float64. With shared noise g's draws take the noise that f's take.
"""

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.stochastic.laws import Probabilities
from outrider.stochastic.proposal import Proposal, RoundVerdict
from outrider.tree import children
from outrider.types import Draft, DrawKind, Draws, Laws, Scores, Verifier


def laws_of(probs_BNV: Tensor) -> Laws:
    """Probabilities as the laws that rules read."""
    one = torch.ones(len(probs_BNV), dtype=torch.float64)
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
    even = torch.full((rows, nodes, vocab), 1 / vocab, dtype=torch.float64)  # where nobody looks
    said, guess = even.clone(), even
    said[_columns(proposal.asked)] = target.probs_nV
    for places, table in proposal.guesses:
        assert isinstance(table, Probabilities)
        guess[_columns(places)] = table.probs_nV
    there = torch.tensor(proposal.there)
    tokens = torch.tensor([[value or 0 for value in row] for row in proposal.outcomes])
    table_1NK = children(counts)
    draws = torch.where((table_1NK >= 0) & there[:, table_1NK[0].clamp(min=0)], table_1NK, -1)
    kind = DrawKind.COUPLED if shared else DrawKind.WITHOUT
    node = torch.arange(nodes)[None, :, None]
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
    where = torch.tensor(places, dtype=torch.int64).view(-1, 2)
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
