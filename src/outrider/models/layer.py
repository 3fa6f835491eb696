"""A Llama's decoder layer with fused products, and what is taken for all that stands between them.

The lean decoder (`models.llama`) is made of such layers, and so are lean heads.
"""

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from outrider.models import layer_ops
from outrider.models.attention import fused as attend
from outrider.models.attention import steady
from outrider.models.batch_invariance import BatchInvariance
from outrider.models.cpu_kernels import layer_kernels
from outrider.models.linear import fused
from outrider.models.weight_only import WeightOnlyTensor

STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


class LayerShape(layer_ops.AttentionShape, Protocol):
    """What is to be known of a Llama's layers."""

    hidden: int
    inner: int  #: width of the MLP


class Chosen(NamedTuple):
    """A way to run what stands between the products."""

    between: layer_ops.LayerOps
    rounding: BatchInvariance  #: what is left to look after
    means: str  #: what it is called


def whole(layer: nn.Module) -> bool:
    """Whether it is a plain product with a weight of its own: not a shard, and quantised by nobody
    else."""
    return type(layer) is nn.Linear and type(layer.weight) in (nn.Parameter, WeightOnlyTensor)


def chosen(
    shape: LayerShape, act: str, rotary: LlamaRotaryEmbedding, positions: int, like: Tensor
) -> Chosen:
    """Compiled kernels where they fit states as `like`, else torch's operators.

    `rotary` is asked for its factors of so many positions.
    """
    with torch.no_grad():
        told = torch.empty(1, dtype=like.dtype, device=like.device)
        cos, sin = rotary(told, torch.arange(positions, device=like.device)[None])
    half = shape.size // 2
    sign = torch.cat([-torch.ones(half), torch.ones(half)]).to(sin)
    cos, sin = cos[0].contiguous(), (sin[0] * sign).contiguous()
    unfit = layer_kernels.unsupported_reason(shape, shape.hidden, shape.inner, act, like)
    if unfit is None:
        return Chosen(
            layer_kernels.CpuKernels(shape, cos, sin),
            layer_kernels.ROUNDING,
            "a lean decoder, compiled",
        )
    groups = shape.heads // shape.kv_heads
    attention, rounding = steady(attend, shape.kv_heads, groups, shape.size, like)
    # the function itself where it is one: a module call costs as much as the operator
    gate = F.silu if act in ("silu", "swish") else ACT2FN[act]
    return Chosen(
        layer_ops.TorchLayerOps(shape, attention, gate, cos, sin),
        rounding,
        f"a lean decoder, torch's operators: {unfit}",
    )


class Layer:
    """One decoder layer with fused products."""

    def __init__(
        self, layer: LlamaDecoderLayer, packed: bool, int8: bool, way: layer_ops.LayerOps
    ) -> None:
        a, m = layer.self_attn, layer.mlp
        made = partial(fused, packed=packed, int8=int8)
        self.before = way.weight(layer.input_layernorm.weight)
        self.between = way.weight(layer.post_attention_layernorm.weight)
        self.qkv = made([a.q_proj, a.k_proj, a.v_proj])
        self.out = made([a.o_proj])
        self.gate_up = made([m.gate_proj, m.up_proj])
        self.down = made([m.down_proj])
        self._widths = [each.weight.shape[0] for each in (a.q_proj, a.k_proj, a.v_proj)]
        norms = (a.q_norm, a.k_norm) if hasattr(a, "q_norm") else ()
        self._head_norms = [(way.weight(each.weight), each.weight.numel()) for each in norms]

    def heads(self, call: layer_ops.LayerOpsCall, qkv: Tensor) -> Tensor:
        """qkv [B, Q, (H + 2 K) E] with queries and keys normed head by head, where a layer does."""
        if not self._head_norms:
            return qkv
        *parts, values = qkv.split_with_sizes(self._widths, -1)
        for number, (weight, size) in enumerate(self._head_norms):
            part = parts[number]
            _, normed = call.norm(part.reshape(*part.shape[:-1], -1, size), None, weight)
            parts[number] = normed.flatten(-2)
        return torch.cat([*parts, values], -1)
