"""K-SEQ on a CPU (SpecTr, Sun, Suresh et al. 2023): node by node, the factor from sorted ratios.

    beta(g) = sum min(q, p / g);   accept each X_k in turn iff u g q(X_k) < p(X_k)
    all refused:  y ~ norm(p - min(q, p / g) (1 - (1 - beta)^K) / beta)

beta changes its form only where g passes a ratio p / q. Ratios between 1 and K are sorted once, the
piece that holds the smallest valid g is found among them, and numbers are bisected inside it.
"""

import math

import numpy as np

from outrider.ops.cpu import host_tables
from outrider.ops.cpu.host_tables import Array
from outrider.ops.cpu.rejection_walk import RejectionWalk
from outrider.types import Draft, DrawKind, Draws, Scores, Verdict


def declines(draft: Draft, scores: Scores, draws: Draws) -> str | None:
    """Why it does not take a draft; None: it does."""
    if fits(draft):
        return None
    return "a node has placed and drawn children, or draws of several laws"


def fits(draft: Draft) -> bool:
    """Whether all draws of a node are independent and of one law, or all its children placed."""
    if draft.laws is None:
        return False
    tables = host_tables.of_draft(draft)
    for kids, kinds, rows in zip(tables.draws, tables.kinds, tables.rows, strict=True):
        for below, how, where in zip(kids, kinds, rows, strict=True):
            drawn = [k for k, kid in enumerate(below) if kid >= 0]
            placed = all(how[k] == DrawKind.FIXED for k in drawn)
            mixed = any(how[k] != DrawKind.WITH or where[k] != where[drawn[0]] for k in drawn)
            if mixed and not placed:
                return False
            if drawn and drawn != list(range(len(drawn))):
                return False
    return True


def verify(draft: Draft, scores: Scores, draws: Draws, *, overlap: bool = True) -> Verdict:
    """Path, count, next token and sum min(p, q) at each examined node.

    Placed children, which rows at temperature 0 have, are tested one by one as in `rejection`.
    """
    walk = RejectionWalk(draft, scores, draws)
    results = []
    for b in range(walk.batch):
        path: list[int] = []
        shared: list[float] = []
        node, going = 0, True
        while going:
            walk.enter(b, node)
            going = False
            below = walk.kids[b][node] if walk.most and len(path) < walk.depth else []
            kids = [kid for kid in below if kid >= 0]
            if not kids:
                break
            drawn = walk.guess(b, node, 0)
            if overlap:
                shared.append(walk.overlap())
            rest = None if walk.kind == DrawKind.FIXED else _Rest(walk, len(kids))
            for k, kid in enumerate(kids):
                drawn = walk.guess(b, node, k) * (1.0 if rest is None else rest.factor)
                if walk.uniform(b, node, k) * drawn < walk.owed(b, kid):
                    path.append(kid)
                    node, going = kid, True
                    break
                if rest is None:
                    walk.refuse(b, last=False)
            else:
                if rest is not None:
                    rest.leave()
        results.append((path, walk.draw(b, node), shared))
    return walk.verdict(results, overlap)


class _Rest:
    """A node's division factor, and what is left once every draw was refused."""

    def __init__(self, walk: RejectionWalk, count: int) -> None:
        assert walk.drafted is not None
        self.walk, self.count = walk, count
        self.owed, self.mass = walk.target.row, walk.mass
        self.scale = self.mass / walk.drawn_mass if walk.drawn_mass > 0 else 0.0
        self.factor = 1.0 if count == 1 else self._factor(walk.drafted.row)

    def _factor(self, drafted: Array) -> float:
        guess = np.multiply(drafted, self.scale, out=self.walk.spare)
        return smallest_factor(self.owed, guess, self.count, self.mass)

    def leave(self) -> None:
        """Take from the target's row what the draws could have been."""
        walk, spare = self.walk, self.walk.spare
        assert walk.drafted is not None
        np.multiply(walk.drafted.row, self.scale * self.factor, out=spare)
        np.minimum(spare, self.owed, out=spare)  # g min(q, p / g)
        beta = min(float(spare.sum(dtype=np.float64)) / (self.mass * self.factor), 1.0)
        taken = 1.0 if beta >= 1 else -math.expm1(self.count * math.log1p(-beta))
        share = taken / beta / self.factor if beta > 0 else 0.0
        np.multiply(spare, share, out=spare)
        np.subtract(self.owed, spare, out=self.owed)
        np.maximum(self.owed, 0, out=self.owed)
        walk.shared, walk.pending = False, True


def smallest_factor(owed: Array, guess: Array, count: int, mass: float = 1.0) -> float:
    """The smallest g in [1, K] with g beta(g) >= 1 - (1 - beta(g))^K; both rows sum to `mass`."""
    at = np.flatnonzero(owed > guess)  # elsewhere p <= q, and min(q, p / g) is p / g
    p, q = owed[at] / mass, guess[at] / mass
    p, q = p.astype(np.float64), q.astype(np.float64)
    below = float(owed.sum(dtype=np.float64)) / mass - float(p.sum())
    never = p >= count * q  # min(q, p / g) is q for every g up to K
    above, p, q = float(q[never].sum()), p[~never], q[~never]
    ratio = p / q
    order = ratio.argsort()
    ratio, p, q = ratio[order], p[order], q[order]
    # with g between two ratios: beta = (below + p of smaller ratios) / g + q of larger ones
    small = np.concatenate([[0.0], p.cumsum()]) + below
    large = above + np.concatenate([q[::-1].cumsum()[::-1], [0.0]])

    def enough(g: float, piece: int) -> bool:
        beta = float(small[piece]) / g + float(large[piece])
        return g * beta >= 1 - max(1 - beta, 0.0) ** count

    beta = small[1:] / ratio + large[1:]
    valid = ratio * beta >= 1 - np.maximum(1 - beta, 0) ** count
    piece = int(valid.argmax()) if valid.any() else len(ratio)
    low = float(ratio[piece - 1]) if piece else 1.0
    high = float(ratio[piece]) if piece < len(ratio) else float(count)
    if enough(low, piece):
        return low
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle, piece) else (middle, high)
    return high
