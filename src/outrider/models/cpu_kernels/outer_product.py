"""States that decay and gain outer products, compiled: `outer_product.c`.

A call's nodes read a head's state once, where torch's operators go through memory for each node
and each settled token again.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.models.cpu_kernels import build

LANES, WIDEST_KEY, FEW = 16, 256, 64  #: of outer_product.c
_DTYPES = (torch.bfloat16, torch.float32)  #: of a mixer's tables
_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_ADVANCE = (_WHOLE,) * 8 + (_POINTER,) * 7
_NODES = (_WHOLE,) * 10 + (_POINTER,) * 16


class _Scan(ctypes.Structure):
    """`Scan` of outer_product.c."""

    _fields_ = [
        *(
            (name, _WHOLE)
            for name in (
                *("rows", "nodes", "heads", "groups", "keys", "values", "ring", "threads"),
                *("is_half", "plus", "x_row", "x_node", "dt_row", "dt_node", "b_row", "b_node"),
                *("c_row", "c_node", "x", "dt", "b", "c", "a", "bias", "skip", "origins", "first"),
                *("count", "lines", "states", "log_decay", "log_key", "log_delta", "work", "out"),
            )
        ),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
    ]


class Steps(NamedTuple):
    """What a layer of Mamba-2 makes of its dt: `plus` the softplus of dt + bias, cut to limits."""

    a_H: Tensor
    skip_H: Tensor | None  #: D
    bias_H: Tensor | None
    plus: bool
    limit: tuple[float, float]


def unsupported_reason(state: Tensor) -> str | None:
    """Why states [B, H, K, V] as this are advanced by torch's operators; None: they need not be."""
    if state.device.type != "cpu" or state.dtype != torch.float32:
        return "compiled for float32 on a CPU alone"
    keys, values = state.shape[-2:]
    if keys % LANES or values % LANES or keys > WIDEST_KEY:
        return f"compiled for multiples of {LANES}, keys of up to {WIDEST_KEY}, alone"
    return build.unbuilt()


def advance(
    state: Tensor,
    into: Tensor,
    log: tuple[Tensor, Tensor, Tensor],
    first_B: Tensor,
    count_B: Tensor,
) -> None:
    """Write to `into`, which may be `state`, what so many entries of each row's log make of it.

    The log is decay [B, R, H] or [B, R, H, K], key [B, R, G, K] and delta [B, R, H, V]; a row's
    first entry is the one at place `first_B` modulo R.
    """
    decay, key, delta = (table.contiguous() for table in log)
    if not into.is_contiguous() or into.shape != state.shape:
        raise ValueError(f"states {list(into.shape)} in pieces, for {list(state.shape)}")
    rows, heads, keys, values = state.shape
    places, source = (first_B.contiguous(), count_B.contiguous()), state.contiguous()
    build.function("outrider_advance", _ADVANCE)(
        rows, heads, key.shape[2], keys, values, key.shape[1], decay.dim() == 4,
        torch.get_num_threads(),
        *(table.data_ptr() for table in (*places, decay, key, delta, source, into)),
    )  # fmt: skip


def over_nodes(
    state: Tensor,
    origins_BQ: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    decay: Tensor,
    log: tuple[Tensor, Tensor, Tensor],
    lines_BQ: Tensor,
    due: tuple[Tensor, Tensor],
) -> Tensor:
    """Outputs [B, Q, H, V] of a call's nodes, whose entries are written to the log.

    Ahead of that the states are advanced, in place, by what is due: `due[1]` [B] entries from place
    `due[0]` [B] modulo R on. The log is as `advance` takes it, the nodes' places are `lines_BQ`.

    A node starts from the row's state [B, H, K, V] where `origins_BQ` is 0, from that behind node n
    where it is 1 + n. With `beta` [B, Q, H] its delta corrects what the state says of its key, else
    it is its value [B, Q, H, V]; query and key are [B, Q, G, K], decay [B, Q, H] or [B, Q, H, K].
    """
    rows, heads, keys, values = state.shape
    nodes, threads = query.shape[1], torch.get_num_threads()
    share = decay if beta is None else beta
    if not all(table.is_contiguous() for table in (state, *log)):
        raise ValueError("states and logs lie in one piece each")
    asked = origins_BQ, state, query, key, value, share, decay
    read = [table.contiguous() for table in asked]
    places = [table.contiguous() for table in (*due, lines_BQ)]
    room = state.new_empty(threads, nodes, keys, values, dtype=torch.float32)
    delta, out = torch.empty_like(read[4]), torch.empty_like(read[4])
    build.function("outrider_outer_nodes", _NODES)(
        rows, nodes, heads, key.shape[2], keys, values, decay.dim() == 4, beta is not None,
        threads, log[0].shape[1],
        *(table.data_ptr() for table in (*read, room, delta, out, *places, *log)),
    )  # fmt: skip
    return out


def over_scan(
    state: Tensor,
    origins_BQ: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    steps: Steps,
    log: tuple[Tensor, Tensor, Tensor],
    lines_BQ: Tensor,
    due: tuple[Tensor, Tensor],
) -> Tensor | None:
    """`over_nodes` of state space duality [B, Q, H, P], D x included, by a mixer's own tables.

    They are x [B, Q, H, P], dt [B, Q, H], B and C [B, Q, G, N] of one dtype, float32 or bfloat16.
    None where they lie otherwise than in rows of nodes.
    """
    x, _, b, _ = inputs
    rows, nodes, heads, values = x.shape
    groups, keys = b.shape[2:]
    if len({one.dtype for one in inputs}) > 1 or x.dtype not in _DTYPES or not _in_rows(inputs):
        return None
    threads = torch.get_num_threads()
    room = nodes * (keys * values if nodes > FEW else keys + 1)
    parts = 2 * rows * nodes * (groups * keys + heads * values + heads)
    work = x.new_empty(parts + threads * room, dtype=torch.float32)
    out = x.new_empty(rows, nodes, heads, values, dtype=torch.float32)
    of_heads = [
        None if one is None else one.float().contiguous()
        for one in (steps.a_H, steps.bias_H, steps.skip_H)
    ]
    about = _Scan(
        rows, nodes, heads, groups, keys, values, log[0].shape[1], threads,
        x.dtype is torch.bfloat16, steps.plus, *(at for one in inputs for at in one.stride()[:2]),
        *(one.data_ptr() for one in inputs),
        *(0 if one is None else one.data_ptr() for one in of_heads),
        *(one.data_ptr() for one in (origins_BQ, *due, lines_BQ, state, *log, work, out)),
        *steps.limit,
    )  # fmt: skip
    build.function("outrider_ssd", (_POINTER,))(ctypes.addressof(about))
    return out


def _in_rows(tables: Sequence[Tensor]) -> bool:
    """Whether a node's numbers lie side by side."""
    return all(
        one.stride(-1) == 1
        and (one.dim() < 4 or one.shape[2] == 1 or one.stride(2) == one.shape[3])
        for one in tables
    )
