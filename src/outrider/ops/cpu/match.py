"""Sample-and-match on a CPU.

It asks for the target's token at each node that is reached, and at no other:

    y = argmax(z / T - log E),  E the Exp(1) race of (seed, absolute position)
    y = argmax z when greedy

The race is the reference's, word for word, so a text depends on its seed alone. It is run by the
tokens above the floor alone, or by those that a bound leaves a chance.
"""

import ctypes
import math
from typing import Any

import numpy as np

from outrider.noise import Purpose
from outrider.ops.cpu import host_tables, keys
from outrider.ops.cpu.host_tables import Array, native, per_thread
from outrider.ops.cpu.top_tokens import cached_top_tokens, compiled
from outrider.types import Draft, Draws, Laws, Scores, Verdict

_RACE = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p)


def verify(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Path, count and next token; needs no draft law."""
    laws = scores.laws
    batch, nodes = laws.logits_BRV.shape[:2]
    depth, inverse = draft.tree.max_depth, [math.inf] * batch
    if depth:
        tokens, kids = draft.tokens_BN.tolist(), draft.draws_BNK.tolist()
    if laws.greedy != "all":  # greedy rows have no noise
        inverse = laws.inverse_temperature_B.tolist()
        seeds, starts = draws.seed_B.tolist(), draws.start_B.tolist()
    injected = None if draws.target_race_BDV is None else draws.target_race_BDV.numpy()
    known = None if laws.greedy == "none" else cached_top_tokens(laws)
    results: list[tuple[list[int], int, list[float]]] = []
    for b in range(batch):
        table = kids[b % len(kids)] if depth else ()  # rows may share one
        path: list[int] = []
        node, going = 0, True
        while going:
            race = None if injected is None else injected[b, len(path)]
            key = 0
            if race is None and not math.isinf(inverse[b]):
                key = keys.stream(seeds[b], starts[b] + len(path) + 1, Purpose.TARGET)
            token = -1  # it was not looked for, or there is none
            if known is not None and math.isinf(inverse[b]):
                token = known.tokens[b * nodes + node][0]
            if token < 0:
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
    logits = native(laws.logits_BRV[b, node])
    if math.isinf(inverse):
        return int(logits.argmax())
    index = None
    if laws.floor_BR is not None:
        index = np.flatnonzero(logits >= float(laws.floor_BR[b, node]))
    elif race is None:
        index = contenders(logits, inverse, key)
    if index is not None:
        logits = logits[index]
    if race is None:
        noise = keys.log_race(key, laws.logits_BRV.shape[-1], index)
    else:
        noise = np.log(race if index is None else race[index])
    merit = logits * logits.dtype.type(inverse)
    merit -= noise
    best = int(merit.argmax())
    return best if index is None else int(index[best])


def contenders(logits: Array, inverse: float, key: int) -> Array | None:
    """The tokens of a row that may win the race of a stream, in order; None: not looked for.

    Few of them lose: what is then to be computed of the race is a hundredth.
    """
    if logits.dtype != np.float32:
        return None
    try:
        run = compiled("outrider_contenders", _RACE)
    except RuntimeError:
        return None
    row = np.ascontiguousarray(logits)
    found = _places(row.size)
    name = ctypes.c_uint64(key)
    count = run(row.size, row.ctypes.data, inverse, ctypes.addressof(name), found.ctypes.data)
    return found[:count]


@per_thread
def _places(vocab: int) -> Array:
    return np.empty(vocab, dtype=np.int64)
