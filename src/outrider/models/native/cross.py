"""Attention over all keys and values of a window, compiled: in half precision, or in 8 bits.

A key of 8 bits is whole numbers round(k / s) and a scale s = max |k| / 127 of its own, and so are
values (`int8.rounded`). Sums are float32, in one order whatever stands beside a query (`cross.c`).
torch's products over the 1,500 states of a window take four times as long, and round several
queries otherwise than one.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.native import build
from outrider.models.native.int8 import LANES, rounded, whole_lanes

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_CROSS = (_WHOLE,) * 10 + (_POINTER,) * 4


def laid_keys(keys_BHTE: Tensor, int8: bool) -> Tensor:
    """Keys as `attend` reads them, bytes [B, H, ...]: their scales, and sixteen slots at a time."""
    scale_BHT, kept_BHTE = _kept(keys_BHTE, int8)
    batch, heads, slots, size = kept_BHTE.shape
    kept = kept_BHTE.view(batch, heads, slots // LANES, LANES, size).transpose(-1, -2)
    return _bytes(scale_BHT, kept)


def laid_values(values_BHTE: Tensor, int8: bool) -> Tensor:
    """Values as `attend` reads them, bytes [B, H, ...]: their scales, and slot by slot."""
    return _bytes(*_kept(values_BHTE, int8))


def attend(q_BQHE: Tensor, keys_BHX: Tensor, values_BHX: Tensor, slots: int, int8: bool) -> Tensor:
    """softmax(q k') v over all `slots` of each row, [B, Q, H, E]."""
    if q_BQHE.dtype == torch.float16:
        return attend(q_BQHE.float(), keys_BHX, values_BHX, slots, int8).half()
    run = build.function("outrider_cross", _CROSS)
    q = q_BQHE.contiguous()
    out = torch.empty_like(q)
    seat, head, _ = keys_BHX.stride()
    failed = run(
        8 if int8 else 16, *q.shape, slots, seat, head, torch.get_num_threads(),
        q.dtype == torch.bfloat16, q.data_ptr(), keys_BHX.data_ptr(), values_BHX.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the scores of {slots} slots")
    return out


def _kept(x_BHTE: Tensor, int8: bool) -> tuple[Tensor, Tensor]:
    """Scales [B, H, T] and numbers [B, H, T, E], in whole lanes."""
    slots, size = x_BHTE.shape[-2:]
    x = F.pad(x_BHTE, (0, whole_lanes(size) - size, 0, whole_lanes(slots) - slots))
    return rounded(x.float()) if int8 else (torch.ones(x.shape[:-1]), x.bfloat16())


def _bytes(scale_BHT: Tensor, kept: Tensor) -> Tensor:
    parts = [part.contiguous().flatten(2).view(torch.int8) for part in (scale_BHT, kept)]
    return torch.cat(parts, -1)
