"""Formats of packed weights: how blocks of a GGUF file are laid in tiles of 16 outputs.

Blocks are those of ggml (https://github.com/ggml-org/llama.cpp, ggml-common.h): of a row's inputs,
32 or 256 at a time, scales in half precision and whole numbers of few bits. Tiles have the same
bits (`packed_linear.h` reads them): first what scales 16 outputs (their head), then the numbers,
input by input, whole ones by two inputs; of 4 bits the eight of an output are one word, the even
ones below the odd ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TILE, GROUP = 16, 4  #: outputs of a tile, and tiles side by side (`packed_linear.h`)

#: Heads [tiles, chunks, bytes] and data [tiles, chunks, blocks, bytes].
Laid = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Format:
    """A format: `lay` takes the chunks of whole tiles, [O, chunks, bytes], as a file has them."""

    name: str
    code: int  #: of `packed_linear.h`
    chunk: int  #: inputs that share a head; 0: as many as a weight says
    block: int  #: bytes of a chunk in a file's row
    per: int = 1  #: blocks of a chunk
    lay: Callable[[Tensor], Laid] | None = None  #: None: not in files
    quantize: Callable[[Tensor], Tensor] | None = None  #: rows of a file of weights [O, I]
    dense: torch.dtype | None = None


def turned(x: Tensor, kind: torch.dtype, blocks: int = 1) -> Tensor:
    """Elements of a kind in x [O, chunks, bytes], outputs innermost: uint8 [O / 16, chunks, blocks,
    bytes * 16 / blocks]."""
    elements = x.contiguous().view(kind)
    outputs, chunks, count = elements.shape
    tiled = elements.view(outputs // TILE, TILE, chunks, count).permute(0, 2, 3, 1).contiguous()
    return tiled.view(torch.uint8).view(outputs // TILE, chunks, blocks, -1)


def _even_first(x: Tensor) -> Tensor:
    """Of each eight inputs the even ones before the odd ones."""
    return x.reshape(*x.shape[:-1], -1, 4, 2).transpose(-1, -2).flatten(-3)


def words(x: Tensor) -> Tensor:
    """Numbers of 4 bits, eight inputs a word."""
    return _bits(_even_first(x), 4)


def _dense(kind: torch.dtype) -> Callable[[Tensor], Laid]:
    def lay(chunks: Tensor) -> Laid:
        data = turned(chunks, kind)
        return data[:, :, 0, :0], data

    return lay


def _q8_0(chunks: Tensor) -> Laid:
    return turned(chunks[..., :2], torch.int16)[:, :, 0], turned(chunks[..., 2:], torch.int16)


def _low_and_high(x: Tensor) -> Tensor:
    """Numbers of 4 bits of bytes [..., B]: all lower halves, then all upper ones, [..., 2 B]."""
    return torch.cat((x & 15, x >> 4), -1)


def _nibbles(scales: int, high: int) -> Callable[[Tensor], Laid]:
    """Blocks of 32: so many scales, `high` bytes of fifth bits, and numbers of 4 bits."""

    def lay(chunks: Tensor) -> Laid:
        head, rest = chunks[..., : 2 * scales], chunks[..., 2 * scales :]
        data = turned(words(_low_and_high(rest[..., high:])), torch.int32)
        if high:
            fifth = torch.stack([rest[..., :high] >> i & 1 for i in range(8)], -1).flatten(-2)
            data = torch.cat((data, turned(_bits(_even_first(fifth), 1), torch.uint8)), -1)
        return turned(head, torch.int16)[:, :, 0], data

    return lay


def _superblock_head(chunks: Tensor) -> Tensor:
    """Of q4_k and q5_k: two scales, and for each of 8 blocks a scale and a minimum of 6 bits."""
    packed = chunks[..., 4:16]
    d, m, both = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = torch.cat((d & 63, (both & 15) | ((d >> 2) & 48)), -1)
    least = torch.cat((m & 63, (both >> 4) | ((m >> 2) & 48)), -1)
    low = turned(scale | (least & 3) << 6, torch.uint8, 8)
    upper = turned(least >> 2, torch.uint8, 8)
    upper = upper[..., : TILE // 2] | upper[..., TILE // 2 :] << 4
    head = turned(chunks[..., :4], torch.int16)[:, :, 0]
    return torch.cat((head, torch.cat((low, upper), -1).flatten(2)), -1)


def _halves_of_32(x: Tensor) -> Tensor:
    """Bytes [..., 32 n], of each 32 the lower halves and then the upper ones: [..., 64 n]."""
    parts = x.reshape(*x.shape[:-1], -1, 32)
    return torch.stack((parts & 15, parts >> 4), -2).flatten(-3)


def _bits(x: Tensor, width: int) -> Tensor:
    """Numbers of `width` bits, as many a byte as it holds: the first lowest."""
    count = 8 // width
    out = x[..., 0::count]
    for i in range(1, count):
        out = out | x[..., i::count] << width * i
    return out


def _q4_k(chunks: Tensor) -> Laid:
    data = turned(words(_halves_of_32(chunks[..., 16:])), torch.int32, 8)
    return _superblock_head(chunks), data


def _q5_k(chunks: Tensor) -> Laid:
    data = turned(words(_halves_of_32(chunks[..., 48:])), torch.int32, 8)
    high = torch.cat([chunks[..., 16:48] >> i & 1 for i in range(8)], -1)
    return _superblock_head(chunks), torch.cat(
        (data, turned(_bits(_even_first(high), 1), torch.uint8, 8)), -1
    )


def _q6_k(chunks: Tensor) -> Laid:
    low, high, scales = chunks[..., :128], chunks[..., 128:192], chunks[..., 192:208]
    low = torch.cat([_low_and_high(low[..., at : at + 64]) for at in (0, 64)], -1)
    high = torch.cat([high[..., at : at + 32] >> i & 3 for at in (0, 32) for i in (0, 2, 4, 6)], -1)
    data = turned(words(low), torch.int32, 16)
    data = torch.cat((data, turned(_bits(_even_first(high), 2), torch.int16, 16)), -1)
    head = turned(chunks[..., 208:], torch.int16), turned(scales, torch.uint8)
    return torch.cat(head, -1)[:, :, 0], data


def lay_groups(whole: Tensor, scale: Tensor, least: Tensor | None, bits: int) -> Laid:
    """Whole numbers [O, I] (int8; of 4 bits from 0 on with a minimum, else from -8 on) with a scale
    and a minimum of each group, float32 [O, groups]."""
    outputs, groups = scale.shape
    kept = [scale] if least is None else [scale, least]
    heads = [
        turned(x.contiguous().view(torch.uint8).view(outputs, groups, 4), torch.int32) for x in kept
    ]
    parts = whole.contiguous().view(torch.uint8).view(outputs, groups, -1)
    blocks = parts.shape[-1] // 32
    if bits == 8:
        return torch.cat(heads, -1)[:, :, 0], turned(parts, torch.int16, blocks)
    centre = 8 if least is None else 0
    return torch.cat(heads, -1)[:, :, 0], turned(words(parts + centre), torch.int32, blocks)


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
        Format("f32", 0, 32, 128, lay=_dense(torch.int32), dense=torch.float32),
        Format("bf16", 1, 32, 64, lay=_dense(torch.int32), dense=torch.bfloat16),
        Format("f16", 2, 32, 64, lay=_dense(torch.int16), dense=torch.float16),
        Format("q8_0", 3, 32, 34, lay=_q8_0, quantize=_quantize_q8_0),
        Format("q4_0", 4, 32, 18, lay=_nibbles(1, 0), quantize=_quantize_q4_0),
        Format("q4_1", 5, 32, 20, lay=_nibbles(2, 0), quantize=_quantize_q4_1),
        Format("q5_0", 6, 32, 22, lay=_nibbles(1, 4)),
        Format("q5_1", 7, 32, 24, lay=_nibbles(2, 4)),
        Format("q4_k", 8, 256, 144, 8, lay=_q4_k),
        Format("q5_k", 9, 256, 176, 8, lay=_q5_k),
        Format("q6_k", 10, 256, 210, 16, lay=_q6_k),
        Format("int8", 11, 0, 0),
        Format("int4", 12, 0, 0),
        Format("int4_zero", 13, 0, 0),
    )
}
