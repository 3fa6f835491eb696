"""The layers of a decoder in one compiled call (`decoder_layers.c`): of those with cross attention,
and of Llama's like.

Between two products of a small model there is less to compute than a call from Python takes: forty
calls a step were three quarters of a step of one row over three layers of width 256. States are
float32, weights are packed in any format.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.models.cache import SlotCache
from outrider.models.cpu_kernels import build
from outrider.models.cpu_kernels.layer_kernels import LANES, KernelCall
from outrider.models.cpu_kernels.packed_experts import PackedMixture
from outrider.models.cpu_kernels.packed_linear import Linear, PackedLinear, linear

if TYPE_CHECKING:
    from outrider.models.layer import LayerShape

#: Activations by the names that configurations have for them, as decoder_layers.c numbers them.
ACTIVATIONS = {"relu": 0, "silu": 1, "swish": 1, "gelu": 2}
_POINTER, _WHOLE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _LayerNorm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("eps", _FLOAT)]


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "out", "query", "cross_out", "up", "down")),
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


class _LlamaLayer(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("mixture", "before", "between", "queries", "keys")),
    ]


class _Llama(ctypes.Structure):
    _fields_ = [
        *((name, _WHOLE) for name in ("layers", "width", "inner")),
        ("eps", _FLOAT),
        ("behind", _POINTER),
        ("layer", _POINTER),
    ]


class LayerParts(NamedTuple):
    """What a layer is made of: six products, and a norm behind each of its three parts."""

    products: Sequence[PackedLinear]
    norms: Sequence[tuple[Tensor, Tensor, float]]  #: weight and bias [E], what a variance gets


def unsupported_reason(products: Sequence[object], act: str) -> str | None:
    """Why layers of these products run one call after the other; None: they need not."""
    if act not in ACTIVATIONS:
        return f"compiled for {', '.join(ACTIVATIONS)} alone"
    for one in products:
        if not isinstance(one, PackedLinear) or one.activations is not None:
            return "compiled for packed weights and float32 states alone"
        widths = (one.inputs, one.outputs)
        wide = {one.inputs, *(weight.wide for weight in one.weights)}
        if any(width % LANES for width in widths) or len(wide) > 1:
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

    def __call__(
        self,
        call: KernelCall,
        cache: SlotCache,
        sources: tuple[Tensor, Tensor, int],
        state: Tensor,
        x: Tensor,
        aux_layers: Sequence[int],
    ) -> dict[int, Tensor]:
        """Run them over `state` [B, Q, E] and what the first reads of it, `x`, in their places.

        `sources` are the table of keys and values, how many states each row has (int64), and how
        many there may be. Returns the states ahead of the layers `aux_layers`.
        """
        planes = call.planes(cache, state)
        table, slots_B, most = sources
        batch, queries, _ = state.shape
        laid = (planes.shape[1] * 2, batch, call.of.shape.heads)
        if table.shape[:3] != laid or table.shape[0] < 2 or slots_B.shape != (batch,):
            raise IndexError(f"{list(state.shape)} states over sources {list(table.shape)}")
        _check(call, self.width, state, x)
        if table.dtype != torch.float32:
            raise TypeError(f"float32 sources are wanted; got {table.dtype}")
        plane, seat, head, _ = table.stride()
        lie = _Sources(most, plane, seat, head, table.data_ptr(), slots_B.data_ptr())
        kept, to = _kept(aux_layers, planes.shape[1], state)
        cos, sin, slots = call.tables
        visible, count, ahead = call.read
        failed = self._run(
            self._at, call.at, ctypes.addressof(lie), cos, sin, slots, planes[0].data_ptr(),
            planes[1].data_ptr(), visible, count, ahead, to, state.data_ptr(), x.data_ptr(),
        )  # fmt: skip
        _refuse(failed, batch * queries, self.width)
        return kept


class LlamaParts(NamedTuple):
    """What a Llama's layer is made of; norms of heads are of queries and of keys, or none."""

    products: Sequence[PackedLinear]  #: qkv, out, gate and up, down; the last two if no mixture
    norms: Sequence[Tensor]  #: [E] ahead of attention, and ahead of the gate
    head_norms: Sequence[Tensor]
    mixture: PackedMixture | None = None


class LlamaLayers:
    """The layers of a Llama, and the norm `behind` them.

    Raises RuntimeError where `unsupported_reason` says why, and ValueError for parts that do not
    fit together.
    """

    def __init__(self, layers: Sequence[LlamaParts], shape: "LayerShape", behind: Tensor) -> None:
        self._run = build.function(
            "outrider_llama", (*(_POINTER,) * 11, _WHOLE, _POINTER, _POINTER)
        )
        self._kept = layers, behind  # what the structures point to
        self.width = shape.hidden
        _fit(layers, shape, behind)
        self._laid = (_LlamaLayer * len(layers))(
            *(
                _LlamaLayer(
                    *map(linear, layer.products),
                    *([Linear()] * (4 - len(layer.products))),
                    None if layer.mixture is None else layer.mixture.at,
                    *(norm.data_ptr() for norm in (*layer.norms, *layer.head_norms)),
                )
                for layer in layers
            )
        )
        self._llama = _Llama(
            len(layers), shape.hidden, shape.inner, shape.eps, behind.data_ptr(),
            ctypes.addressof(self._laid),
        )  # fmt: skip
        self._at = ctypes.addressof(self._llama)

    def __call__(
        self,
        call: KernelCall,
        cache: SlotCache,
        state: Tensor,
        last: int | None,
        aux_layers: Sequence[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What the output layer reads of the (last) nodes, for embeddings `state` [B, Q, E], which
        are written over; and the states ahead of the layers `aux_layers`."""
        batch, queries, _ = state.shape
        _check(call, self.width, state)
        planes = call.planes(cache, state)
        if planes.shape[1] != len(self._laid):
            raise IndexError(f"{len(self._laid)} layers over a cache of {planes.shape[1]}")
        last = min(last or queries, queries)
        x = state.new_empty(batch, last, self.width)
        kept, to = _kept(aux_layers, planes.shape[1], state)
        failed = self._run(
            self._at, call.at, *call.tables, planes[0].data_ptr(), planes[1].data_ptr(),
            *call.read, to, last, state.data_ptr(), x.data_ptr(),
        )  # fmt: skip
        _refuse(failed, batch * queries, self.width)
        return x, kept


def _fit(layers: Sequence[LlamaParts], shape: "LayerShape", behind: Tensor) -> None:
    """Raise ValueError for parts of other sizes than a compiled call reads."""
    heads, wide = shape.heads * shape.size, (shape.heads + 2 * shape.kv_heads) * shape.size
    sizes = [(shape.hidden, wide), (heads, shape.hidden)]
    sizes += [(shape.hidden, 2 * shape.inner), (shape.inner, shape.hidden)]
    for layer in layers:
        found = [(one.inputs, one.outputs) for one in layer.products]
        wanted = sizes if layer.mixture is None else sizes[:2]
        norms = [(norm, shape.hidden) for norm in (*layer.norms, behind)]
        norms += [(norm, shape.size) for norm in layer.head_norms]
        if found != wanted or len(layer.norms) != 2 or len(layer.head_norms) not in (0, 2):
            raise ValueError(f"products {found} in a layer of products {wanted}")
        for norm, size in norms:
            if norm.dtype != torch.float32 or norm.shape != (size,) or not norm.is_contiguous():
                raise ValueError(f"a norm {list(norm.shape)} in {norm.dtype} of {size} in float32")


def _check(call: KernelCall, width: int, *states: Tensor) -> None:
    """Raise for states that would be read as what they are not."""
    shape = call.sizes.B, call.sizes.Q, width
    for state in states:
        if state.dtype != torch.float32 or state.shape != shape or not state.is_contiguous():
            raise ValueError(
                f"float32 states {list(shape)} in one piece are wanted; got {state.dtype} "
                f"{list(state.shape)}"
            )


def _kept(
    aux_layers: Sequence[int], layers: int, like: Tensor
) -> tuple[dict[int, Tensor], "ctypes.Array[ctypes.c_void_p] | None"]:
    """Room for the states ahead of these layers, and where a compiled call finds it."""
    kept = {layer: torch.empty_like(like) for layer in aux_layers if layer >= 0}
    if not kept:
        return kept, None
    at = (kept[n].data_ptr() if n in kept else None for n in range(layers))
    return kept, (_POINTER * layers)(*at)


def _refuse(failed: int, rows: int, width: int) -> None:
    if failed == 1:
        raise MemoryError(f"no memory for {rows} rows of {width}")
    if failed:
        raise IndexError("a node beyond the slots of the cache")


def _laid(layer: LayerParts) -> _DecoderLayer:
    norms = [_LayerNorm(w.data_ptr(), b.data_ptr(), eps) for w, b, eps in layer.norms]
    return _DecoderLayer(*map(linear, layer.products), *norms)
