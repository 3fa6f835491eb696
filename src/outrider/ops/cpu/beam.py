"""The next level of a stochastic beam on a CPU, drawing only the children that enter it.

Perturbed scores psi are read as arrival times t = exp(-psi): a path's children have exponential
clocks of rates exp(phi) q(token), of which the first rings at the path's own time. What is left of
them has no memory, so after a ring at t

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
from outrider.ops.cpu.law_slices import DrawWithoutReplacement, WeightRows
from outrider.ops.reference import draws
from outrider.ops.reference.draws import Survivors
from outrider.types import Laws


class Path(NamedTuple):
    """A path of the beam that goes on from law row `row`."""

    row: int
    time: float
    phi: float


class Arrival(NamedTuple):
    """A path that enters the beam; tuples compare by time."""

    time: float  #: log of its arrival time, -psi
    parent: int  #: number of the law row it goes on from
    token: int
    phi: float  #: log-probability of the path


class _Children:
    """The children of one path, in the order in which they arrive."""

    def __init__(self, rows: WeightRows, b: int, path: Path, key: int) -> None:
        whole = rows.fill(b, path.row)
        self.urn = DrawWithoutReplacement(rows.row.copy())
        self.key, self.time, self.number, self.parent = key, path.time, 0, path.row
        self.token = 0
        self.unit = path.phi - math.log(whole) if whole > 0 else -math.inf

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


def survivors(laws: Laws, keys_BR: Tensor, phi_BR: Tensor, psi_BR: Tensor, width: int) -> Survivors:
    """The first `width` children, in order, of each row's paths.

    A row at temperature 0 has no clocks: there the most probable children come first.
    """
    if laws.greedy == "all":
        return draws.survivors(laws, keys_BR, phi_BR, psi_BR, width)
    rows, batch = WeightRows(laws, 0), []
    tables = (keys_BR.tolist(), phi_BR.tolist(), psi_BR.tolist())
    for b, (streams, phis, psis) in enumerate(zip(*tables, strict=True)):
        paths = [
            Path(r, -psi, phi)
            for r, (phi, psi) in enumerate(zip(phis, psis, strict=True))
            if psi > -math.inf
        ]
        if math.isinf(rows.inverse[b]):
            batch.append(_most_probable(rows, b, paths, width))
        else:
            children = [_Children(rows, b, path, streams[path.row]) for path in paths]
            batch.append(_first(children, width))
    absent = Arrival(math.inf, 0, 0, -math.inf)
    full = [arrivals + [absent] * (width - len(arrivals)) for arrivals in batch]
    time, parent, token, phi = zip(*(zip(*row, strict=True) for row in full), strict=True)
    return Survivors(
        torch.tensor(parent, device="cpu"),
        torch.tensor(token, device="cpu"),
        torch.tensor(phi, dtype=torch.float64, device="cpu"),
        -torch.tensor(time, dtype=torch.float64, device="cpu"),
    )


def _first(paths: "list[_Children]", width: int) -> list[Arrival]:
    """The first `width` arrivals of all paths, in order."""
    by_row = {path.parent: path for path in paths}
    first = [path.next() for path in paths]
    waiting = [child for child in first if child is not None]
    heapify(waiting)
    taken: list[Arrival] = []
    while waiting and len(taken) < width:
        child = waiting[0]
        taken.append(child)
        if len(taken) == width:
            break
        after = by_row[child.parent].next()
        if after is None:
            heappop(waiting)
        else:
            heapreplace(waiting, after)
    return taken


def _most_probable(rows: WeightRows, b: int, paths: Sequence[Path], width: int) -> list[Arrival]:
    """A step of an ordinary beam search under the unfiltered laws at temperature 1."""
    taken = []
    for path in paths:
        z = rows.source(b, path.row)
        top = float(z.max())
        if not math.isfinite(top):
            continue
        unit = path.phi - top - math.log(float(np.exp(z - top).sum()))
        few = min(width, z.size)
        for token in np.argpartition(z, z.size - few)[z.size - few :].tolist():
            phi = unit + float(z[token])
            if phi > -math.inf:
                taken.append(Arrival(-phi, path.row, token, phi))
    return sorted(taken)[:width]
