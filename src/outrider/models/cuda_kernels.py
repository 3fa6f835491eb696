# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""What stands between a Llama's products on a CUDA device: five kernels a layer, in Triton.

A step of few nodes is launches: a layer of transformers takes dozens of them, each a few
microseconds, whatever it computes. Here a layer is four products and five kernels: sum and norm,
rotation and cache, attention, sum and norm, gate. Sums are float32; what is rounded between is
rounded where transformers rounds it. Attention reads the cache where it lies and the mask as it is,
in parts side by side; prompts go to torch's.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from outrider.models.cache import SlotLayer
from outrider.models.decoder import additive
from outrider.types import Nodes

if TYPE_CHECKING:
    from outrider.models.layer import AttentionShape

WIDEST = 256  #: numbers of a head
MOST = 512  #: rows of a key/value head: more are a prompt's, which torch is quicker with
ROWS = 64  #: of them that a program has
SLICE = 64  #: slots that are read at once
#: Slots of a program: where parts lie follows from the slots alone, not from the width or who is
#: beside, so that a row's answer has the same bits behind every mask, eager and replayed. There are
#: `SPLITS` parts of so many slots, then as many of twice as many, and so on.
READS = 128
SPLITS = 64
JOINED = 16  #: parts that are summed at once, however few there are, for the same reason
#: Arguments that differ from call to call: one kernel serves them all.
COUNTS = ("queries", "width", "splits", "count", "blocks")


@triton.jit
def add_norm(
    state, more, weight, total, normed, eps, width,
    HAS_MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """state + more, and that over its root mean square, times the weight. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(state + row + at, mask=there, other=0.0)
    if HAS_MORE:
        added = tl.load(more + row + at, mask=there, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row + at, x, mask=there)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    small = (wide * scale).to(normed.dtype.element_ty).to(tl.float32)
    by = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + row + at, (small * by).to(normed.dtype.element_ty), mask=there)


@triton.jit
def gate_up(both, out, width, BLOCK: tl.constexpr):
    """silu(gate) * up of both side by side. Grid (rows, slices)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    gate = tl.load(both + row * 2 * width + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + (row * 2 + 1) * width + at, mask=there, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (opened * up).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=COUNTS)
def rotate(
    qkv, cos, sin, positions, slots, turned, keys, values, queries, heads, kv_heads,
    row_stride, head_stride, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Queries [B, H, Q, E] turned, keys turned and values as they are into the cache. Grid (B * Q,
    H + 2 K)."""
    node, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, query = node // queries, node % queries
    size: tl.constexpr = 2 * HALF
    at = tl.arange(0, BLOCK)
    there = at < HALF
    start = qkv + (node * (heads + 2 * kv_heads) + head) * size + at
    low = tl.load(start, mask=there, other=0.0)
    high = tl.load(start + HALF, mask=there, other=0.0)
    if head < heads + kv_heads:
        place = tl.load(positions + node) * HALF + at
        c = tl.load(cos + place, mask=there, other=0.0).to(tl.float32)
        s = tl.load(sin + place, mask=there, other=0.0).to(tl.float32)
        a, b = low.to(tl.float32), high.to(tl.float32)
        low = (a * c - b * s).to(low.dtype)
        high = (b * c + a * s).to(high.dtype)
    if head < heads:
        to = turned + ((row * heads + head) * queries + query) * size + at
        tl.store(to, low, mask=there)
        tl.store(to + HALF, high, mask=there)
    else:
        number = (head - heads) % kv_heads
        entry = row * row_stride + number * head_stride + tl.load(slots + node) * size + at
        if head < heads + kv_heads:
            tl.store(keys + entry, low, mask=there)
            tl.store(keys + entry + HALF, high, mask=there)
        else:
            tl.store(values + entry, low, mask=there)
            tl.store(values + entry + HALF, high, mask=there)


@triton.jit(do_not_specialize=COUNTS)
def attend(
    turned, keys, values, visible, out, sums, queries, kv_heads, groups, width, blocks,
    scale, row_stride, head_stride, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    SLICE: tl.constexpr, SPLIT: tl.constexpr, READS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attention of some rows of a key/value head to a part of the text. Grid (splits, K * blocks,
    B).

    SPLIT writes what a slice says, not divided yet, with its maximum and its sum; else it is whole.
    """
    part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    rows = groups * queries
    r, e = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_E)
    has_r, has_e = r < rows, e < SIZE
    first = (row * kv_heads + head) * rows
    q = tl.load(
        turned + (first + r)[:, None] * SIZE + e[None], mask=has_r[:, None] & has_e[None], other=0.0
    )
    lies = row * row_stride + head * head_stride
    seen = visible + (row * queries + r % queries) * width
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    said = tl.zeros([ROWS, BLOCK_E], tl.float32)
    times = 1 << (part // SPLITS)  # as `parts` counts
    slots = READS * times
    start = READS * SPLITS * (times - 1) + part % SPLITS * slots
    end = tl.minimum(start + slots, width)
    for begin in range(start, end, SLICE):
        w = begin + tl.arange(0, SLICE)
        has_w = w < end
        sees = tl.load(seen[:, None] + w[None], mask=has_r[:, None] & has_w[None], other=0) != 0
        if tl.max(tl.max(sees.to(tl.int32), axis=1), axis=0) > 0:
            where = lies + w[:, None] * SIZE + e[None]
            entry = has_w[:, None] & has_e[None]
            k = tl.load(keys + where, mask=entry, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(sees, scores, float("-inf"))
            top = tl.maximum(best, tl.max(scores, axis=1))
            level = tl.where(top == float("-inf"), 0.0, top)
            shrink = tl.exp(best - level)
            weights = tl.exp(scores - level[:, None])
            total = total * shrink + tl.sum(weights, axis=1)
            v = tl.load(values + where, mask=entry, other=0.0)
            said = said * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            best = top
    if SPLIT:
        at = (part * tl.num_programs(2) + row) * kv_heads * rows + head * rows + r
        tl.store(out + at[:, None] * SIZE + e[None], said, mask=has_r[:, None] & has_e[None])
        tl.store(sums + 2 * at, best, mask=has_r)
        tl.store(sums + 2 * at + 1, total, mask=has_r)
    else:
        answer = (said / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
        to = (row * queries + r % queries) * kv_heads * groups + head * groups + r // queries
        tl.store(out + to[:, None] * SIZE + e[None], answer, mask=has_r[:, None] & has_e[None])


@triton.jit(do_not_specialize=COUNTS)
def join(
    parts, sums, out, splits, count, queries, kv_heads, groups,
    SIZE: tl.constexpr, BLOCK_E: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """What the slices of a text said, as one. Grid (B * K * rows,); `count` of them in all."""
    number = tl.program_id(0).to(tl.int64)
    rows = groups * queries
    r, head, row = number % rows, number // rows % kv_heads, number // (rows * kv_heads)
    e = tl.arange(0, BLOCK_E)
    has_e = e < SIZE
    best, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    said = tl.zeros([BLOCK_E], tl.float32)
    for first in range(0, splits, JOINED):  # what is behind the text adds nothing, to the last bit
        s = first + tl.arange(0, JOINED)
        at, there = s * count + number, s < splits
        each = tl.load(sums + 2 * at, mask=there, other=float("-inf"))
        top = tl.maximum(best, tl.max(each, axis=0))
        level = tl.where(top == float("-inf"), 0.0, top)
        shrink, weight = tl.exp(best - level), tl.exp(each - level)
        more = tl.load(sums + 2 * at + 1, mask=there, other=0.0)
        total = total * shrink + tl.sum(weight * more, axis=0)
        part = tl.load(
            parts + at[:, None] * SIZE + e[None], mask=there[:, None] & has_e[None], other=0.0
        )
        said = said * shrink + tl.sum(part * weight[:, None], axis=0)
        best = top
    answer = said / tl.where(total > 0, total, 1.0)
    to = (row * queries + r % queries) * kv_heads * groups + head * groups + r // queries
    tl.store(out + to * SIZE + e, answer.to(out.dtype.element_ty), mask=has_e)


def parts(width: int) -> int:
    """How many parts a text of so many slots has.

    >>> parts(100), parts(8192), parts(8193), parts(131072)
    (1, 64, 65, 260)
    """
    level = ((width - 1) // (READS * SPLITS) + 1).bit_length() - 1
    ahead = READS * SPLITS * ((1 << level) - 1)
    return level * SPLITS - (ahead - width) // (READS << level)


def unsupported_reason(shape: "AttentionShape", act: str) -> str | None:
    """Why a Llama of this shape runs torch's operators; None: it need not."""
    if act not in ("silu", "swish"):
        return "written for silu alone"
    if shape.size > WIDEST or shape.size % 2:
        return f"written for heads of an even size up to {WIDEST}"
    return None


class TritonKernels:
    """The kernels for one model. `cos` and `sin` [positions, E] are its rotary factors, of sin the
    second half as it is."""

    def __init__(self, shape: "AttentionShape", cos: Tensor, sin: Tensor) -> None:
        self.shape, self.dtype = shape, cos.dtype
        half = shape.size // 2
        self.cos, self.sin = cos[:, :half].contiguous(), sin[:, half:].contiguous()

    def weight(self, weight_E: Tensor) -> Tensor:
        """As it is."""
        return weight_E.detach().contiguous()

    def open(self, nodes: Nodes) -> "TritonCall":
        """What all layers of a call read."""
        return TritonCall(self, nodes)


class TritonCall:
    """One call of a model."""

    def __init__(self, of: TritonKernels, nodes: Nodes) -> None:
        self.of = of
        self.positions, self.slots = nodes.positions_BQ.contiguous(), nodes.slots_BQ.contiguous()
        self.visible = nodes.visible_BQW.contiguous()
        _, queries, width = self.visible.shape
        shape = of.shape
        rows = queries * (shape.heads // shape.kv_heads)
        self.mask = None if rows <= MOST else additive(nodes.visible_BQW, of.dtype)
        self.rows = min(ROWS, max(16, triton.next_power_of_2(rows)))
        self.blocks = -(-rows // self.rows)
        self.splits = parts(width)

    def norm(self, state: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """One kernel for the sum and its norm."""
        state = state.contiguous()
        normed = torch.empty_like(state)
        total = state if more is None else torch.empty_like(state)
        width = state.shape[-1]
        block = triton.next_power_of_2(width)
        added = state if more is None else more.contiguous()
        add_norm[(state.numel() // width,)](
            state, added, weight, total, normed, self.of.shape.eps, width,
            HAS_MORE=more is not None, BLOCK=block, num_warps=min(max(block // 256, 1), 8),
        )  # fmt: skip
        return total, normed

    def attend(self, qkv: Tensor, store: SlotLayer) -> Tensor:
        """Rotation and cache in one kernel, attention in one or two."""
        shape = self.of.shape
        batch, queries, _ = qkv.shape
        heads, kv_heads, size = shape.heads, shape.kv_heads, shape.size
        keys, values = store.buffers(kv_heads, size, qkv)
        turned = qkv.new_empty(batch, heads, queries, size)
        row_stride, head_stride = keys.stride()[:2]
        rotate[batch * queries, heads + 2 * kv_heads](
            qkv.contiguous(), self.of.cos, self.of.sin, self.positions, self.slots, turned, keys,
            values, queries, heads, kv_heads, row_stride, head_stride,
            HALF=size // 2, BLOCK=triton.next_power_of_2(size // 2), num_warps=1,
        )  # fmt: skip
        width, groups = self.visible.shape[2], heads // kv_heads
        if self.mask is not None:
            k, v = (each[:batch, :, :width].repeat_interleave(groups, 1) for each in (keys, values))
            x = F.scaled_dot_product_attention(turned, k, v, attn_mask=self.mask)
            return x.transpose(1, 2).reshape(batch, queries, heads * size)
        out = qkv.new_empty(batch, queries, heads * size)
        split = self.splits > 1
        count = batch * heads * queries
        said = qkv.new_empty(self.splits, count, size, dtype=torch.float32) if split else out
        sums = qkv.new_empty(self.splits, count, 2, dtype=torch.float32) if split else out
        block = triton.next_power_of_2(size)
        attend[self.splits, kv_heads * self.blocks, batch](
            turned, keys, values, self.visible.view(torch.uint8), said, sums, queries, kv_heads,
            groups, width, self.blocks, size**-0.5, row_stride, head_stride, SIZE=size,
            ROWS=self.rows, BLOCK_E=max(block, 16), SLICE=SLICE, SPLIT=split, READS=READS,
            SPLITS=SPLITS, num_warps=4,
        )  # fmt: skip
        if split:
            join[(count,)](
                said, sums, out, self.splits, count, queries, kv_heads, groups, SIZE=size,
                BLOCK_E=block, JOINED=JOINED, num_warps=1,
            )  # fmt: skip
        return out

    def gate(self, both: Tensor) -> Tensor:
        """One kernel for both."""
        both = both.contiguous()
        width = both.shape[-1] // 2
        out = both.new_empty(*both.shape[:-1], width)
        gate_up[both.numel() // both.shape[-1], -(-width // 1024)](
            both, out, width, BLOCK=1024, num_warps=4
        )
        return out
