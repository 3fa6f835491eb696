"""Traversal verification of a tree on a CPU (Weng et al. 2025): leaves first, lazily.

    visit(v, w):  m = w p_v
        for child x in draw order, drawn from q:
            visit(x, min(1, m(x) / q(x)));  done if anything there is kept
            S = sum (m - q)+,  m <- (m - q)+ / (S + 1 - w),  w <- S / (S + 1 - w)
        keep v iff u_v < w, then y ~ m / w

Only nodes that are visited are normalised, and a child without a chance is not visited. Each depth
has its own two rows, because a node is taken up again after its child was refused. A mass is kept
as a row and a factor, so that refusing a placed child changes two numbers.
"""

import numpy as np

from outrider.noise import Purpose
from outrider.ops.cpu import keys
from outrider.ops.cpu.host_tables import Array, per_thread
from outrider.ops.cpu.law_slices import pick
from outrider.ops.cpu.rejection_walk import LITTLE, RejectionWalk
from outrider.types import Draft, DrawKind, Draws, Scores, Verdict


@per_thread
def _stack(depth: int, vocab: int, dtype: str) -> Array:
    return np.empty((2, depth, vocab), dtype=dtype)


class _Visit:
    """One row of the batch. `left` is what the node where the walk stopped still owes."""

    def __init__(self, walk: RejectionWalk, b: int, overlap: bool) -> None:
        self.walk, self.b, self.overlap = walk, b, overlap
        vocab, dtype = walk.vocab, walk.target.dtype
        self.mass, self.guess = _stack(max(walk.depth, 1), vocab, dtype)
        self.left: Array | None = None  #: None: the whole law of the node `last`
        self.last = 0
        self.shared: list[float] = []

    def node(self, node: int, weight: float, depth: int) -> list[int] | None:
        """The kept path below a node, or None if the node is refused."""
        walk, b = self.walk, self.b
        kids = walk.kids[b][node] if walk.most and depth < walk.depth else []
        if not kids or max(kids) < 0:
            return self._end(node, weight, None)
        mass = self.mass[depth]
        total = walk.target.fill(b, node)
        np.multiply(walk.target.row, weight / total if total > 0 else 0.0, out=mass)
        factor, whole = 1.0, weight
        guess, guessed, loaded = mass, 1.0, -1  #: the draft's weights, their sum, their law row
        gone: list[int] = []
        for k, kid in enumerate(kids):
            if kid < 0:
                continue
            token = walk.tokens[b][kid]
            placed = walk.drafted is None or walk.kinds[b][node][k] == DrawKind.FIXED
            owed, drawn = float(mass[token]) * factor, 1.0
            if not placed:
                assert walk.drafted is not None
                without = walk.kinds[b][node][k] == DrawKind.WITHOUT
                row = walk.rows[b][node][k]
                if loaded != row or (gone and not without):
                    guess, guessed = walk.drafted.borrow(b, row, self.guess[depth])
                    loaded = row if without else -1
                    if without and gone:
                        guess, guessed = self._lacking(guess, gone, depth, row)
                drawn = float(guess[token]) / guessed if guessed > 0 else 0.0
            chance = min(1.0, owed / drawn) if drawn > 0 else float(owed > 0)
            if chance > 0:
                found = self.node(kid, chance, depth + 1)
                if found is not None:
                    if self.overlap:
                        fresh = k == 0 and not placed and whole > 0
                        known = (mass, whole, guess, guessed) if fresh else None
                        self.shared.insert(0, self._share(node, depth, known))
                    return [kid, *found]
            if placed:
                mass[token] = 0
                surplus = max(weight - owed, 0.0)
            else:
                np.multiply(guess, 1 / guessed if guessed > 0 else 0.0, out=walk.spare)
                if factor != 1.0:
                    np.multiply(mass, factor, out=mass)
                    factor = 1.0
                np.subtract(mass, walk.spare, out=walk.spare)
                np.maximum(walk.spare, 0, out=walk.spare)
                surplus = float(walk.spare.sum())
            bottom = surplus + 1 - weight
            if bottom > walk.empty:
                if not placed:
                    mass[:] = walk.spare
                factor, weight = factor / bottom, surplus / bottom
            if not placed and without:
                gone.append(token)
                if loaded in walk.rows[b][node][k + 1 :]:  # a later sibling comes from what is left
                    guess, guessed = self._lacking(guess, gone, depth, loaded)
        found = self._end(node, weight, mass)
        if found is not None and self.overlap:
            self.shared.insert(0, self._share(node, depth, None))
        return found

    def _share(
        self, node: int, depth: int, known: tuple[Array, float, Array, float] | None
    ) -> float:
        """Sum of min(p, q) for a node's first draw. Asked only where the walk has passed or ended.

        `known`: p with its sum and q with its sum, where neither was changed since.
        """
        walk, b = self.walk, self.b
        kid = walk.kids[b][node][0]
        if kid < 0:
            return float("nan")
        if known is None:
            whole, row = walk.target.fill(b, node), walk.target.row
            if not whole > 0:
                return float("nan")
            if walk.drafted is None or walk.kinds[b][node][0] == DrawKind.FIXED:
                return float(row[walk.tokens[b][kid]]) / whole
            guess, guessed = walk.drafted.borrow(b, walk.rows[b][node][0], self.guess[depth])
        else:
            row, whole, guess, guessed = known
        unit = whole / guessed if guessed > 0 else 0.0
        np.minimum(row, np.multiply(guess, unit, out=walk.spare), out=walk.spare)
        return float(walk.spare.sum()) / whole

    def _lacking(self, guess: Array, gone: list[int], depth: int, row: int) -> tuple[Array, float]:
        """The draft's weights without the tokens that are gone, in this depth's own row, and their
        sum."""
        own, drafted = self.guess[depth], self.walk.drafted
        assert drafted is not None
        np.copyto(own, guess)
        own[gone] = 0
        left = float(own.sum())
        if left < LITTLE:
            left = drafted.fill_without(self.b, row, gone)
            np.copyto(own, drafted.row)
        return own, left

    def _end(self, node: int, weight: float, mass: Array | None) -> list[int] | None:
        """The node's own test; the root always passes."""
        if node and not self.walk.uniform(self.b, node, 0) < weight:
            return None
        self.left, self.last = mass, node
        return []

    def draw(self) -> int:
        """The next token from what is left where the walk stopped."""
        walk, left = self.walk, self.left
        if left is None:
            walk.enter(self.b, self.last)
            left = walk.target.row
        if walk.race is not None:
            return int((left / walk.race[self.b]).argmax())
        key = keys.stream(walk.seeds[self.b], walk.starts[self.b], Purpose.RESIDUAL)
        token, _ = pick(left, keys.fine_uniform(key, 0))
        return min(token, walk.vocab - 1)


def verify(draft: Draft, scores: Scores, draws: Draws, *, overlap: bool = True) -> Verdict:
    """Path, count and next token. u_v is the uniform of draw 0 at node v."""
    walk = RejectionWalk(draft, scores, draws)
    results = []
    for b in range(walk.batch):
        visit = _Visit(walk, b, overlap)
        path = visit.node(0, 1.0, 0)
        assert path is not None
        results.append((path, visit.draw(), visit.shared[: walk.depth]))
    return walk.verdict(results, overlap)
