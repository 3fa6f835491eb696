"""Formats of packed weights, and how dense ones are rounded to those that files have.

Blocks are those of ggml (https://github.com/ggml-org/llama.cpp, ggml-common.h): of a row's inputs,
32 or 256 at a time, scales in half precision and whole numbers of few bits. `packed_layout.c` lays
them in tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A format, as `packed_tiles.h` numbers it."""

    name: str
    code: int
    chunk: int  #: inputs that share a head
    block: int  #: bytes of a chunk in a file's row
    per: int = 1  #: blocks of a chunk
    quantize: Callable[[Tensor], Tensor] | None = None  #: rows of a file of weights [O, I]
    dense: torch.dtype | None = None


def _blocks(weight_OI: Tensor) -> Tensor:
    return weight_OI.reshape(len(weight_OI), -1, 32)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _rows(*parts: Tensor) -> Tensor:
    """Of a file: half precision for what is float32, and bytes."""
    half = [
        x.half().view(torch.uint8) if x.is_floating_point() else x.view(torch.uint8) for x in parts
    ]
    return torch.cat(half, -1).flatten(1)


def _half_bytes(whole: Tensor) -> Tensor:
    small = whole.clamp(0, 15).to(torch.uint8)
    return small[..., :16] | small[..., 16:] << 4


def _quantize_q8_0(weight_OI: Tensor) -> Tensor:
    """A scale of the largest over 127, to the nearest, ties away from 0."""
    blocks = _blocks(weight_OI)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    near = blocks * _inverse(scale)
    return _rows(scale, ((near.abs() + 0.5).floor() * near.sign()).to(torch.int8))


def _quantize_q4_0(weight_OI: Tensor) -> Tensor:
    """A scale that takes the largest, with its sign, to -8."""
    blocks = _blocks(weight_OI)
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    return _rows(scale, _half_bytes((blocks * _inverse(scale) + 8.5).trunc()))


def _quantize_q4_1(weight_OI: Tensor) -> Tensor:
    """From the least to the largest in 15 steps."""
    blocks = _blocks(weight_OI)
    least = blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - least) / 15
    return _rows(scale, least, _half_bytes(((blocks - least) * _inverse(scale) + 0.5).trunc()))


FORMATS = {
    one.name: one
    for one in (
        Format("f32", 0, 32, 128, dense=torch.float32),
        Format("bf16", 1, 32, 64, dense=torch.bfloat16),
        Format("f16", 2, 32, 64, dense=torch.float16),
        Format("q8_0", 3, 32, 34, quantize=_quantize_q8_0),
        Format("q4_0", 4, 32, 18, quantize=_quantize_q4_0),
        Format("q4_1", 5, 32, 20, quantize=_quantize_q4_1),
        Format("q5_0", 6, 32, 22),
        Format("q5_1", 7, 32, 24),
        Format("q4_k", 8, 256, 144, 8),
        Format("q5_k", 9, 256, 176, 8),
        Format("q6_k", 10, 256, 210, 16),
    )
}
