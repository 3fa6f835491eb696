"""The layers of a decoder with cross attention in one compiled call (`decoder_layers.c`).

Between two products of a small model there is less to compute than a call from Python takes: forty
calls a step were three quarters of a step of one row over three layers of width 256. States are
float32, weights are packed in any format.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.models.cache import SlotLayer
from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.layer_kernels import LANES, KernelCall
from outrider.models.cpu_kernels.packed_linear import PackedLinear

#: Activations by the names that configurations have for them, as decoder_layers.c numbers them.
ACTIVATIONS = {"relu": 0, "silu": 1, "swish": 1, "gelu": 2}
PARTS = 3  #: weights of one product, at most
_POINTER, _WHOLE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Part(ctypes.Structure):
    _fields_ = [*((name, _WHOLE) for name in ("format", "per", "outputs")), ("weight", _POINTER)]


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, _WHOLE) for name in ("parts", "inputs", "outputs")),
        ("of", _Part * PARTS),
        ("bias", _POINTER),
    ]


class _LayerNorm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("eps", _FLOAT)]


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "out", "query", "cross_out", "up", "down")),
        *((name, _LayerNorm) for name in ("text", "source", "after")),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        *((name, _WHOLE) for name in ("layers", "width", "inner", "act", "ahead")),
        ("scale", _FLOAT),
        ("layer", _POINTER),
    ]


class _Sources(ctypes.Structure):
    _fields_ = [
        *((name, _WHOLE) for name in ("most", "plane", "seat", "head")),
        ("table", _POINTER),
        ("slots", _POINTER),
    ]


class NormWeights(Protocol):
    """Of a layer norm."""

    @property
    def weight(self) -> Tensor:
        """Factors [E]."""

    @property
    def bias(self) -> Tensor:
        """What is added [E]."""

    @property
    def eps(self) -> float:
        """What is added to a variance."""


class LayerParts(NamedTuple):
    """What a layer is made of: six products, and a norm behind each of its three parts."""

    products: Sequence[PackedLinear]
    norms: Sequence[NormWeights]


def unsupported_reason(products: Sequence[object], act: str) -> str | None:
    """Why layers of these products run one call after the other; None: they need not."""
    if act not in ACTIVATIONS:
        return f"compiled for {', '.join(ACTIVATIONS)} alone"
    for one in products:
        if not isinstance(one, PackedLinear) or one.activations is not None:
            return "compiled for packed weights and float32 states alone"
        widths = (one.inputs, one.outputs)
        if any(width % LANES for width in widths) or one.inputs != one.weights[0].wide:
            return f"compiled for widths in whole blocks, and multiples of {LANES}"
    return build.unbuilt()


class DecoderLayers:
    """The layers of one model. Raises RuntimeError where `unsupported_reason` says why."""

    def __init__(self, layers: Sequence[LayerParts], act: str, ahead: bool, scale: float) -> None:
        self._run = build.function("outrider_decoder", (_POINTER,) * 14)
        self._kept = layers  # what the structures point to
        self._laid = (_DecoderLayer * len(layers))(*(_laid(layer) for layer in layers))
        up = layers[0].products[4]
        self.width = up.inputs
        self._decoder = _Decoder(
            len(layers), up.inputs, up.outputs, ACTIVATIONS[act], ahead, scale,
            ctypes.addressof(self._laid),
        )  # fmt: skip
        self._at = ctypes.addressof(self._decoder)
        self._pointers: type[ctypes.Array[ctypes.c_void_p]] = _POINTER * len(layers)

    def __call__(
        self,
        call: KernelCall,
        stores: Sequence[SlotLayer],
        sources: tuple[Tensor, Tensor, int],
        state: Tensor,
        x: Tensor,
        aux_layers: Sequence[int],
    ) -> dict[int, Tensor]:
        """Run them over `state` [B, Q, E] and what the first reads of it, `x`, in their places.

        `sources` are the table of keys and values, how many states each row has (int64), and how
        many there may be. Returns the states ahead of the layers `aux_layers`.
        """
        shape = call.of.shape
        heads, size = shape.heads, shape.size
        each = [store.buffers(shape.kv_heads, size, state) for store in stores]
        call.lie(each[0][0])
        table, slots_B, most = sources
        batch, queries, width = state.shape
        laid = (2 * len(each), batch, heads)
        if table.shape[:3] != laid or table.shape[0] < 2 or slots_B.shape != (batch,):
            raise IndexError(f"{list(state.shape)} states over sources {list(table.shape)}")
        given = (state, x, table, *each[0])
        if any(one.dtype != torch.float32 for one in given) or width != self.width:
            raise TypeError(f"float32 states of {self.width} are wanted; got {state.dtype} {width}")
        if not (state.is_contiguous() and x.is_contiguous()):
            raise ValueError("states are to lie in one piece")
        kept = {layer: torch.empty_like(state) for layer in aux_layers if layer >= 0}
        plane, seat, head, _ = table.stride()
        lie = _Sources(most, plane, seat, head, table.data_ptr(), slots_B.data_ptr())
        keys = self._pointers(*(k.data_ptr() for k, _ in each))
        values = self._pointers(*(v.data_ptr() for _, v in each))
        to = self._pointers(*(kept[n].data_ptr() if n in kept else None for n in range(len(each))))
        cos, sin, slots = call.tables
        visible, count, ahead = call.read
        failed = self._run(
            self._at, call.at, ctypes.addressof(lie), cos, sin, slots, ctypes.addressof(keys),
            ctypes.addressof(values), visible, count, ahead, ctypes.addressof(to),
            state.data_ptr(), x.data_ptr(),
        )  # fmt: skip
        if failed == 1:
            raise MemoryError(f"no memory for {batch * queries} rows of {width}")
        if failed:
            raise IndexError("a node beyond the slots of the cache")
        return kept


def _laid(layer: LayerParts) -> _DecoderLayer:
    norms = [
        _LayerNorm(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps) for norm in layer.norms
    ]
    return _DecoderLayer(*map(_linear, layer.products), *norms)


def _linear(product: PackedLinear) -> _Linear:
    parts = [
        _Part(code, one.per, one.outputs, one.panels.data_ptr())
        for one, code in zip(product.weights, product.codes, strict=True)
    ]
    bias = None if product.bias is None else product.bias.data_ptr()
    return _Linear(len(parts), product.inputs, product.outputs, (_Part * PARTS)(*parts), bias)
