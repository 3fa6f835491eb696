"""Rejection on a CPU, over chains and trees, and the state of such a walk.

The state: the node's target law, the draft's law, what is left.

Three scratch rows serve a whole verification, however many nodes are visited:

    left    what the target still owes at this node: its weights, then residuals of them
    drawn   the weights of the law that the current child was drawn from
    spare   for products of the two
"""

import numpy as np

from outrider.noise import Purpose
from outrider.ops.cpu import host_tables, keys
from outrider.ops.cpu.law_slices import WeightRows, excess, pick, scratch, total
from outrider.ops.reference.probs import EMPTY
from outrider.types import Draft, DrawKind, Draws, Scores, Verdict

LARGEST = 3e38  #: largest factor of a row that float32 holds
NOTHING = 1e-12  #: a reach below this keeps nothing that 24-bit uniforms could tell
LITTLE = 1e-3  #: a law with less left is made again from its logits


class RejectionWalk:
    """One verification call. Rows are verified one after another; positions lazily."""

    def __init__(self, draft: Draft, scores: Scores, draws: Draws) -> None:
        laws = scores.laws
        self.target = WeightRows(laws, 0)
        vocab = self.target.vocab
        self.drafted = None if draft.laws is None else WeightRows(draft.laws, 1, vocab)
        self.spare_both = scratch(vocab, self.target.dtype, 2)
        self.spare, self.spare_tensor = self.spare_both
        self.batch = laws.logits_BRV.shape[0]
        self.depth = draft.tree.max_depth
        self.most = draft.draws_BNK.shape[2]
        tables = host_tables.of_draft(draft)
        self.tokens, self.kids = tables.tokens, tables.draws
        self.kinds, self.rows = tables.kinds, tables.rows
        self.empty = 0.0 if self.target.double else EMPTY
        self.seeds: list[int] = draws.seed_B.tolist()
        self.starts: list[int] = draws.start_B.tolist()
        self.injected = None if draws.uniform_BNK is None else draws.uniform_BNK.tolist()
        self.race = None if draws.race_BV is None else draws.race_BV.numpy()
        self.accept: list[int | None] = [None] * self.batch
        self.vocab = vocab
        self.mass = self.entered = self.drawn_mass = self.whole = 1.0
        self.loaded: int | None = None
        self.shared = self.pending = False
        self.refused: list[int] = []
        self.kind, self.token = DrawKind.FIXED, 0

    def kid(self, b: int, node: int, k: int) -> int:
        """Child of draw k at a node, -1 if there is none."""
        return self.kids[b][node][k] if self.most else -1

    def uniform(self, b: int, node: int, k: int) -> float:
        """The accept test's uniform of draw k at a node."""
        if self.injected is not None:
            return float(self.injected[b][node][k])
        key = self.accept[b]
        if key is None:
            key = keys.stream(self.seeds[b], self.starts[b], Purpose.ACCEPT)
            self.accept[b] = key
        return keys.uniform(key, node * self.most + k)

    def enter(self, b: int, node: int) -> None:
        """Stand at a node: its target law in `left`, nothing refused."""
        self.entered = self.mass = self.target.fill(b, node)
        self.loaded, self.shared, self.pending = None, False, False
        self.refused = []

    def owed(self, b: int, kid: int) -> float:
        """What the target still owes to a child's token, as a probability."""
        if self.mass <= 0:
            return 0.0
        return float(self.target.row[self.tokens[b][kid]]) / self.mass

    def kept(self, b: int, node: int, kid: int) -> float | None:
        """The draft's probability of a first child from its kept log-sum-exp."""
        if self.drafted is None or self.kinds[b][node][0] == DrawKind.FIXED:
            return None
        return self.drafted.kept(b, self.rows[b][node][0], self.tokens[b][kid])

    def guess(self, b: int, node: int, k: int) -> float:
        """Load the law that draw k came from; its probability of the child's token."""
        self.kind = DrawKind(self.kinds[b][node][k])
        self.token = self.tokens[b][self.kids[b][node][k]]
        self.shared = False
        if self.drafted is None or self.kind == DrawKind.FIXED:
            self.kind = DrawKind.FIXED
            return 1.0
        row = self.rows[b][node][k]
        if self.loaded != row:
            self.whole = self.drawn_mass = self.drafted.fill(b, row)
            self.loaded = row
            if self.kind == DrawKind.WITHOUT:
                self._without(b, row, self.refused)
        if self.drawn_mass <= 0:
            return 0.0
        return float(self.drafted.row[self.token]) / self.drawn_mass

    def overlap(self) -> float:
        """Sum of min(owed, drawn)."""
        if self.kind == DrawKind.FIXED or self.drafted is None:
            return float(self.target.row[self.token]) / self.mass
        np.multiply(self.drafted.row, self.mass / self.drawn_mass, out=self.spare)
        np.minimum(self.target.row, self.spare, out=self.spare)
        self.shared = True
        return total(self.spare, self.spare_tensor) / self.mass

    def refuse(self, b: int, scale: float = 1.0, *, last: bool = True) -> None:
        """Take away what the draft could have drawn: left becomes (scale left - drawn)+.

        With `last` the sum is left to the draw that follows.
        """
        left = self.target.row
        if self.kind == DrawKind.FIXED or self.drafted is None:
            left[self.token] = 0
        else:
            if self.shared and scale == 1.0:  # spare holds min(left, drawn)
                np.subtract(left, self.spare, out=left)
            else:
                factor = min(self.mass / max(self.drawn_mass * scale, 1e-300), LARGEST)
                excess(
                    self.target.both, self.drafted.both, factor, self.spare_both, self.target.both
                )
            if self.kind == DrawKind.WITHOUT and not last:
                self.refused.append(self.token)
                assert self.loaded is not None
                self._without(b, self.loaded, [self.token])
        self.shared = False
        self.pending = last
        if not last:
            self.mass = total(left, self.target.tensor)

    def exceeds(self, scale: float) -> float:
        """Sum of (scale owed - drawn)+, leaving both rows as they are."""
        if scale < NOTHING:  # the sum is below the scale
            return 0.0
        if self.kind == DrawKind.FIXED or self.drafted is None:
            return scale * (1 - float(self.target.row[self.token]) / self.mass)
        factor = min(self.mass / max(self.drawn_mass * scale, 1e-300), LARGEST)
        excess(self.target.both, self.drafted.both, factor, self.spare_both, self.spare_both)
        return total(self.spare, self.spare_tensor) * scale / self.mass

    def draw(self, b: int, node: int) -> int:
        """The next token from what is left, or from the target's law if that is nothing."""
        for _ in range(2):
            if self.race is not None:
                mass = total(self.target.row, self.target.tensor)
                token = int((self.target.row / self.race[b]).argmax())
            else:
                key = keys.stream(self.seeds[b], self.starts[b], Purpose.RESIDUAL)
                token, mass = pick(self.target.row, keys.fine_uniform(key, 0))
            if mass > self.empty * self.entered:
                break
            self.enter(b, node)
        return min(token, self.vocab - 1)

    def verdict(
        self, walks: list[tuple[list[int], int, list[float]]], overlap: bool = True
    ) -> Verdict:
        """The verdict from one (path, next token, overlaps) per row."""
        shares = overlap and self.drafted is not None and self.depth > 0
        return host_tables.verdict(walks, self.depth, self.target.dtype if shares else None)

    def _without(self, b: int, row: int, tokens: list[int]) -> None:
        """Take tokens out of the draft's row; `refused` holds all that are gone."""
        assert self.drafted is not None
        for token in tokens:
            self.drawn_mass -= float(self.drafted.row[token])
            self.drafted.row[token] = 0
        if tokens and self.drawn_mass < 0.01 * self.whole:
            self.drawn_mass = total(self.drafted.row, self.drafted.tensor)
            if self.drawn_mass < LITTLE * self.whole:
                self.drawn_mass = self.drafted.fill_without(b, row, self.refused)


# Token-level verification of a chain on a CPU (Leviathan et al. 2023, algorithm 1).
#
#     accept x_i iff u_i q_i(x_i) < p_i(x_i)
#     at the first refusal y ~ norm((p_i - q_i)+), after the last acceptance y ~ p
#
# Laws are normalised lazily: position i is read only if all before it were accepted, and the row
# where the walk stops is already in scratch when the residual is formed.


def verify_chain(draft: Draft, scores: Scores, draws: Draws, *, overlap: bool = True) -> Verdict:
    """Path, count and next token; with `overlap` also sum min(p, q) at each examined position."""
    walk = RejectionWalk(draft, scores, draws)
    results = []
    for b in range(walk.batch):
        path: list[int] = []
        shared: list[float] = []
        node = 0
        while len(path) < walk.depth and (kid := walk.kid(b, node, 0)) >= 0:
            walk.enter(b, node)
            kept = None if overlap else walk.kept(b, node, kid)
            drawn = walk.guess(b, node, 0) if kept is None else kept
            if overlap:
                shared.append(walk.overlap())
            if walk.uniform(b, node, 0) * drawn < walk.owed(b, kid):
                path.append(kid)
                node = kid
                continue
            if kept is not None:
                walk.guess(b, node, 0)
            walk.refuse(b)
            break
        else:
            walk.enter(b, node)
        results.append((path, walk.draw(b, node), shared))
    return walk.verdict(results, overlap)


# Recursive rejection over a tree on a CPU (Jeon et al. 2024, algorithm 6, slips mended).
#
# At a node every child is tested in draw order against what its earlier siblings left over:
#
#     accept c iff u q(c) < left(c);  on refusal left <- norm((left - q)+), q <- q without c
#
# Only the laws of visited nodes are normalised.


def verify_tree(draft: Draft, scores: Scores, draws: Draws, *, overlap: bool = True) -> Verdict:
    """Path, count, next token and the first draw's overlap at each depth that was examined."""
    walk = RejectionWalk(draft, scores, draws)
    results = []
    for b in range(walk.batch):
        path: list[int] = []
        shared: list[float] = []
        node, going = 0, True
        while going:
            walk.enter(b, node)
            going = False
            for k in range(walk.most if len(path) < walk.depth else 0):
                kid = walk.kid(b, node, k)
                if kid < 0:
                    continue
                drawn = walk.guess(b, node, k)
                if overlap and k == 0:
                    shared.append(walk.overlap())
                if walk.uniform(b, node, k) * drawn < walk.owed(b, kid):
                    path.append(kid)
                    node, going = kid, True
                    break
                walk.refuse(b, last=False)
            if overlap and len(shared) < len(path):
                shared.append(float("nan"))
        results.append((path, walk.draw(b, node), shared))
    return walk.verdict(results, overlap)
