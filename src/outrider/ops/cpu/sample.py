"""Draft-step samplers on a CPU, by inverse transform from 53-bit uniforms.

`sample`: one token per law and its log-sum-exp, a by-product that spares the verification the row.

    lse = log sum exp(z / T);  x ~ exp(z / T - lse)

`several`: tokens without replacement, each from what the earlier ones left: the law of
Gumbel-top-k without noise over the vocabulary.

`independent`: one token from each of some rows, repeats included.

`arrivals`: the next level of a stochastic beam. Perturbed scores psi are read as arrival times
t = exp(-psi): a path's children have exponential clocks of rates exp(phi) q(token), of which the
first rings at the path's own time. What is left of them has no memory, so after a ring at t

    t' = t + E / (exp(phi) * mass left),   token ~ q without the earlier ones

and only as many children are drawn as enter the beam, plus one for each path.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.ops.cpu import keys
from outrider.ops.cpu.rows import Rows, Urn, edges, find, pick, running
from outrider.types import Laws


def sample(laws: Laws, keys_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, R] and log-sum-exps [B, R] of the scaled, filtered logits (0 for greedy rows)."""
    rows = Rows(laws, 0)
    tokens, sums = [], []
    for b, streams in enumerate(keys_BR.tolist()):
        for r, key in enumerate(streams):
            rows.fill(b, r)
            token, mass = pick(rows.row, keys.fine_uniform(key, 0))
            tokens.append(min(token, rows.vocab - 1))
            sums.append(math.log(mass) + rows.shift if mass > 0 else -math.inf)
    dtype = torch.float64 if rows.double else torch.float32
    return torch.tensor(tokens).view(keys_BR.shape), torch.tensor(sums, dtype=dtype).view(
        keys_BR.shape
    )


def several(
    laws: Laws, keys_BR: Tensor, count: int, placed: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """`count` tokens of each law, drawn without replacement, and which of them exist.

    With `placed`, the `placed[r]` most probable tokens of row r are taken out before; they follow
    the drawn ones, and the first drawn one fills the gaps. Both results are
    [B, R, count + max(placed)].
    """
    rows, most = Rows(laws, 0), max(placed, default=0)
    tokens: list[int] = []
    there: list[bool] = []
    for b, streams in enumerate(keys_BR.tolist()):
        for r, key in enumerate(streams):
            rows.fill(b, r)
            top = placed[r] if placed else 0
            above, weights = [], []
            for _ in range(top):
                best = int(rows.row.argmax())
                above.append(best)
                weights.append(float(rows.row[best]))
                rows.row[best] = 0
            gap = len(tokens)
            token, mass = pick(rows.row, keys.fine_uniform(key, 0))
            tokens.append(token if mass > 0 else 0)
            there.append(mass > 0)
            urn = Urn(rows.row) if count > 1 else None
            for k in range(1, count):
                assert urn is not None
                urn.take(tokens[-1])
                token, weight, _ = urn.draw(keys.fine_uniform(key, k))
                tokens.append(token)
                there.append(weight > 0)
            tokens += above + tokens[gap : gap + 1] * (most - top)
            there += [weight > 0 for weight in weights] + [False] * (most - top)
    shape = (*keys_BR.shape, count + most)
    return torch.tensor(tokens).view(shape), torch.tensor(there).view(shape)


def independent(laws: Laws, rows_Bc: Tensor, keys_Bc: Tensor) -> tuple[Tensor, Tensor]:
    """One token from law row `rows_Bc[b, c]` for every (b, c), and whether there is any."""
    rows = Rows(laws, 0)
    tokens: list[int] = []
    there: list[bool] = []
    for b, (wanted, streams) in enumerate(zip(rows_Bc.tolist(), keys_Bc.tolist(), strict=True)):
        filled, sums = -1, [0.0]
        for r, key in zip(wanted, streams, strict=True):
            if r != filled:  # merged paths go on from the same row
                rows.fill(b, r)
                filled, sums = r, running(np.add.reduceat(rows.row, edges(rows.row.size)))
            token, weight = find(rows.row, sums, keys.fine_uniform(key, 0))
            tokens.append(token)
            there.append(weight > 0)
    return torch.tensor(tokens).view(keys_Bc.shape), torch.tensor(there).view(keys_Bc.shape)


class Arrival(NamedTuple):
    """A path that enters the beam; tuples compare by time."""

    time: float  #: log of its arrival time, -psi
    parent: int  #: number of the law row it goes on from
    token: int
    phi: float  #: log-probability of the path


class _Path:
    """The children of one path, in the order in which they arrive."""

    def __init__(self, rows: Rows, b: int, r: int, key: int, time: float, phi: float) -> None:
        whole = rows.fill(b, r)
        self.urn = Urn(rows.row.copy())
        self.key, self.time, self.number, self.parent = key, time, 0, r
        self.token = 0
        self.unit = phi - math.log(whole) if whole > 0 else -math.inf

    def next(self) -> Arrival | None:
        """The next child, or None if no token is left."""
        k = self.number
        if k:
            self.urn.take(self.token)
        token, weight, mass = self.urn.draw(keys.fine_uniform(self.key, 2 * k))
        if not weight > 0:
            return None
        if k:  # the first one arrives with its parent
            wait = -math.log1p(-keys.fine_uniform(self.key, 2 * k - 1))
            later = math.log(max(wait, 2.0**-54)) - self.unit - math.log(mass)
            most = max(self.time, later)
            self.time = most + math.log1p(math.exp(min(self.time, later) - most))
        self.number, self.token = k + 1, token
        return Arrival(self.time, self.parent, token, self.unit + math.log(weight))


def arrivals(
    laws: Laws, keys_BR: Tensor, paths: Sequence[Sequence[Arrival]], width: int
) -> list[list[Arrival]]:
    """The first `width` children, in order, of each row's paths: path r goes on from law row r.

    A row at temperature 0 has no clocks: there the most probable children come first.
    """
    rows, found = Rows(laws, 0), []
    for b, streams in enumerate(keys_BR.tolist()):
        if math.isinf(rows.inverse[b]):
            found.append(_most_probable(rows, b, paths[b], width))
            continue
        open_paths = [
            _Path(rows, b, r, streams[r], path.time, path.phi) for r, path in enumerate(paths[b])
        ]
        first = [path.next() for path in open_paths]
        waiting = [child for child in first if child is not None]
        heapify(waiting)
        taken: list[Arrival] = []
        while waiting and len(taken) < width:
            child = waiting[0]
            taken.append(child)
            if len(taken) == width:
                break
            after = open_paths[child.parent].next()
            if after is None:
                heappop(waiting)
            else:
                heapreplace(waiting, after)
        found.append(taken)
    return found


def _most_probable(rows: Rows, b: int, paths: Sequence[Arrival], width: int) -> list[Arrival]:
    """A step of an ordinary beam search under the unfiltered laws at temperature 1."""
    taken = []
    for r, path in enumerate(paths):
        z = rows.source(b, r)
        top = float(z.max())
        if not math.isfinite(top):
            continue
        unit = path.phi - top - math.log(float(np.exp(z - top).sum()))
        few = min(width, z.size)
        for token in np.argpartition(z, z.size - few)[z.size - few :].tolist():
            phi = unit + float(z[token])
            if phi > -math.inf:
                taken.append(Arrival(-phi, r, token, phi))
    return sorted(taken)[:width]
