"""Draws from laws on a CPU, by inverse transform from 53-bit uniforms.

Tokens without replacement are drawn one by one, each from what the earlier ones left: the law of
Gumbel-top-k without noise over the vocabulary. All rows of a level are drawn at once
(`outrider.ops.cpu.batched_without_replacement`), and the laws keep the weights that they were drawn
from, so that no rule computes them again.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.ops.cpu import keys
from outrider.ops.cpu.batched_without_replacement import DrawsWithoutReplacement
from outrider.ops.cpu.host_tables import Array, native
from outrider.ops.cpu.law_slices import LEAST, MOST, RowWeights, WeightRows, edges, find, running
from outrider.ops.reference import draws as reference
from outrider.ops.reference.probs import hot as hot_rows
from outrider.types import Laws


def sample(laws: Laws, keys_BR: Tensor) -> tuple[Tensor, Laws]:
    """One token of each law [B, R], and the laws with their weights."""
    tokens, _, drawn = several(laws, keys_BR, 1)
    return tokens[..., 0], drawn


def several(
    laws: Laws, keys_BR: Tensor, count: int, placed: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None, Laws]:
    """`count` tokens of each law without replacement, then the `placed` ones; which there are."""
    most = max(placed, default=0)
    if laws.greedy == "all":
        return (
            _best(laws)
            if count == 1 and not most
            else reference.several(laws, keys_BR, count, placed)
        )
    if keys_BR.numel() == count == 1 and not most and laws.greedy == "none":
        return _one(laws, keys.fine_uniform(int(keys_BR), 0))
    names, urns = keys_BR.contiguous().numpy().ravel(), DrawsWithoutReplacement(laws)
    above = _place(urns, np.tile(placed, len(keys_BR)), most) if most else _Above([], [], [])
    tokens, masses = _without(urns, names, count, above)
    gone = [np.where(w, t, tokens[0]) for t, w in zip(above.tokens, above.which, strict=True)]
    shape = (*keys_BR.shape, count + most)
    tokens_BRK = torch.from_numpy(_side_by_side(tokens + gone)).view(shape)
    owned = _side_by_side(masses + above.masses) > 0
    if laws.greedy == "none" and not most and owned.all():
        return tokens_BRK, None, laws._replace(lse_BR=None, host=_weights(laws, urns))
    there_BRK = torch.from_numpy(owned).view(shape)
    left = laws
    if most:
        out_BRk = there_BRK[..., count:] & there_BRK[..., :1]
        left = reference.lacking(laws, tokens_BRK[..., count:], out_BRk)
    kept = left._replace(lse_BR=None, host=_weights(laws, urns))
    if laws.greedy == "none":
        return tokens_BRK, there_BRK, kept
    return *reference.greedily(laws, tokens_BRK, there_BRK), kept


def _side_by_side(ranks: list[Array]) -> Array:
    """[B * R, K], from an array [B * R] for each rank."""
    return ranks[0][:, None] if len(ranks) == 1 else np.stack(ranks, 1)


def _best(laws: Laws) -> tuple[Tensor, Tensor | None, Laws]:
    """`several` for one token of greedy laws: NumPy finds it in a tenth of torch's time."""
    logits = native(laws.logits_BRV)
    z = logits.reshape(-1, logits.shape[-1])
    best = z.argmax(-1)
    there = z[np.arange(len(z)), best] > -math.inf
    shape = (*logits.shape[:-1], 1)
    missing = None if there.all() else torch.from_numpy(there).view(shape)
    return torch.from_numpy(best).view(shape), missing, laws


def _one(laws: Laws, uniform: float) -> tuple[Tensor, Tensor | None, Laws]:
    """`several` for one token of one law: what a chain draws after each call of its model."""
    weights, fault = _weighed(laws), False
    sums = running(np.add.reduceat(weights, edges(weights.size)))
    if not LEAST < sums[-1] < MOST:  # once more, with the maximum taken off
        rows = WeightRows(laws, 0)
        rows.fill(0, 0)
        weights = rows.row.copy()
        sums = running(np.add.reduceat(weights, edges(weights.size)))
        wild = laws.logits_BRV.isnan() | (laws.logits_BRV == torch.inf)
        fault = not sums[-1] > 0 and bool(wild.any())
    token, mass = find(weights, sums, uniform)
    there = None if mass > 0 else torch.from_numpy(np.zeros((1, 1, 1), dtype=bool))
    kept = laws._replace(lse_BR=None, host=RowWeights([weights[None]], [sums[-1:]], fault))
    # `torch.tensor` takes thrice as long
    return torch.from_numpy(np.array([[[token]]])), there, kept


def _weighed(laws: Laws) -> Array:
    """exp(z / T) of the only row, its maximum left in: too large or small a sum tells."""
    z: Array = native(laws.logits_BRV)[0, 0]
    inverse = laws.inverse_temperature_B.item()
    with np.errstate(over="ignore", invalid="ignore"):
        weights: Array = np.exp(z if inverse == 1 else z * z.dtype.type(inverse))
        if laws.floor_BR is not None:
            weights *= z >= laws.floor_BR.item()
    return weights


def independent(laws: Laws, rows_Bc: Tensor, keys_Bc: Tensor) -> tuple[Tensor, Tensor, Laws]:
    """One token from law row `rows_Bc[b, c]` for every (b, c), and whether there is any."""
    if laws.greedy != "none":  # a greedy row takes its best token, from any row of the law
        best_BR = laws.logits_BRV.max(-1)
        best_Bc = best_BR.indices.gather(1, rows_Bc)
        some_Bc = best_BR.values.gather(1, rows_Bc) > -torch.inf
        if laws.greedy == "all":
            return best_Bc, some_Bc, laws
    urns, count = DrawsWithoutReplacement(laws), laws.logits_BRV.shape[1]
    wanted = [b * count + r for b, rows in enumerate(rows_Bc.tolist()) for r in rows]
    uniforms = [keys.fine_uniform(key, 0) for key in keys_Bc.flatten().tolist()]
    found = [urns.draw_one(row, u) for row, u in zip(wanted, uniforms, strict=True)]
    tokens = torch.tensor([token for token, _ in found], device="cpu").view(keys_Bc.shape)
    there = torch.tensor([mass > 0 for _, mass in found], device="cpu").view(keys_Bc.shape)
    if laws.greedy == "some":
        hot = hot_rows(laws)[..., 0]
        tokens, there = torch.where(hot, best_Bc, tokens), torch.where(hot, some_Bc, there)
    return tokens, there, laws._replace(lse_BR=None, host=_weights(laws, urns))


class _Above(NamedTuple):
    """The likeliest tokens, taken out before a draw: by rank."""

    tokens: list[Array]
    which: list[Array]  #: from which rows
    masses: list[Array]  #: 0 in other rows


def _place(urns: DrawsWithoutReplacement, few: Array, most: int) -> _Above:
    """Take the `few[row]` likeliest tokens out of every urn, `most` at most."""
    above = _Above([], [], [])
    even = bool((few == most).all())
    for rank in range(most):
        token, mass = urns.best()
        wanted = few > rank
        urns.take(token, None if even else np.flatnonzero(wanted))
        above.tokens.append(token)
        above.which.append(wanted)
        above.masses.append(np.where(wanted, mass, 0))
    urns.renew(above.tokens, above.which)
    return above


def _without(
    urns: DrawsWithoutReplacement, names: Array, count: int, above: _Above
) -> tuple[list[Array], list[Array]]:
    """Tokens without replacement, by rank, and their masses. The urns stay as they were."""
    token, mass = urns.draw(names, 0)
    tokens, masses = [token], [mass]
    if count == 1:
        return tokens, masses
    whole, every = urns.snapshot(), np.ones(urns.rows, dtype=bool)
    for k in range(1, count):
        urns.take(token)
        urns.renew(above.tokens + tokens, above.which + [every] * k)
        token, mass = urns.draw(names, k)
        tokens.append(token)
        masses.append(mass)
    urns.restore(whole)
    return tokens, masses


def _weights(laws: Laws, urns: DrawsWithoutReplacement) -> RowWeights:
    """What the urns hold, law by law. Greedy rows have no weights: their law is a point."""
    batch, count = laws.logits_BRV.shape[:2]
    p = urns.p.reshape(batch, count, -1)
    sums = [urns.sums[row::count] for row in range(count)]
    if laws.greedy == "some":
        hot = [math.isinf(value) for value in laws.inverse_temperature_B.tolist()]
        sums = [[0.0 if h else s for h, s in zip(hot, row, strict=True)] for row in sums]
    return RowWeights([p[:, row] for row in range(count)], sums, urns.fault)
