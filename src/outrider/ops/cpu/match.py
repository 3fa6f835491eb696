"""The target's own tokens on a CPU: the likeliest of each law, and sample-and-match.

Sample-and-match asks for the target's token at each node that is reached, and at no other:

    y = argmax(z / T - log E),  E the Exp(1) race of (seed, absolute position)
    y = argmax z when greedy

The race is the reference's, word for word, so a text depends on its seed alone. It is run by the
tokens above the floor alone, or by those that a bound leaves a chance.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.models.cpu_kernels import build
from outrider.noise import Purpose
from outrider.ops.cpu import host_tables, keys
from outrider.ops.cpu.host_tables import Array, native, per_thread
from outrider.types import Draft, Draws, Laws, Scores, Verdict
from outrider.types.drafts import Host


def verify(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Path, count and next token; needs no draft law."""
    laws = scores.laws
    batch, nodes = laws.logits_BRV.shape[:2]
    depth = draft.tree.max_depth
    tokens, kids = draft.tokens_BN.tolist(), draft.draws_BNK.tolist()
    inverse = laws.inverse_temperature_B.tolist()
    seeds, starts = draws.seed_B.tolist(), draws.start_B.tolist()
    injected = None if draws.target_race_BDV is None else draws.target_race_BDV.numpy()
    known = None if laws.greedy == "none" else peaks(laws)
    results: list[tuple[list[int], int, list[float]]] = []
    for b in range(batch):
        table = kids[b % len(kids)]  # rows may share one
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


# The most probable tokens of laws on a CPU: two passes over each, and nothing is sorted whole.

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_LIKELY = (_WHOLE, _WHOLE, _WHOLE, ctypes.c_float, _POINTER, _POINTER, _POINTER)
_RACE = (_WHOLE, _POINTER, ctypes.c_float, _POINTER, _POINTER)
MOST = 8  #: tokens of a law that are found in one pass
_compiled = cache(build.function)  # asking for one takes as long as some of them


class Peaks(NamedTuple):
    """The likeliest tokens of each law, MOST at most and of equals the first, and their logits;
    -1 and -inf behind them, and where a logit is NaN or +inf."""

    tokens: list[list[int]]
    logits: list[list[float]]
    sound: bool  #: whether every law has one


@dataclass
class FoundOnce:
    """What a step's target laws are asked for by the rule, what ends rows and the drafter: found in
    one pass over the logits, when somebody asks first. A `Host`."""

    peaks: Peaks | None = None
    asked: bool = False  #: whether they were looked for

    def stack(self, others: Sequence[Host]) -> Host:
        """Nothing is to be known of laws put together."""
        return FoundOnce(asked=True)


def found_once(laws: Laws) -> Laws:
    """As `outrider.ops.reference.draws.found_once`."""
    if laws.logits_BRV.dtype is not torch.float32:
        return laws
    return Laws(*laws[:-1], FoundOnce())


def peaks(laws: Laws) -> Peaks | None:
    """The likeliest tokens, where a step finds them once; None: they are not looked for."""
    once = laws.host
    if not isinstance(once, FoundOnce):
        return None
    if not once.asked:
        once.asked = True
        rows = laws.logits_BRV.detach().numpy().reshape(-1, laws.logits_BRV.shape[-1])
        tokens = _in_one_pass(rows, None, MOST, math.inf) if rows.size else None
        if tokens is not None:
            found = np.take_along_axis(rows, tokens, 1)
            found[tokens < 0] = -np.inf
            ids: list[list[int]] = tokens.tolist()
            once.peaks = Peaks(ids, found.tolist(), min(ids)[0] >= 0)
    return once.peaks


def likely(laws: Laws, count: int, gap: float) -> list[list[list[int]]]:
    """As `outrider.ops.reference.draws.likely`; of equals the first."""
    batch, rows = laws.logits_BRV.shape[:2]
    floors = [-math.inf] * (batch * rows)
    if laws.floor_BR is not None:
        floors = laws.floor_BR.ravel().tolist()
    known = peaks(laws) if count <= MOST else None
    if known is None or not known.sound:
        return _searched(laws, count, gap, floors)
    found = []
    for tokens, logits, floor in zip(known.tokens, known.logits, floors, strict=True):
        least, size = max(logits[0] - gap, floor), min(count, len(logits))
        while tokens[size - 1] < 0 or logits[size - 1] < least:  # the best one never is
            size -= 1
        found.append(tokens[:size])
    return [found[at : at + rows] for at in range(0, batch * rows, rows)]


def _searched(laws: Laws, count: int, gap: float, floors: list[float]) -> list[list[list[int]]]:
    """The same where nothing was found before."""
    batch, rows, vocab = laws.logits_BRV.shape
    whole = native(laws.logits_BRV).reshape(-1, vocab)
    limits = None if laws.floor_BR is None else laws.floor_BR.numpy().ravel()
    at_once = _in_one_pass(whole, limits, count, gap)
    if at_once is not None:
        found = [[token for token in row if token >= 0] for row in at_once.tolist()]
    else:
        found = []
        for z, floor in zip(whole, floors, strict=True):
            index = np.flatnonzero(z >= max(z.max() - gap, floor))
            found.append(index[np.argsort(-z[index], kind="stable")[:count]].tolist())
    return [found[at : at + rows] for at in range(0, batch * rows, rows)]


def _in_one_pass(logits: Array, floors: Array | None, count: int, gap: float) -> Array | None:
    """`likely` of rows [R, V] by the compiled loop, [R, count]; None: there is none."""
    if logits.dtype != np.float32:
        return None
    try:
        run = _compiled("outrider_likely", _LIKELY)
    except RuntimeError:
        return None
    rows = np.ascontiguousarray(logits)
    found = np.empty((len(rows), count), dtype=np.int64)
    least = None if floors is None else np.ascontiguousarray(floors, dtype=np.float32)
    run(
        *rows.shape, count, gap, rows.ctypes.data,
        None if least is None else least.ctypes.data, found.ctypes.data,
    )  # fmt: skip
    return found


def contenders(logits: Array, inverse: float, key: int) -> Array | None:
    """The tokens of a row that may win the race of a stream, in order; None: not looked for.

    Few of them lose: what is then to be computed of the race is a hundredth.
    """
    if logits.dtype != np.float32:
        return None
    try:
        run = _compiled("outrider_contenders", _RACE)
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
