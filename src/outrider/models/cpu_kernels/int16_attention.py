"""Attention of a window to itself in whole numbers of 16 bits, compiled: for encoders whose
products round to 8 bits.

Products of 16 bits take half as long as float32's where a processor has AVX2, and eleven bits of
queries, keys and values are as many as half precision has (`int16_attention.c`).
"""

import ctypes

import torch
from torch import Tensor

from outrider.models import isa
from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.int8 import LANES

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_ATTENTION = (*(_WHOLE,) * 4, ctypes.c_float, *(_POINTER,) * 2)
_LONGEST = 512  #: numbers a head, of which products are added up in 32 bits


def unsupported_reason(size: int) -> str | None:
    """Why heads of so many numbers are not attended to so; None: they can be.

    >>> unsupported_reason(24)
    'heads are a multiple of 16 numbers, 512 at most; got 24'
    """
    if size % LANES or not 0 < size <= _LONGEST:
        return f"heads are a multiple of {LANES} numbers, {_LONGEST} at most; got {size}"
    if not isa.holds("avx2"):
        return "this processor has no products of 16 bits that are faster than float32's"
    return build.unbuilt()


def attend(qkv_T3HE: Tensor, scale: float) -> Tensor:
    """softmax(scale q k') v of queries, keys and values in float32: [T, H, E].

    Raises RuntimeError where `unsupported_reason` says why.
    """
    slots, three, heads, size = qkv_T3HE.shape
    if three != 3 or qkv_T3HE.dtype != torch.float32 or size % LANES or size > _LONGEST:
        raise ValueError(f"float32 [T, 3, H, E] is wanted; got {list(qkv_T3HE.shape)}")
    qkv = qkv_T3HE.contiguous()
    out = qkv.new_empty(slots, heads, size)
    failed = build.function("outrider_int16_attention", _ATTENTION)(
        slots, heads, size, torch.get_num_threads(), scale, qkv.data_ptr(), out.data_ptr()
    )
    if failed:
        raise MemoryError(f"no memory for keys and values of {slots} slots")
    return out
