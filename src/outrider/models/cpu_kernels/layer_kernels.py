"""What stands between a Llama's products, compiled for a CPU: three calls a layer, where not all
layers are one call (`decoder_layers`).

States, their cache and weights are bfloat16 or float32; sums are float32. A row is computed in one
order whatever stands beside it (`attend.c`, `kernels.c`), so no form of a call has to be tried at
load, and none is padded.
"""

import ctypes
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.models.batch_invariance import BatchInvariance
from outrider.models.cache import SlotCache, SlotLayer
from outrider.models.cpu_kernels import build, tile_kernels
from outrider.types import Nodes

if TYPE_CHECKING:
    from outrider.models.layer import AttentionShape

#: Every count of nodes and every width is as good as any other, and so is every tree.
ROUNDING = BatchInvariance(skipped=(), trees=True)
LANES, WIDEST = 16, 256  #: of attend.c
DTYPES = (torch.bfloat16, torch.float32)  #: of states, and of the cache
_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64


class _AttentionSizes(ctypes.Structure):
    """`Sizes` of attend.h."""

    _fields_ = [
        (name, _WHOLE)
        for name in (*"BQHKEW", "there", "seat", "head", "threads", "tiles", "is_half")
    ]


def unsupported_reason(
    shape: "AttentionShape", hidden: int, inner: int, act: str, like: Tensor
) -> str | None:
    """Why a Llama with weights like these runs torch's operators; None: it need not."""
    if act not in ("silu", "swish"):
        return "compiled for silu alone"
    if hidden % LANES or inner % LANES:
        return f"compiled for widths that are multiples of {LANES}"
    return cannot_attend(shape, like)


def cannot_attend(shape: "AttentionShape", like: Tensor) -> str | None:
    """Why attention of this shape, over states as `like`, is torch's; None: it need not be."""
    if like.device.type != "cpu" or like.dtype not in DTYPES:
        return "compiled for bfloat16 and float32 on a CPU alone"
    if shape.size > WIDEST or shape.size % LANES:
        return f"compiled for heads of up to {WIDEST}, in multiples of {LANES}, alone"
    return build.unbuilt()


class CpuKernels:
    """The kernels for one model, whose states have the dtype of its rotary factors [positions, E].

    Raises RuntimeError where `unsupported_reason` says why.
    """

    def __init__(self, shape: "AttentionShape", cos: Tensor, sin: Tensor) -> None:
        self.shape, self.cos, self.sin = shape, cos, sin
        self.dtype = cos.dtype
        self.is_half = cos.dtype == torch.bfloat16
        self.tiles = tile_kernels.unsupported_reason(cos) is None
        self.nodes = build.function("outrider_nodes", (*(_POINTER,) * 3, _WHOLE, *(_POINTER,) * 3))
        self.attend = build.function("outrider_attend", (_POINTER,) * 11)
        widths = (_WHOLE,) * 4  # rows, width, threads, whether in half precision
        self.norm = build.function("outrider_norm", (*widths, ctypes.c_float, *(_POINTER,) * 5))
        self.gate = build.function("outrider_gate", (*widths, _POINTER, _POINTER))

    def weight(self, weight_E: Tensor) -> Tensor:
        """As it is, in the dtype of the states."""
        return weight_E.detach().to(self.dtype).contiguous()

    def open(self, nodes: Nodes) -> "KernelCall":
        """How far each node sees, and its rotary factors."""
        return KernelCall(self, nodes)


class KernelCall:
    """One call of a model, and where what its layers share lies."""

    def __init__(self, of: CpuKernels, nodes: Nodes) -> None:
        self.of = of
        self.threads = torch.get_num_threads()
        positions, slots, visible = map(Tensor.contiguous, nodes[1:4])
        if not positions.dtype is slots.dtype is torch.int64:
            raise TypeError(f"positions in {positions.dtype}, slots {slots.dtype}")
        batch, queries, wide = visible.shape
        shape, cos, sin = of.shape, of.cos, of.sin
        each, count = shape.size * cos.itemsize, batch * queries
        #: Factors of both kinds, and two tables of how far nodes see (`outrider_nodes`).
        self.room = cos.new_empty(count * (2 * each + 8), dtype=torch.uint8)
        self.kept = positions, slots, visible  # what addresses point to
        self.sizes = _AttentionSizes(
            batch, queries, shape.heads, shape.kv_heads, shape.size, wide, 0, 0, 0, self.threads,
            of.tiles, of.is_half,
        )  # fmt: skip
        self.at, room, seen = ctypes.addressof(self.sizes), self.room.data_ptr(), visible.data_ptr()
        ahead = room + count * (2 * each + 4)
        self.tables = room, room + count * each, slots.data_ptr()
        self.read = seen, ahead - 4 * count, ahead
        if of.nodes(
            self.at, seen, positions.data_ptr(), cos.shape[0], cos.data_ptr(), sin.data_ptr(), room
        ):
            raise IndexError(f"a position beyond the {cos.shape[0]} that there are factors of")

    def norm(self, state: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """One call for the sum and its norm."""
        for table in (state, weight, state if more is None else more):
            if table.dtype != self.of.dtype:
                raise self._of_another_kind(table)
        state = state.contiguous()
        normed = torch.empty_like(state)
        total, added = state, None
        if more is not None:
            more = more.contiguous()
            total, added = torch.empty_like(state), more.data_ptr()
        width = state.shape[-1]
        self.of.norm(
            state.numel() // width, width, self.threads, self.of.is_half, self.of.shape.eps,
            state.data_ptr(), added, weight.data_ptr(), total.data_ptr(), normed.data_ptr(),
        )  # fmt: skip
        return total, normed

    def attend(self, qkv: Tensor, store: SlotLayer) -> Tensor:
        """Rotation, cache and attention in one call."""
        shape = self.of.shape
        batch, queries, _ = qkv.shape
        keys, values = store.buffers(shape.kv_heads, shape.size, qkv)
        self.sizes.there = keys.shape[2]
        self.sizes.seat, self.sizes.head, *_ = keys.stride()
        if qkv.dtype != self.of.dtype:
            raise self._of_another_kind(qkv)
        if keys.dtype != qkv.dtype:
            raise TypeError(f"states in {qkv.dtype} over a cache of {keys.dtype}")
        out = qkv.new_empty(batch, queries, shape.heads * shape.size)
        failed = self.of.attend(
            self.at, qkv.data_ptr(), *self.tables, keys.data_ptr(), values.data_ptr(), *self.read,
            out.data_ptr(),
        )  # fmt: skip
        if failed == 1:
            raise MemoryError(f"no memory for the scores of {self.sizes.W} slots")
        if failed:
            raise IndexError(f"a node beyond the {keys.shape[2]} slots of the cache")
        return out

    def planes(self, cache: SlotCache, like: Tensor) -> Tensor:
        """Addresses [2, layers] of all layers' keys and values, which lie alike; how is noted.

        They are made, with the dtype of `like`, if nothing has been written yet. Raises ValueError
        where layers lie otherwise than the first, or hold other entries than this model's.
        """
        if cache.planes is None:
            shape, stores = self.of.shape, cache.layers
            each = [store.buffers(shape.kv_heads, shape.size, like) for store in stores]
            first = each[0][0]
            for table in chain.from_iterable(each):
                if (table.shape, table.stride(), table.dtype) != (
                    first.shape, first.stride(), like.dtype,
                ):  # fmt: skip
                    raise ValueError(f"a layer of {table.dtype} {list(table.shape)} in a cache")
            pointers = [
                [table.data_ptr() for table in tables] for tables in zip(*each, strict=True)
            ]
            cache.planes = first, torch.tensor(pointers, device="cpu")
        keys, addresses = cache.planes
        rows, heads, _, size = keys.shape
        if self.sizes.B > rows or (heads, size) != (self.sizes.K, self.sizes.E):
            raise ValueError(f"{self.sizes.B} rows over a cache of {list(keys.shape)}")
        self.sizes.there = keys.shape[2]
        self.sizes.seat, self.sizes.head, *_ = keys.stride()
        return addresses

    def gate(self, both: Tensor) -> Tensor:
        """One call for both."""
        if both.dtype != self.of.dtype:
            raise self._of_another_kind(both)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        rows = both.numel() // both.shape[-1]
        self.of.gate(
            rows, out.shape[-1], self.threads, self.of.is_half, both.data_ptr(), out.data_ptr()
        )
        return out

    def _of_another_kind(self, table: Tensor) -> TypeError:
        """The error for numbers that would be read as what they are not."""
        return TypeError(f"states in {self.of.dtype} are wanted; got {table.dtype}")
