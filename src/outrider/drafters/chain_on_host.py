"""A chain of one sampled request without filters, drawn on a CPU: `on_host.grow` with fewest steps.

The laws' weights exp(z / T) are written into one table [D, V], which the CPU's chain rules read
whole. A draw is the inverse transform of one 53-bit uniform: sums of blocks, then one block.
"""

import math
from typing import Any

import numpy as np
import torch

from outrider.drafters.plans import Array, Plan, rows
from outrider.noise import Purpose
from outrider.ops.cpu import keys
from outrider.ops.cpu.rows import LEAST, MOST, edges, find, running, upto
from outrider.prefill import width
from outrider.types import (
    Context,
    Draft,
    DraftLists,
    Kind,
    LanguageModel,
    Laws,
    Nodes,
    Places,
    Weights,
)

_NATIVE = (torch.float32, torch.float64)
_DRAWN = frozenset({Kind.WITHOUT})


def fits(context: Context) -> bool:
    """Whether this is the way: one row, no filter. (`on_host.fits` has asked for the rest.)"""
    how = context.sampling
    filtered = how.most_top_k or how.any_top_p or how.any_min_p
    return context.length_B.shape[0] == 1 and not filtered


def grow(model: LanguageModel, memory: Any, context: Context, plan: Plan) -> Draft:
    """Draw one token after another, each from the draft model's law behind the ones before it."""
    depth = plan.table.tree.max_depth
    length = int(context.length_B)
    inverse = float(context.sampling.inverse_temperature_B)
    slots = upto(width(context.bound, depth + 1, memory.capacity))
    committed = context.tokens_BL
    tail = np.array([[max(length - 2, 0), length - 1]])
    own = upto(depth + 1)[None] + (length - 1)
    place = torch.from_numpy(tail)
    last = committed[:, length - 2 : length] if length > 1 else committed[:, :1].expand(1, 2)
    logits = model.forward(
        memory, Nodes(last, place, place, torch.from_numpy(slots <= tail[..., None])), last=1
    ).logits_BQV[:, -1:]
    places = Places(
        context.length_B, torch.from_numpy(own), torch.from_numpy(slots <= own[..., None])
    )
    steps, visible = places.slots_BN.chunk(depth + 1, 1), places.visible_BNW.chunk(depth + 1, 1)

    tokens: Array = np.empty((1, depth + 1), dtype=np.int64)
    tokens_BN = torch.from_numpy(tokens)
    feeds = tokens_BN.chunk(depth + 1, 1)
    chosen = [int(last[0, 1])]
    tokens[0, 0] = chosen[0]
    names = keys.split_words(int(context.seed_B), length - 1, Purpose.DRAFT, depth)
    laws = []
    table: Array = np.empty((depth, 1, 0), dtype=np.float32)
    sums: list[list[float]] = []
    there, fault = [], False
    with np.errstate(over="ignore", invalid="ignore"):  # sums tell
        for d in range(depth):
            if d:
                nodes = Nodes(feeds[d], steps[d], steps[d], visible[d])
                logits = model.forward(memory, nodes).logits_BQV
            laws.append(logits)
            native = logits if logits.dtype in _NATIVE else logits.float()
            z: Array = native.detach().numpy()[0, 0]
            if not d:
                table = np.empty((depth, 1, z.size), dtype=z.dtype)
            row = table[d, 0]
            running_sums, sane = _weigh(z, inverse, row)
            token, weight = find(row, running_sums, keys.fine_uniform(names[d], 0))
            fault = fault or not sane
            tokens[0, d + 1] = token
            chosen.append(token)
            there.append(weight > 0)
            sums.append([running_sums[-1]])
    law = Laws(
        torch.cat(laws, 1) if depth > 1 else laws[0],
        context.sampling.inverse_temperature_B,
        None,
        greedy="none",
    )
    of = (law.logits_BRV, law.inverse_temperature_B, None)
    law = law._replace(weights=Weights(table, sums, of, fault))
    draws, kind_BNK, row_BNK = plan.table.draws_BNK, plan.kind_BNK, plan.row_BNK
    if not all(there):  # a token of zero probability never enters the tree, nor what follows
        alive = torch.from_numpy(upto(depth + 1) < there.index(False))[None, :, None]
        draws = torch.where(alive, draws, -1)
        row_BNK = rows(draws, kind_BNK)
        return Draft(tokens_BN, plan.table.tree, draws, kind_BNK, row_BNK, law, _DRAWN)
    kids, how, where = ([one] for one in plan.lists)
    own_tables = (tokens_BN, draws, kind_BNK, row_BNK)
    told = DraftLists([chosen], kids, how, where, own_tables, True, places)
    return Draft(tokens_BN, plan.table.tree, draws, kind_BNK, row_BNK, law, _DRAWN, told)


def _weigh(z: Array, inverse: float, row: Array) -> tuple[list[float], bool]:
    """row = exp(z / T) up to a factor, zero if z masks all; its blocks' running sums; sanity."""
    np.exp(z if inverse == 1.0 else np.multiply(z, inverse, out=row), out=row)
    sums = running(np.add.reduceat(row, edges(row.size)))
    if LEAST < sums[-1] < MOST:
        return sums, True
    top = float(z.max())
    if not math.isfinite(top):
        row[:] = 0
        return [0.0] * len(sums), top == -math.inf
    np.multiply(z, inverse, out=row)
    np.subtract(row, top * inverse, out=row)
    np.exp(row, out=row)
    sums = running(np.add.reduceat(row, edges(row.size)))
    return sums, sums[-1] == sums[-1]
