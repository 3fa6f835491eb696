"""Formats of packed weights: how blocks of a GGUF file are laid in tiles of 16 outputs.

Blocks are those of ggml (https://github.com/ggml-org/llama.cpp, ggml-common.h): of a row's inputs,
32 or 256 at a time, scales in half precision and whole numbers of few bits. A tile has the same
bits: first the scales of 16 outputs (its head), then the numbers, input by input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TILE, GROUP = 16, 4  #: outputs of a tile, and tiles side by side (`packed_linear.c`)


@dataclass(frozen=True)
class Format:
    """A format: `lay` takes blocks [O, chunks, block bytes] of whole tiles to heads and data of
    tiles, [tiles, chunks, bytes]."""

    name: str
    code: int  #: of `packed_linear.c`
    chunk: int  #: inputs
    block: int  #: bytes of them in a row
    head: int  #: bytes for each output of a chunk, and so is `data`
    data: int
    lay: Callable[[Tensor], tuple[Tensor, Tensor]]
    quantize: Callable[[Tensor], Tensor] | None = None
    dense: bool = False


def _turned(blocks: Tensor, kind: torch.dtype) -> Tensor:
    """Elements of each chunk, of a kind, with outputs innermost: uint8 [tiles, chunks, bytes]."""
    elements = blocks.contiguous().view(kind)
    outputs, chunks, count = elements.shape
    tiled = elements.view(outputs // TILE, TILE, chunks, count).permute(0, 2, 3, 1)
    return tiled.reshape(outputs // TILE, chunks, count * TILE).contiguous().view(torch.uint8)


def _dense(kind: torch.dtype) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def lay(blocks: Tensor) -> tuple[Tensor, Tensor]:
        data = _turned(blocks, kind)
        return data[..., :0], data

    return lay


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _turned(blocks[..., :2], torch.int16), _turned(blocks[..., 2:], torch.uint8)


def _quantize_q8_0(weight_OI: Tensor) -> Tensor:
    """As ggml does: a scale of the largest over 127, to the nearest, ties away from 0."""
    blocks = weight_OI.reshape(len(weight_OI), -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    near = blocks * inverse
    whole = (near.abs() + 0.5).floor() * near.sign()
    parts = scale.half().view(torch.uint8), whole.to(torch.int8).view(torch.uint8)
    return torch.cat(parts, -1).flatten(1)


FORMATS = {
    one.name: one
    for one in (
        Format("f32", 0, 32, 128, 0, 128, _dense(torch.int32), dense=True),
        Format("bf16", 1, 32, 64, 0, 64, _dense(torch.int32), dense=True),
        Format("f16", 2, 32, 64, 0, 64, _dense(torch.int16), dense=True),
        Format("q8_0", 3, 32, 34, 2, 32, _q8_0, _quantize_q8_0),
    )
}
