"""Rows of laws on a CPU: weights into one scratch row, their sum, and a draw from them.

The weights of a row are exp(z), its maximum left in, when the sum shows that nothing over- or
underflowed (it nearly always does), which saves two passes; otherwise exp(z - max).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.ops.cpu.host_tables import Array, per_thread
from outrider.ops.reference.probs import EMPTY
from outrider.types import Host, Laws

Row = tuple[Array, Tensor]  #: one piece of memory, as both libraries see it

LONG = 8192  #: tokens from which PyTorch's passes are faster than NumPy's
LEAST, MOST = 1e-10, 1e16  #: sums outside are computed again with the maximum taken off
_AT_ONCE = 1 << 17
_FEW = 256  #: blocks


class RowWeights(NamedTuple):
    """Laws as they were drawn from: probabilities but for a factor per row."""

    values: list[Array]  #: R arrays [B, V]
    sums: list[list[float]]  #: of each of them, [R][B]; 0 where the logits must be read again
    fault: bool  #: whether a logit is NaN or +inf

    def stack(self, others: Sequence[Host]) -> "RowWeights":
        """The weights of several levels as one table."""
        every = [self, *(other for other in others if isinstance(other, RowWeights))]
        return RowWeights(
            [row for level in every for row in level.values],
            [sums for level in every for sums in level.sums],
            any(level.fault for level in every),
        )


def weights_of(laws: Laws) -> RowWeights | None:
    """The weights that the laws carry, if they were drawn from here."""
    return laws.host if isinstance(laws.host, RowWeights) else None


@per_thread
def scratch(vocab: int, dtype: str, which: int) -> Row:
    """A reusable row as NumPy array and tensor. `which` tells rows in use at once apart."""
    with torch.inference_mode(False):
        row = torch.empty(vocab, dtype=getattr(torch, dtype), device="cpu")
    return row.numpy(), row


def total(row: Array, tensor: Tensor) -> float:
    """Sum of a scratch row: pairwise in NumPy when short, PyTorch's faster cascade when long."""
    return float(row.sum() if row.size < LONG else tensor.sum())


def excess(left: Row, drawn: Row, factor: float, spare: Row, out: Row) -> None:
    """out = (left - factor drawn)+, in two passes when a row is long; float32 must hold the factor.

    `out` may be any of the rows.
    """
    if left[0].size < LONG:
        np.multiply(drawn[0], factor, out=spare[0])
        np.subtract(left[0], spare[0], out=out[0])
        np.maximum(out[0], 0, out=out[0])
    else:
        torch.sub(left[1], drawn[1], alpha=factor, out=out[1])
        out[1].clamp_(min=0)


class WeightRows:
    """The rows of `laws`, read in place one at a time. `which` names their scratch row."""

    inverse: list[float]
    floor: Array | None
    lse: list[list[float]] | None
    drawn: RowWeights | None  #: the weights that a drafter drew from: nothing is left to compute

    def __init__(self, laws: Laws, which: int, vocab: int | None = None) -> None:
        self._open(laws.logits_BRV.detach(), which, vocab)
        self.inverse = laws.inverse_temperature_B.tolist()
        floor = laws.floor_BR
        if floor is not None:
            self.floor = floor.detach().double().numpy()
        if laws.lse_BR is not None:
            self.lse = laws.lse_BR.tolist()
        self.drawn = weights_of(laws)

    @classmethod
    def plain(cls, logits_RV: Tensor, which: int, vocab: int | None = None) -> "WeightRows":
        """Rows [1, R, V] at temperature 1 without floors: the least work before the first row."""
        rows = cls.__new__(cls)
        rows._open(logits_RV.detach(), which, vocab)
        rows.inverse, rows.drawn = [1.0], None
        return rows

    def _open(self, logits: Tensor, which: int, vocab: int | None) -> None:
        if logits.dtype.itemsize < 4 and logits.numel() <= _AT_ONCE:
            logits = logits.float()  # as quick as one row at a time, up to a cache's size
        self.logits = logits
        self.width = logits.shape[-1]
        self.vocab = vocab or self.width
        self.native = logits.dtype in (torch.float32, torch.float64)
        self.array: Array | None = logits.numpy() if self.native else None
        self.double = logits.dtype is torch.float64
        self.dtype = "float64" if self.double else "float32"
        self.both = scratch(self.vocab, self.dtype, which)
        self.row, self.tensor = self.both
        self.head, self.head_tensor = self.row[: self.width], self.tensor[: self.width]
        self.floor, self.lse = None, None

    def source(self, b: int, r: int) -> Array:
        """The logits of a row, unscaled and unfiltered."""
        if self.array is not None:
            view: Array = self.array[b, r]
            return view
        wide: Array = self.logits[b, r].float().numpy()
        return wide

    def fill(self, b: int, r: int) -> float:
        """Write the weights of row (b, r) to the scratch row and return their sum."""
        inverse, head = self.inverse[b], self.head
        if self.drawn is not None and self.drawn.sums[r][b] > LEAST:
            np.copyto(head, self.drawn.values[r][b])
            if self.vocab > self.width:
                self.row[self.width :] = 0
            return self.drawn.sums[r][b]
        source = self.source(b, r)
        if self.vocab > self.width:
            self.row[self.width :] = 0
        if math.isinf(inverse):
            head[:] = 0
            head[int(source.argmax())] = 1
            self.shift = 0.0
            return 1.0
        scaled = source if inverse == 1.0 else np.multiply(source, inverse, out=head)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is filled otherwise
            np.exp(scaled, out=head)
            if self.floor is not None:
                np.multiply(head, source >= self.floor[b, r], out=head)
            mass = total(head, self.head_tensor)
        self.shift = 0.0
        if not LEAST < mass < MOST:
            mass = self._with_maximum(source, inverse, b, r)
        return mass

    def _with_maximum(self, source: Array, inverse: float, b: int, r: int) -> float:
        self.shift = float(source.max()) * inverse
        if not math.isfinite(self.shift):
            self.head[:] = 0  # NaN or every token masked: nothing is owed, the engine reports it
            return 1.0
        head = self.head
        np.multiply(source, inverse, out=head)
        np.subtract(head, self.shift, out=head)
        np.exp(head, out=head)
        if self.floor is not None:
            np.multiply(head, source >= self.floor[b, r], out=head)
        return total(head, self.head_tensor)

    def fill_without(self, b: int, r: int, tokens: list[int]) -> float:
        """`fill` of the law without some tokens, from the logits: when they had nearly all of it,
        what the others had in the whole row is lost to rounding."""
        head, source = self.head, self.source(b, r)
        np.multiply(source, self.inverse[b], out=head)
        if self.floor is not None:
            head[source < self.floor[b, r]] = -math.inf
        head[tokens] = -math.inf
        if self.vocab > self.width:
            self.row[self.width :] = 0
        top = float(head.max())
        if not math.isfinite(top):
            head[:] = 0
            return 0.0
        np.subtract(head, top, out=head)
        np.exp(head, out=head)
        return total(head, self.head_tensor)

    def borrow(self, b: int, r: int, room: Array) -> tuple[Array, float]:
        """The weights of row (b, r) and their sum: the drafter's own, not to be written to, or in
        `room`."""
        whole = 0.0 if self.drawn is None else self.drawn.sums[r][b]
        if self.drawn is not None and whole > LEAST and self.vocab == self.width:
            row: Array = self.drawn.values[r][b]
            return row, whole
        whole = self.fill(b, r)
        np.copyto(room, self.row)
        return room, whole

    def kept(self, b: int, r: int, token: int) -> float | None:
        """Probability of a token from kept weights or a log-sum-exp, without reading the row."""
        if math.isinf(self.inverse[b]):
            return None
        if token >= self.width:
            return 0.0
        if self.drawn is not None and self.drawn.sums[r][b] > LEAST:
            return float(self.drawn.values[r][b][token]) / self.drawn.sums[r][b]
        if self.lse is None:
            return None
        z = float(self.logits[b, r, token] if self.array is None else self.array[b, r, token])
        if self.floor is not None and z < self.floor[b, r]:
            return 0.0
        return math.exp(z * self.inverse[b] - self.lse[b][r])


@lru_cache(maxsize=16)
def edges(vocab: int) -> Array:
    """Where the blocks of a row begin."""
    return np.arange(0, vocab, block_of(vocab))


@lru_cache(maxsize=256)
def upto(count: int) -> Array:
    """0, 1, ..., count - 1, made once; not to be written to."""
    return np.arange(count)


def block_of(vocab: int) -> int:
    """Elements of a block: a draw reads all block sums, then one block, so about the root."""
    return 64 if vocab <= 1 << 14 else 256


def running(blocks: Array) -> list[float]:
    """Sums of the blocks up to each of them, in float64.

    Python adds up some dozens of numbers sooner than NumPy starts a sum in another type.
    """
    if blocks.size > _FEW:
        added: list[float] = blocks.cumsum(dtype=np.float64).tolist()
        return added
    return list(accumulate(blocks.tolist()))


def find(
    row: Array, sums: list[float], uniform: float, block: int | None = None
) -> tuple[int, float]:
    """An index in proportion to a row, given its blocks' running sums, and its weight.

    Inverse transform: a block first, then one of its elements. 0, 0.0 if nothing is left.
    """
    mass = sums[-1]
    if not mass > 0:
        return 0, 0.0
    mark = uniform * mass
    at = bisect_right(sums, mark)
    if at >= len(sums):  # rounding at the end: the last block with weight
        at = bisect_left(sums, mass)
    block = block or block_of(row.size)
    start = at * block
    part: list[float] = row[start : start + block].tolist()
    inside = list(accumulate(part))
    place = bisect_right(inside, mark - (sums[at - 1] if at else 0.0))
    if place >= len(part):
        place = bisect_left(inside, inside[-1])
    return start + place, part[place]


def pick(weights: Array, uniform: float) -> tuple[int, float]:
    """An index in proportion to `weights` by inverse transform in float64, and their sum."""
    sums = running(np.add.reduceat(weights, edges(weights.size)))
    return find(weights, sums, uniform)[0], sums[-1]


class DrawWithoutReplacement:
    """Draws without replacement from a row of weights, which it uses up.

    Block sums are made again from what is left, never by subtraction, so that small weights behind
    a large one keep their digits.
    """

    def __init__(self, weights: Array) -> None:
        self.weights = weights
        self.blocks = np.add.reduceat(weights, edges(weights.size))

    def take(self, token: int) -> None:
        """Take a token out."""
        block = block_of(self.weights.size)
        start = token - token % block
        self.weights[token] = 0
        self.blocks[start // block] = self.weights[start : start + block].sum()

    def draw(self, uniform: float) -> tuple[int, float, float]:
        """A token, its weight and the sum it was drawn from; weight 0 if nothing is left.

        It stays in until `take`.
        """
        sums = running(self.blocks)
        token, weight = find(self.weights, sums, uniform)
        return token, weight, sums[-1] if sums[-1] > 0 else 0.0


# Chain verification as transformers' assisted generation calls it, on a CPU: nothing is copied.
#
# Positions behind a refusal are never read.


def assisted(
    ids_n: Tensor, drafted_1nV: Tensor, target_1mV: Tensor, uniforms: Tensor, weight: float | None
) -> tuple[Tensor, Tensor]:
    """`outrider.ops.reference.walking.assisted`, row by row."""
    count, uniform = drafted_1nV.shape[1], uniforms.tolist()
    last = uniform[count] + uniform[count + 1] * 2.0**-24
    target = WeightRows.plain(target_1mV, 0)
    drafted = WeightRows.plain(drafted_1nV, 1, target.vocab)
    tokens: list[int] = ids_n.tolist()
    n, refused, mass, drawn_mass = 0, False, 1.0, 1.0
    while n < count:
        mass = max(target.fill(0, n), 1e-300)
        drawn_mass = max(drafted.fill(0, n), 1e-300)
        owed = float(target.row[tokens[n]]) / mass
        drawn = float(drafted.row[tokens[n]]) / drawn_mass
        if weight is not None:
            owed = (1.0 - weight) * drawn + weight * owed
        if not uniform[n] * drawn < owed:
            refused = True
            break
        n += 1
    if refused:
        token = _residual(target, drafted, mass, drawn_mass, last)
    else:
        target.fill(0, n)
        token, _ = pick(target.row, last)
    chosen = [*tokens[:n], min(token, target.vocab - 1)]
    return torch.tensor([chosen], device="cpu"), torch.tensor(n, device="cpu")


def _residual(
    target: WeightRows, drafted: WeightRows, mass: float, drawn_mass: float, uniform: float
) -> int:
    """A draw from norm((p - q)+): both sides' rows are in scratch already."""
    excess(target.both, drafted.both, mass / drawn_mass, drafted.both, drafted.both)
    token, left = pick(drafted.row, uniform)
    if not left > EMPTY * mass:
        token, _ = pick(target.row, uniform)
    return token
