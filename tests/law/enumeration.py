"""Exact enumeration: every draft that can be drawn, times the exact outcome of judging it.

A `World` holds context-dependent laws of target and draft over a tiny vocabulary. `joint` multiplies
out: probability of the draft x probability of stopping at each node x law of the next token there,
extended by the target to a common length. A lossless rule gives the target's own joint law.
"""

from collections.abc import Callable, Iterator
from itertools import permutations, product

import numpy as np
import torch

from outrider.tree import branching, children
from outrider.types import Draft, Kind, Laws, Scores, Tree, Verifier

Prefix = tuple[int, ...]


class World:
    """Laws of both models at every prefix, with zeros, equal laws and disjoint supports on request."""

    def __init__(self, vocab: int, seed: int, case: str = "random") -> None:
        self.vocab, self.case = vocab, case
        self.rng = np.random.default_rng(seed)
        self.laws: dict[tuple[str, Prefix], np.ndarray] = {}
        self.tails: dict[tuple[Prefix, int], np.ndarray] = {}

    def _fresh(self) -> np.ndarray:
        return self.rng.dirichlet(np.full(self.vocab, 0.7))

    def _fill(self, prefix: Prefix) -> None:
        p, q = self._fresh(), self._fresh()
        if self.case == "zeros":
            p[self.rng.integers(self.vocab)] = 0
            q[self.rng.integers(self.vocab)] = 0
        elif self.case == "equal":
            q = p.copy()
        elif self.case == "disjoint":
            half = self.vocab // 2
            p[:half], q[half:] = 0, 0
        elif self.case == "hot target":
            p = np.eye(self.vocab)[self.rng.integers(self.vocab)]
        elif self.case == "hot draft":
            q = np.eye(self.vocab)[self.rng.integers(self.vocab)]
        self.laws["target", prefix] = p / p.sum()
        self.laws["draft", prefix] = q / q.sum()

    def law(self, side: str, prefix: Prefix) -> np.ndarray:
        if (side, prefix) not in self.laws:
            self._fill(prefix)
        return self.laws[side, prefix]


CASES = ("random", "zeros", "equal", "disjoint", "hot target", "hot draft")


def orders(law: np.ndarray, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every ordered draw without replacement, with its probability; short if the support is."""
    support = [v for v in range(len(law)) if law[v] > 0]
    for order in permutations(support, min(count, len(support))):
        probability, left = 1.0, 1.0
        for token in order:
            probability *= law[token] / left if left > 0 else 0.0
            left -= law[token]
        yield order, probability


def drafts_without(world: World, counts: tuple[int, ...]) -> tuple[Draft, torch.Tensor]:
    """All trees with children drawn without replacement (RSD-C), one per batch row, and their law."""
    tree, table = branching(counts), children(counts)
    nodes = tree.nodes
    kids = [[k for k in table[0, n].tolist() if k >= 0] for n in range(nodes)]
    found: list[tuple[dict[int, int], set[int], float]] = []

    def grow(node: int, tokens: dict[int, int], absent: set[int], weight: float) -> None:
        while node < nodes and not kids[node]:
            node += 1
        if node == nodes:
            found.append((dict(tokens), set(absent), weight))
            return
        if node in absent:
            grow(node + 1, tokens, absent | set(kids[node]), weight)
            return
        law = world.law("draft", prefix_of(tree, tokens, node))
        for order, probability in orders(law, len(kids[node])):
            placed = dict(zip(kids[node], order, strict=False))
            missing = set(kids[node][len(order) :])
            grow(node + 1, tokens | placed, absent | missing, weight * probability)

    grow(0, {}, set(), 1.0)
    return _pack(world, tree, table, found, Kind.WITHOUT)


def drafts_iid(world: World, counts: tuple[int, ...]) -> tuple[Draft, torch.Tensor]:
    """All trees whose children are drawn independently (repeats allowed as separate nodes)."""
    tree, table = branching(counts), children(counts)
    parents = tree.parent_BN[0].tolist()
    found = []
    for values in product(range(world.vocab), repeat=tree.nodes - 1):
        tokens = dict(enumerate(values, start=1))
        weight = 1.0
        for node in range(1, tree.nodes):
            weight *= world.law("draft", prefix_of(tree, tokens, parents[node]))[tokens[node]]
        if weight > 0:
            found.append((tokens, set(), weight))
    return _pack(world, tree, table, found, Kind.WITH)


def drafts_fixed(
    world: World,
    counts: tuple[int, ...],
    choose: Callable[[np.ndarray, int], list[int]] | None = None,
) -> tuple[Draft, torch.Tensor]:
    """The one tree of each node's most probable tokens."""
    tree, table = branching(counts), children(counts)
    tokens: dict[int, int] = {}
    for node in range(tree.nodes):
        kids = [k for k in table[0, node].tolist() if k >= 0]
        best = np.argsort(-world.law("draft", prefix_of(tree, tokens, node)), kind="stable")
        tokens |= dict(zip(kids, best[: len(kids)].tolist(), strict=False))
    return _pack(world, tree, table, [(tokens, set(), 1.0)], Kind.FIXED)


def prefix_of(tree: Tree, tokens: dict[int, int], node: int) -> Prefix:
    parents, path = tree.parent_BN[0].tolist(), []
    while node > 0:
        path.append(tokens.get(node, 0))
        node = parents[node]
    return tuple(reversed(path))


def _pack(
    world: World,
    tree: Tree,
    table: torch.Tensor,
    found: list[tuple[dict[int, int], set[int], float]],
    kind: Kind,
) -> tuple[Draft, torch.Tensor]:
    rows, nodes = len(found), tree.nodes
    tokens = torch.zeros(rows, nodes, dtype=torch.int64)
    draws = table.repeat(rows, 1, 1)
    logits = torch.full((rows, nodes, world.vocab), -torch.inf, dtype=torch.float64)
    for row, (chosen, absent, _) in enumerate(found):
        for node, token in chosen.items():
            tokens[row, node] = token
        for node in range(nodes):
            law = world.law("draft", prefix_of(tree, chosen, node))
            logits[row, node] = torch.from_numpy(law).log()
        for node in absent:
            draws[row][draws[row] == node] = -1
    inverse = torch.ones(rows, dtype=torch.float64)
    laws = None if kind is Kind.FIXED else Laws(logits, inverse, greedy="none")
    row_table = torch.where(table >= 0, torch.arange(nodes)[None, :, None], -1)
    if kind is Kind.FIXED:
        row_table = torch.full_like(table, -1)
    draft = Draft(
        tokens, tree, draws, torch.full_like(table, int(kind)), row_table, laws, frozenset({kind})
    )
    return draft, torch.tensor([w for *_, w in found], dtype=torch.float64)


def scores_of(world: World, draft: Draft) -> Scores:
    rows, nodes = draft.tokens_BN.shape
    logits = torch.full((rows, nodes, world.vocab), -torch.inf, dtype=torch.float64)
    for row in range(rows):
        tokens = dict(enumerate(draft.tokens_BN[row].tolist()))
        for node in range(nodes):
            law = world.law("target", prefix_of(draft.tree, tokens, node))
            logits[row, node] = torch.from_numpy(law).log()
    return Scores(Laws(logits, torch.ones(rows, dtype=torch.float64), greedy="none"))


def joint(world: World, rule: Verifier, draft: Draft, weights: torch.Tensor) -> np.ndarray:
    """Law of the first D + 1 emitted tokens."""
    outcome = rule.outcome(draft, scores_of(world, draft))
    length = draft.tree.max_depth + 1
    law = np.zeros((world.vocab,) * length)
    stop = (weights[:, None] * outcome.stop_BN).numpy()
    following = outcome.next_BNV.numpy()
    for row in range(draft.tokens_BN.shape[0]):
        tokens = dict(enumerate(draft.tokens_BN[row].tolist()))
        for node in range(draft.tree.nodes):
            if stop[row, node] == 0:
                continue
            prefix = prefix_of(draft.tree, tokens, node)
            for token in range(world.vocab):
                mass = stop[row, node] * following[row, node, token]
                if mass:
                    emitted = (*prefix, token)
                    law[emitted] += mass * tail(world, emitted, length - len(emitted))
    return law


def tail(world: World, prefix: Prefix, length: int) -> np.ndarray:
    """The target's joint law of the next `length` tokens after `prefix`."""
    key = (prefix, length)
    if key not in world.tails:
        if length == 0:
            world.tails[key] = np.ones(())
        else:
            law = world.law("target", prefix)
            world.tails[key] = np.stack(
                [law[v] * tail(world, (*prefix, v), length - 1) for v in range(world.vocab)]
            )
    return world.tails[key]


def truth(world: World, length: int) -> np.ndarray:
    return tail(world, (), length)
