"""Attention over all keys and values of rows' sources, compiled for bfloat16 and float32.

Sums are float32, in one order whatever stands beside a query (`cross.c`). torch's products over the
1,500 states of a window round several queries otherwise than one, and take longer: four times in
bfloat16, and for several queries of float32 twice as long as for one.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.int8 import LANES, whole_lanes

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_CROSS = (*(_WHOLE,) * 9, ctypes.c_float, *(_POINTER,) * 5)
_DTYPES = (torch.bfloat16, torch.float32)


def unsupported_reason(like: Tensor) -> str | None:
    """Why states as `like` are read by torch's operators; None: they need not be."""
    if like.device.type != "cpu" or like.dtype not in _DTYPES:
        return "compiled for bfloat16 and float32 on a CPU alone"
    return build.unbuilt()


def laid_keys(keys_BHTE: Tensor) -> Tensor:
    """Keys as `attend` reads them, [B, H, T' E']: sixteen slots at a time."""
    kept = _padded(keys_BHTE)
    batch, heads, slots, size = kept.shape
    return kept.view(batch, heads, slots // LANES, LANES, size).transpose(-1, -2).flatten(2)


def laid_values(values_BHTE: Tensor) -> Tensor:
    """Values as `attend` reads them, [B, H, T' E']: slot by slot."""
    return _padded(values_BHTE).flatten(2)


def attend(
    q_BQHE: Tensor,
    keys_BHX: Tensor,
    values_BHX: Tensor,
    slots_B: Tensor,
    most: int,
    scale: float = 1.0,
) -> Tensor:
    """softmax(scale q k') v over the first `slots_B` (int64) of each row's `most`, [B, Q, H, E]."""
    run = build.function("outrider_cross", _CROSS)
    q = q_BQHE.contiguous()
    out = torch.empty_like(q)
    batch, _, heads, size = q.shape
    laid = batch, heads, whole_lanes(most) * whole_lanes(size)
    if not keys_BHX.shape == values_BHX.shape == laid or slots_B.shape != (batch,):
        raise IndexError(f"{most} slots of {list(q.shape)} queries in {list(keys_BHX.shape)}")
    if not keys_BHX.dtype == values_BHX.dtype == q.dtype:
        raise TypeError(f"queries of {q.dtype} over keys of {keys_BHX.dtype}")
    seat, head, _ = keys_BHX.stride()
    failed = run(
        *q.shape, most, seat, head, torch.get_num_threads(), q.dtype == torch.bfloat16, scale,
        slots_B.data_ptr(), q.data_ptr(), keys_BHX.data_ptr(), values_BHX.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the scores of {most} slots")
    return out


def _padded(x_BHTE: Tensor) -> Tensor:
    """In whole lanes."""
    slots, size = x_BHTE.shape[-2:]
    more = 0, whole_lanes(size) - size, 0, whole_lanes(slots) - slots
    return F.pad(x_BHTE, more).contiguous()
