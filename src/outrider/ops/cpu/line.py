"""One drafted chain whose laws lie in two tables: every position in a few passes.

    target [D + 1, V], drafted [D, V]: weights exp(z / T), each row with its sum

For one request with an ordinary vocabulary this takes a dozen NumPy calls instead of a dozen for
every position; behind a model that has swept the processor's caches the calls are what costs.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.noise import Purpose
from outrider.ops.cpu import keys, lists
from outrider.ops.cpu.rows import LEAST, MOST, pick, weights_of
from outrider.ops.cpu.scratch import per_thread
from outrider.ops.reference import EMPTY
from outrider.types import Draft, DraftLists, Draws, Kind, Laws, Scores, Verdict

Array = np.ndarray[Any, np.dtype[Any]]

_AT_ONCE = 1 << 16  #: elements of a table: larger ones are better read row by row, lazily
_DRAWN = (Kind.WITHOUT, Kind.WITH)


@per_thread
def _room(rows: int, vocab: int, which: int) -> Array:
    return np.empty((rows, vocab), dtype=np.float32)


class Line:
    """The tables, and what a rule asks of them. Rows are rewritten as the rule goes on."""

    def __init__(
        self, target: Array, drafted: Array, tokens: list[int], draws: Draws, logits: Tensor
    ) -> None:
        self.depth, self.logits = len(tokens), logits
        self._target, self._drafted, self._draws = target, drafted, draws
        self._masses: list[float] = []
        self.owed: list[float] = []  #: p_i(x_i)
        self.drawn: list[float] = []  #: q_i(x_i)
        self._scaled: Array | None = None
        self._key: int | None = None
        self._place = int(draws.seed_B), int(draws.start_B)

    def weigh(self, z: Array, inverse: float, sums: list[float], tokens: list[int]) -> bool:
        """Fill the target's table; False if a row needs more care than this."""
        table = self._target
        with np.errstate(over="ignore"):
            np.exp(z if inverse == 1.0 else np.multiply(z, inverse, out=table), out=table)
            self._masses = table.sum(1).tolist()
        if not all(LEAST < mass < MOST for mass in self._masses):
            return False
        for i, token in enumerate(tokens):  # NumPy's indexing by lists takes longer
            self.owed.append(table.item(i, token) / self._masses[i])
            self.drawn.append(self._drafted.item(i, token) / sums[i])
        self._sums = sums
        return True

    def uniform(self, node: int) -> float:
        """The uniform of the test of the draw at a node."""
        if self._draws.uniform_BNK is not None:
            return float(self._draws.uniform_BNK[0, node, 0])
        if self._key is None:
            self._key = keys.stream(*self._place, Purpose.ACCEPT)
        return keys.uniform(self._key, node)

    def guesses(self) -> Array:
        """The draft's laws on the scale of the target's rows, [D, V]."""
        if self._scaled is None:
            shape = self._drafted.shape
            pairs = zip(self._masses, self._sums, strict=False)
            factor = np.array([mass / whole for mass, whole in pairs], dtype=np.float32)
            self._scaled = _room(*shape, 1)
            np.multiply(self._drafted, factor[:, None], out=self._scaled)
        return self._scaled

    def overlaps(self) -> list[float]:
        """Sum of min(p_i, q_i) at every position."""
        least = np.minimum(self._target[: self.depth], self.guesses(), out=self._spare())
        return [s / m for s, m in zip(least.sum(1).tolist(), self._masses, strict=False)]

    def excess(self, position: int, scale: float) -> float:
        """Sum of (scale p - q)+ at a position before the last."""
        return float(self.left(position, scale).sum()) / self._masses[position]

    def left(self, position: int, scale: float = 1.0) -> Array:
        """What the target still owes: (scale p - q)+ at a refused position, p behind the last."""
        row: Array = self._target[position]
        if position == self.depth:
            return row
        rest: Array = np.multiply(row, scale, out=self._spare()[0])
        np.subtract(rest, self.guesses()[position], out=rest)
        return np.maximum(rest, 0, out=rest)

    def verdict(self, count: int, left: Array, shared: list[float], overlap: bool) -> Verdict:
        """Draw the next token from what is left, or from the target's law if that is nothing."""
        draws, whole = self._draws, self._target[count]
        if draws.race_BV is not None:
            race = draws.race_BV[0].numpy()
            enough = float(left.sum()) > EMPTY * self._masses[count]
            token = int(((left if enough else whole) / race).argmax())
        else:
            key = keys.stream(*self._place, Purpose.RESIDUAL)
            uniform = keys.fine_uniform(key, 0)
            token, mass = pick(left, uniform)
            if not mass > EMPTY * self._masses[count]:
                token, mass = pick(whole, uniform)
        token = min(token, whole.size - 1)
        path = list(range(1, count + 1))
        told = "float32" if overlap else None
        return lists.verdict([(path, token, shared)], self.depth, told, sane=self.logits)

    def _spare(self) -> Array:
        return _room(*self._drafted.shape, 2)


def read(draft: Draft, scores: Scores, draws: Draws) -> Line | None:
    """The tables of a draft, or None where only a walk can judge: several rows, filters, a large
    vocabulary, a chain with a gap, masked or huge logits."""
    laws, own = scores.laws, draft.laws
    z = laws.logits_BRV.detach()
    if own is None or z.shape[0] != 1 or z.dtype is not torch.float32 or z.numel() > _AT_ONCE:
        return None
    inverse = float(laws.inverse_temperature_B)
    if laws.floor_BR is not None or math.isinf(inverse):
        return None
    tables = lists.of_draft(draft)
    depth, vocab = z.shape[1] - 1, z.shape[2]
    if len(tables.tokens[0]) != depth + 1 or draft.draws_BNK.shape[2] != 1:
        return None
    if not tables.drawn_chain and not _complete(tables, depth):
        return None
    found = _drafted(own, depth, vocab)
    if found is None:
        return None
    drafted, sums = found
    tokens = tables.tokens[0][1:]
    line = Line(_room(depth + 1, vocab, 0), drafted, tokens, draws, laws.logits_BRV)
    return line if line.weigh(z[0].numpy(), inverse, sums, tokens) else None


def _drafted(own: Laws, depth: int, vocab: int) -> tuple[Array, list[float]] | None:
    """The draft's weights [D, V] with their sums: those it was drawn from, or made here."""
    weights = weights_of(own)
    if weights is not None:
        if weights.fault or not isinstance(weights.values, np.ndarray):
            return None
        drafted, sums = weights.values[:, 0], [mass[0] for mass in weights.sums]
        fits = drafted.shape == (depth, vocab) and drafted.itemsize == 4
        return (drafted, sums) if fits and all(mass > LEAST for mass in sums) else None
    z, inverse = own.logits_BRV.detach(), float(own.inverse_temperature_B[0])
    fits = z.shape == (1, depth, vocab) and z.dtype is torch.float32
    if not fits or own.floor_BR is not None or math.isinf(inverse):
        return None
    source, table = z[0].numpy(), _room(depth, vocab, 3)
    with np.errstate(over="ignore"):
        np.exp(source if inverse == 1.0 else np.multiply(source, inverse, out=table), out=table)
        masses: list[float] = table.sum(1).tolist()
    return (table, masses) if all(LEAST < mass < MOST for mass in masses) else None


def _complete(tables: DraftLists, depth: int) -> bool:
    """Whether node i has one drawn child, node i + 1, from law row i, for every i < D."""
    kids, kinds, rows = tables.draws[0], tables.kinds[0], tables.rows[0]
    return all(
        kids[i][0] == i + 1 and rows[i][0] == i and kinds[i][0] in _DRAWN for i in range(depth)
    )
