"""A tree of fixed shape drawn on a CPU: whole levels in NumPy, and no tensor but for the model.

The same laws as the portable drafters by another draw: tokens without replacement one after
another, all nodes of a level at once (`outrider.ops.cpu.urns`). Between two calls of a small draft
model the portable way spends as long on tensors of a few elements as the model on its layers.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider import ops
from outrider.drafters import chain_on_host
from outrider.drafters.levels import stack
from outrider.drafters.plans import Plan, plan
from outrider.drafters.plans import rows as law_rows
from outrider.drafters.shape_tables import Level
from outrider.noise import Purpose
from outrider.ops.cpu import keys
from outrider.ops.cpu.lists import visible
from outrider.ops.cpu.rows import upto
from outrider.ops.cpu.urns import Urns
from outrider.prefill import width
from outrider.sampling import warp
from outrider.types import Context, Draft, DraftLists, Kind, LanguageModel, Laws, Nodes, Weights

Array = np.ndarray[Any, np.dtype[Any]]


def fits(context: Context) -> bool:
    """Whether this is the way: sampled rows on a CPU, without penalties or processors."""
    sampling = context.sampling
    plain = sampling.greedy == "none" and sampling.shaping is None
    return plain and ops.on_host(context.length_B.device)


def grow(
    model: LanguageModel, memory: Any, context: Context, parents: tuple[int, ...], hub: bool = False
) -> Draft:
    """Draw every child of the shape; of a hub's children the first is drawn, the rest placed."""
    tables = plan(parents, hub)
    tree, sampling = tables.table.tree, context.sampling
    if tree.is_chain and not hub and chain_on_host.fits(context):
        return chain_on_host.grow(model, memory, context, tables)
    length = context.length_B.numpy()
    batch, nodes, inner = length.shape[0], tree.nodes, tree.levels[-2]
    first = length[:, None] - 1
    wide = width(context.bound, nodes, memory.capacity)
    committed = context.tokens_BL.numpy()

    tail, slots, rows = np.maximum(first + _TAIL, 0), upto(wide), upto(batch)[:, None]
    logits = model.forward(
        memory,
        Nodes(
            torch.from_numpy(committed[rows, tail]),
            *_twice(tail),
            torch.from_numpy(slots <= tail[..., None]),
        ),
        last=1,
    ).logits_BQV[:, -1:]
    own = first + upto(nodes)
    slot = torch.from_numpy(own)
    if tree.is_chain:
        seen = torch.from_numpy(slots <= own[..., None])
    else:
        seen = visible(tree.ancestors_BNN, context.length_B - 1, 0, nodes, wide)
    at = slot if tree.is_chain else torch.from_numpy(first + tables.depth_N)

    tokens_BN = torch.empty(batch, nodes, dtype=torch.int64)
    tokens = tokens_BN.numpy()
    tokens[:, :1] = committed[rows, first]
    streams = keys.table(context.seed_B, context.length_B - 1, Purpose.DRAFT, inner)
    laws: list[Laws] = []
    values: list[Array] = []
    sums: list[list[float]] = []
    there = np.zeros((batch, *tables.table.draws_BNK.shape[1:]), dtype=bool)
    whole, fault = True, False
    above: Array | None = None  # which nodes of the level are there; None: all of them
    for depth, (level, parent, rank, fan) in enumerate(tables.levels):
        start, stop = level.start, level.stop
        if depth:
            logits = model.forward(
                memory,
                Nodes(
                    tokens_BN[:, start:stop],
                    at[:, start:stop],
                    slot[:, start:stop],
                    seen[:, start:stop],
                ),
            ).logits_BQV
        law = warp(logits, sampling)
        laws.append(law)
        urns = Urns(law)
        if level.most == urns.rows == 1:
            token, mass = urns.only(keys.fine_uniform(streams[0][start], 0))
            fault = fault or urns.fault
            tokens[0, stop] = token
            there[0, start, 0] = mass > 0 and (above is None or above[0, 0])
            whole = whole and mass > 0
            above = None if whole else there[:, start:stop, 0]
            values.append(urns.p)
            sums.append(urns.sums)
            continue
        urns.settle()
        fault = fault or urns.fault
        names = [streams[b][node] for b in range(batch) for node in range(start, stop)]
        if hub:
            chosen, weight = _hub(urns, names, level, np.tile(fan, batch))
        else:
            chosen, weight = _without(urns, names, level.most)
        p = urns.p.reshape(batch, stop - start, -1)
        for node in range(stop - start):
            values.append(p[:, node])
            sums.append(urns.sums[node :: stop - start])
        # [K, B * n] to [B, n, K]
        table = chosen.T.reshape(batch, stop - start, level.most)
        owned = (weight > 0).T.reshape(batch, stop - start, level.most)
        begin, end = tree.levels[depth + 1], tree.levels[depth + 2]
        if level.even:
            tokens[:, begin:end] = table.reshape(batch, -1)
        else:
            tokens[:, begin:end] = table[:, parent, rank]
        if not level.even:
            owned = owned & (upto(level.most) < fan[:, None])
        if above is not None:  # a child of an absent node is absent, too
            owned = owned & above[..., None]
        there[:, start:stop, : level.most] = owned
        whole = whole and np.count_nonzero(owned) == batch * (end - begin)
        if not whole:
            above = owned.reshape(batch, -1) if level.even else owned[:, parent, rank]
    law = stack(laws)
    if hub:
        law = _leave_out(law, tokens, there, tables)
    of = (law.logits_BRV, law.inverse_temperature_B, law.floor_BR)
    law = law._replace(weights=Weights(values, sums, of, fault))
    drawn = frozenset({Kind.WITHOUT, Kind.FIXED} if hub else {Kind.WITHOUT})
    draws, kind, row = tables.table.draws_BNK, tables.kind_BNK, tables.row_BNK
    if not whole:  # a token of zero probability never enters the tree
        draws = torch.where(torch.from_numpy(there), draws, -1)
        return Draft(tokens_BN, tree, draws, kind, law_rows(draws, kind), law, drawn)
    kids, how, where = ([table] * batch for table in tables.lists)
    told = DraftLists(tokens.tolist(), kids, how, where, (tokens_BN, draws, kind, row))
    return Draft(tokens_BN, tree, draws, kind, row, law, drawn, told)


def _without(urns: Urns, names: list[int], most: int) -> tuple[Array, Array]:
    """Tokens [K, B * n] without replacement and their masses."""
    token, weight = urns.draw([keys.fine_uniform(key, 0) for key in names])
    if most == 1:
        return token[None], weight[None]
    tokens, weights, every = [token], [weight], np.ones(urns.rows, dtype=bool)
    whole = urns.snapshot()
    for k in range(1, most):
        urns.take(token)
        urns.renew(tokens, [every] * k)
        token, weight = urns.draw([keys.fine_uniform(key, k) for key in names])
        tokens.append(token)
        weights.append(weight)
    urns.restore(whole)
    return np.stack(tokens), np.stack(weights)


def _hub(urns: Urns, names: list[int], level: Level, fan: Array) -> tuple[Array, Array]:
    """One token drawn from what the placed ones leave, then these: [K, B * n], and their masses."""
    above, heavy, which = [], [], []
    for k in range(1, level.most):
        token, weight = urns.best()
        wanted = fan > k
        urns.take(token, None if level.even else np.flatnonzero(wanted))
        above.append(token)
        heavy.append(weight if level.even else np.where(wanted, weight, 0))
        which.append(wanted)
    if above:
        urns.renew(above, which)
    token, weight = urns.draw([keys.fine_uniform(key, 0) for key in names])
    return np.stack([token, *above]), np.stack([weight, *heavy])


def _leave_out(laws: Laws, tokens: Array, there: Array, tables: Plan) -> Laws:
    """The declared laws lack the placed tokens; without a drawn child a law is nobody's."""
    row, node, rank = tables.placed
    logits = laws.logits_BRV.detach().clone() if laws.logits_BRV.requires_grad else laws.logits_BRV
    out = there[:, row, 0] & there[:, row, rank]
    for b in range(tokens.shape[0] if len(row) else 0):
        at = torch.from_numpy(row[out[b]]), torch.from_numpy(tokens[b, node[out[b]]])
        logits[b].index_put_(at, logits.new_tensor(-torch.inf))
    return laws._replace(logits_BRV=logits)


_TAIL = np.array([-1, 0])


def _twice(table: Array) -> tuple[Tensor, Tensor]:
    made = torch.from_numpy(table)
    return made, made
