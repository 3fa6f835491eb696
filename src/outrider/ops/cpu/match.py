"""Sample-and-match on a CPU: the target's own token at each node that is reached, and no other.

    y = argmax(z / T - log E),  E the Exp(1) race of (seed, absolute position)
    y = argmax z when greedy

The race is the reference's, word for word, so a text depends on its seed alone. It is run by the
tokens above the floor alone, or by those that a bound leaves a chance.
"""

import math
from typing import Any

import numpy as np
import torch

from outrider.noise import Purpose
from outrider.ops.cpu import filters, host_tables, keys
from outrider.types import Draft, Draws, Laws, Scores, Verdict


def verify(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Path, count and next token; needs no draft law."""
    laws = scores.laws
    batch, nodes = laws.logits_BRV.shape[:2]
    depth = draft.tree.max_depth
    tokens, kids = draft.tokens_BN.tolist(), host_tables.shared(draft.draws_BNK, batch)
    inverse = laws.inverse_temperature_B.tolist()
    seeds, starts = draws.seed_B.tolist(), draws.start_B.tolist()
    injected = None if draws.target_race_BDV is None else draws.target_race_BDV.numpy()
    known = None if laws.greedy == "none" else filters.peaks(laws)
    best = [-1] * (batch * nodes) if known is None else [row[0] for row in known.tokens]
    results: list[tuple[list[int], int, list[float]]] = []
    for b in range(batch):
        table = kids[b]
        path: list[int] = []
        node, going = 0, True
        while going:
            race = None if injected is None else injected[b, len(path)]
            key = 0
            if race is None and not math.isinf(inverse[b]):
                key = keys.stream(seeds[b], starts[b] + len(path) + 1, Purpose.TARGET)
            token = best[b * nodes + node] if math.isinf(inverse[b]) else -1
            if token < 0:  # it was not looked for, or there is none
                token = _chosen(laws, b, node, inverse[b], key, race)
            going = False
            for kid in table[node] if len(path) < depth else ():
                if kid >= 0 and tokens[b][kid] == token:
                    path.append(kid)
                    node, going = kid, True
                    break
        results.append((path, token, []))
    return host_tables.verdict(results, depth, None)


def _chosen(laws: Laws, b: int, node: int, inverse: float, key: int, race: Any) -> int:
    row = laws.logits_BRV[b, node].detach()
    logits = (row if row.dtype in (torch.float32, torch.float64) else row.float()).numpy()
    if math.isinf(inverse):
        return int(logits.argmax())
    index = None
    if laws.floor_BR is not None:
        index = np.flatnonzero(logits >= float(laws.floor_BR[b, node]))
    elif race is None:
        index = filters.contenders(logits, inverse, key)
    if index is not None:
        logits = logits[index]
    if race is None:
        noise = keys.log_race(key, row.shape[0], index)
    else:
        noise = np.log(race if index is None else race[index])
    merit = logits * logits.dtype.type(inverse)
    merit -= noise
    best = int(merit.argmax())
    return best if index is None else int(index[best])
