"""Chain verification as transformers' assisted generation calls it, on a CPU: nothing is copied.

Positions behind a refusal are never read.
"""

import torch
from torch import Tensor

from outrider.ops.cpu.law_slices import WeightRows, excess, pick
from outrider.ops.reference.laws import EMPTY


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
    return torch.tensor([chosen]), torch.tensor(n)


def _residual(
    target: WeightRows, drafted: WeightRows, mass: float, drawn_mass: float, uniform: float
) -> int:
    """A draw from norm((p - q)+): both sides' rows are in scratch already."""
    excess(target.both, drafted.both, mass / drawn_mass, drafted.both, drafted.both)
    token, left = pick(drafted.row, uniform)
    if not left > EMPTY * mass:
        token, _ = pick(target.row, uniform)
    return token
