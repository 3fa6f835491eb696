"""What stands between the products of layers with states, compiled for a CPU: `mixers.c`.

Convolutions over time are what torch's operators give but for e^x; a norm's sum is added in another
order. A node is computed in one order whatever stands beside it.
"""

import ctypes
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.models.cpu_kernels import build

LANES, MOST_TAPS = 16, 16  #: of mixers.c
_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_NORM = (*(_WHOLE,) * 6, ctypes.c_float, *(_POINTER,) * 4)
_DTYPES = (torch.bfloat16, torch.float32)
_ACTIVATES = {None: 0, "silu": 1, "swish": 1}


class _Windows(ctypes.Structure):
    """`Windows` of mixers.c."""

    _fields_ = [
        (name, _WHOLE)
        for name in (
            *("rows", "nodes", "channels", "taps", "slots", "is_half", "activates", "x_row"),
            *("x_node", "places", "lines", "there", "x", "weight", "bias", "source", "out"),
        )
    ]


class Windows(NamedTuple):
    """Where nodes' windows lie in a table [B, S, C]: `places_BQK`, of which `there_BQK` (None: all)
    are text. Inputs are written to `lines_BQ` of it first, unless that is None."""

    places_BQK: Tensor
    there_BQK: Tensor | None
    lines_BQ: Tensor | None


def unsupported_reason(
    x: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: str | None
) -> str | None:
    """Why a convolution over inputs as `x` is torch's operators'; None: it need not be."""
    if x.device.type != "cpu" or x.dtype not in _DTYPES:
        return "compiled for bfloat16 and float32 on a CPU alone"
    if weight_CK.dtype != x.dtype or (bias_C is not None and bias_C.dtype != x.dtype):
        return "compiled for weights of the inputs' dtype alone"
    if activation not in _ACTIVATES:
        return "compiled for silu alone"
    channels, taps = weight_CK.shape
    if channels < LANES or taps > MOST_TAPS:
        return f"compiled for {LANES} channels or more, and up to {MOST_TAPS} taps"
    return build.unbuilt()


def convolve(
    source_BSC: Tensor,
    windows: Windows,
    x_BQC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
) -> Tensor:
    """The convolution [B, Q, C] of nodes' windows."""
    if not source_BSC.is_contiguous() or source_BSC.dtype != x_BQC.dtype:
        raise ValueError(f"inputs of {x_BQC.dtype} beside {source_BSC.dtype} in pieces")
    x = x_BQC if x_BQC.stride(-1) == 1 else x_BQC.contiguous()
    rows, nodes, channels = x.shape
    weight, bias = weight_CK.contiguous(), None if bias_C is None else bias_C.contiguous()
    places, there, lines = windows
    out = x.new_empty(rows, nodes, channels)
    about = _Windows(
        rows, nodes, channels, weight.shape[1], source_BSC.shape[1], x.dtype is torch.bfloat16,
        _ACTIVATES[activation], *x.stride()[:2], places.data_ptr(),
        lines.data_ptr() if lines is not None else 0, there.data_ptr() if there is not None else 0,
        x.data_ptr(), weight.data_ptr(), bias.data_ptr() if bias is not None else 0,
        source_BSC.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    build.function("outrider_short_conv", (_POINTER,))(ctypes.addressof(about))
    return out


def norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    gate: Tensor | None = None,
    gate_ahead: bool = False,
    one: bool = False,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) weight in float32, of groups of numbers of the last dimension.

    With `one` it is 1 + weight. A gate [..., width] multiplies by silu(gate) what is normed, if
    `gate_ahead`, else the answer.
    """
    x = x.contiguous()
    width, at, apart = x.shape[-1], 0, 0
    if gate is not None:
        # rows of a gate may be parts of longer ones, all as far from each other
        found = _apart(gate)
        if found is None:
            gate, found = gate.contiguous(), width
        at, apart = gate.data_ptr(), found
    out = torch.empty_like(x)
    build.function("outrider_gated_norm", _NORM)(
        x.numel() // width, width, group, apart, gate_ahead, one, eps, x.data_ptr(), at,
        weight.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def _apart(gate: Tensor) -> int | None:
    """How far apart all rows of a gate are; None: not all as far, or in pieces."""
    rows = [(n, far) for n, far in zip(gate.shape, gate.stride(), strict=True) if n != 1]
    for (_, far), (n, inner) in pairwise(rows[:-1]):
        if far != n * inner:
            return None
    return None if gate.stride(-1) != 1 else rows[-2][1] if len(rows) > 1 else gate.shape[-1]
