"""A Llama's decoder layer with fused products, and what is taken for all that stands between them.

The lean decoder (`models.llama`) is made of such layers, and so are lean heads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from outrider.models import weight_only
from outrider.models.attention import BatchInvariantAttention, fused as attend, steady
from outrider.models.batch_invariance import BatchInvariance
from outrider.models.cache import SlotLayer
from outrider.models.config import found, read
from outrider.models.cpu_kernels import decoder_layers, layer_kernels
from outrider.models.cpu_kernels.decoder_layers import LlamaParts
from outrider.models.cpu_kernels.packed_experts import PackedMixture, SharedExpert
from outrider.models.cpu_kernels.packed_linear import PackedLinear
from outrider.models.decoder import additive
from outrider.models.experts import ExpertsTensor
from outrider.models.linear import Product, fused, product
from outrider.models.lora import LoraBank
from outrider.models.weight_only_tensor import WeightOnlyTensor
from outrider.types import Nodes

# What stands between the products of a Llama's layers: norms, rotation, attention, gates.
#
# Two ways: torch's operators, for every dtype and processor, and kernels compiled on the machine
# for bfloat16 and float32 (`models.cpu_kernels`), which take three calls where torch takes twenty.

Gate: TypeAlias = Callable[[Tensor], Tensor]


class LayerOpsCall(Protocol):
    """One call of the model: what its layers share is worked out already."""

    def norm(self, state: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """state + more, and that over its root mean square, times a weight of `weight`."""

    def attend(self, qkv: Tensor, store: SlotLayer) -> Tensor:
        """Attention [B, Q, H E] of qkv [B, Q, (H + 2 K) E], whose keys and values are stored."""

    def gate(self, both: Tensor) -> Tensor:
        """act(gate) * up, [B, Q, I], of both [B, Q, 2 I] side by side."""


class LayerOps(Protocol):
    """A way to run what stands between the products."""

    def open(self, nodes: Nodes) -> LayerOpsCall:
        """A call over these nodes."""

    def weight(self, weight_E: Tensor) -> Tensor:
        """A norm's weight as `LayerOpsCall.norm` wants it."""


class AttentionShape(Protocol):
    """What is to be known of a Llama."""

    heads: int
    kv_heads: int
    size: int  #: of a head
    eps: float


class TorchLayerOps:
    """torch's operators."""

    def __init__(
        self,
        shape: AttentionShape,
        attention: BatchInvariantAttention,
        act: Gate,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        self.shape, self.attention, self.act = shape, attention, act
        self.cos, self.sin = cos, sin

    def weight(self, weight_E: Tensor) -> Tensor:
        """Twice: once for x, once for -x."""
        return torch.cat([weight_E, weight_E]).detach()

    def open(self, nodes: Nodes) -> "_TorchCall":
        """Rotary factors [B, Q, 1, E] and the mask."""
        return _TorchCall(self, nodes)


class _TorchCall:
    def __init__(self, of: TorchLayerOps, nodes: Nodes) -> None:
        self.of = of
        self.mask = of.attention.mask(additive(nodes.visible_BQW, of.cos.dtype))
        self.cos = of.cos[nodes.positions_BQ][:, :, None]
        self.sin = of.sin[nodes.positions_BQ][:, :, None]

    def norm(self, state: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, and its norm as the layer norm of (x, -x).

        That row has mean 0 and variance mean(x^2), and layer_norm is one fused kernel on a CPU
        where rms_norm is a dozen operators (60 against 9 microseconds at width 256).
        """
        x = state if more is None else state + more
        both = torch.cat([x, -x], -1)
        normed = torch.layer_norm(both, weight.shape, weight, None, self.of.shape.eps)
        return x, normed[..., : x.shape[-1]]

    def attend(self, qkv: Tensor, store: SlotLayer) -> Tensor:
        """rotate_half(x) * sin is roll(x, half) * (sin with its first half negated)."""
        shape = self.of.shape
        batch, queries, _ = qkv.shape
        heads, rotated = shape.heads, shape.heads + shape.kv_heads
        qkv = qkv.view(batch, queries, rotated + shape.kv_heads, shape.size)
        qk = qkv[:, :, :rotated]
        qk = torch.addcmul(qk * self.cos, qk.roll(shape.size // 2, -1), self.sin).transpose(1, 2)
        keys, values = store.update(qk[:, heads:], qkv[:, :, rotated:].transpose(1, 2))
        x = self.of.attention(qk[:, :heads], keys, values, self.mask)
        return x.transpose(1, 2).reshape(batch, queries, heads * shape.size)

    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.of.act(gate) * up


STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


class LayerShape(AttentionShape, Protocol):
    """What is to be known of a Llama's layers."""

    hidden: int
    inner: int  #: width of the MLP


class LayerForm(NamedTuple):
    """A way to run what stands between the products."""

    between: LayerOps
    rounding: BatchInvariance  #: what is left to look after
    means: str  #: what it is called


def whole(layer: object) -> bool:
    """Whether it is a plain product with a weight of its own: not a shard, and quantised by nobody
    else."""
    return type(layer) is nn.Linear and type(layer.weight) in (nn.Parameter, WeightOnlyTensor)


def chosen(
    shape: LayerShape, act: str, rotary: LlamaRotaryEmbedding, positions: int, like: Tensor
) -> LayerForm:
    """Compiled kernels where they fit states as `like`, else torch's operators.

    `rotary` is asked for its factors of so many positions.
    """
    cos, sin = rotary_factors(shape.size, rotary, positions, like)
    if like.device.type == "cuda":
        unfit = _no_triton(shape, act)
        if unfit is None:
            from outrider.models import cuda_kernels

            kernels = cuda_kernels.TritonKernels(shape, cos, sin)
            return LayerForm(kernels, BatchInvariance(), "a lean decoder, Triton's kernels")
    else:
        unfit = layer_kernels.unsupported_reason(shape, shape.hidden, shape.inner, act, like)
    if unfit is None:
        return LayerForm(
            layer_kernels.CpuKernels(shape, cos, sin),
            layer_kernels.ROUNDING,
            "a lean decoder, compiled",
        )
    groups = shape.heads // shape.kv_heads
    attention, rounding = steady(attend, shape.kv_heads, groups, shape.size, like)
    # the function itself where it is one: a module call costs as much as the operator
    gate = F.silu if act in ("silu", "swish") else ACT2FN[act]
    return LayerForm(
        TorchLayerOps(shape, attention, gate, cos, sin),
        rounding,
        f"a lean decoder, torch's operators: {unfit}",
    )


def rotary_factors(
    size: int, rotary: LlamaRotaryEmbedding, positions: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, E] of every position; sin with its first half negated."""
    with torch.no_grad():
        told = torch.empty(1, dtype=like.dtype, device=like.device)
        cos, sin = rotary(told, torch.arange(positions, device=like.device)[None])
    half = size // 2
    sign = torch.cat([-sin.new_ones(half), sin.new_ones(half)])
    return cos[0].contiguous(), (sin[0] * sign).contiguous()


def _no_triton(shape: LayerShape, act: str) -> str | None:
    """Why a CUDA device runs torch's operators; None: it need not."""
    try:
        from outrider.models import cuda_kernels
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return cuda_kernels.unsupported_reason(shape, act)


Fuse: TypeAlias = Callable[[Sequence[nn.Linear]], Product]


class GatedMlp:
    """down(act(gate) * up), gate and up as one product."""

    def __init__(self, of: nn.Module, made: Fuse) -> None:
        gate, up, down = (of.get_submodule(f"{part}_proj") for part in ("gate", "up", "down"))
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        self.gate_up, self.down = made([gate, up]), made([down])

    def __call__(self, call: LayerOpsCall, x: Tensor) -> Tensor:
        """Of nodes [..., hidden]."""
        return self.down(call.gate(self.gate_up(x)))

    def adapt(self, bank: LoraBank, path: str) -> None:
        """Let rows have adapters of their own; in the model it has this name."""
        gate_up = [f"{path}.gate_proj", f"{path}.up_proj"]
        self.gate_up = bank.adapted(self.gate_up, gate_up)
        self.down = bank.adapted(self.down, [f"{path}.down_proj"])


_MIXTURES = frozenset(
    f"{family}SparseMoeBlock" for family in ("Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe")
)


def is_mixture(mlp: nn.Module) -> bool:
    """Whether it is a mixture as `Mixture` computes one, its weights packed in whole blocks.

    Its router takes the most likely experts by a softmax over all of them, and silu is between an
    expert's products.
    """
    if type(mlp).__name__ not in _MIXTURES or decoder_layers.unsupported_reason([], "silu"):
        return False
    between = type(found(mlp.get_submodule("experts"), "act_fn"))
    if between not in (type(ACT2FN["silu"]), type(ACT2FN["swish"])):
        return False
    records = [
        record
        for weight in mlp.parameters()
        for record in (weight.records if isinstance(weight, WeightOnlyTensor) else (None,))
    ]
    return all(
        one is not None and one.inputs == one.wide and one.inputs % layer_kernels.LANES == 0
        for one in records
    )


def _stack(weights: Tensor, int8: bool) -> ExpertsTensor:
    assert isinstance(weights, ExpertsTensor)
    return weight_only.experts_in_8_bits(weights) if int8 else weights


def _packed(run: Product) -> PackedLinear:
    assert isinstance(run, PackedLinear)
    return run


class Mixture:
    """Some of its experts for each node, and in some families one that all nodes share."""

    def __init__(self, of: nn.Module, made: Fuse, int8: bool) -> None:
        router, experts = of.get_submodule("gate"), of.get_submodule("experts")
        stacks = [experts.get_parameter(name) for name in ("gate_up_proj", "down_proj")]
        gate_up, down = (_stack(one, int8).product for one in stacks)
        shared: SharedExpert | None = None
        if found(of, "shared_expert") is not None:
            mlp = GatedMlp(of.get_submodule("shared_expert"), made)
            gate = product(of.get_parameter("shared_expert_gate.weight"), None)
            shared = SharedExpert(*map(_packed, (mlp.gate_up, mlp.down, gate)))
        self.packed = PackedMixture(
            _packed(product(router.get_parameter("weight"), None)),
            gate_up,
            down,
            chosen=read(router, "top_k", int) or 0,
            whole=read(router, "norm_topk_prob", bool) is not False,
            shared=shared,
        )

    def __call__(self, call: LayerOpsCall, x: Tensor) -> Tensor:
        """Of nodes [..., hidden]."""
        return self.packed(x.reshape(-1, x.shape[-1])).view(x.shape)


class Layer:
    """One decoder layer with fused products."""

    def __init__(self, layer: LlamaDecoderLayer, packed: bool, int8: bool, way: LayerOps) -> None:
        a, m = layer.self_attn, layer.mlp
        made = partial(fused, packed=packed, int8=int8)
        self.before = way.weight(layer.input_layernorm.weight)
        self.between = way.weight(layer.post_attention_layernorm.weight)
        self.qkv = made([a.q_proj, a.k_proj, a.v_proj])
        self.out = made([a.o_proj])
        self.mlp = Mixture(m, made, int8) if is_mixture(m) else GatedMlp(m, made)
        self._widths = [each.weight.shape[0] for each in (a.q_proj, a.k_proj, a.v_proj)]
        norms = (a.q_norm, a.k_norm) if found(a, "q_norm") else ()
        #: of queries and of keys, and how many numbers of a head each is over; none in most layers
        self.head_norms = [(way.weight(each.weight), each.weight.numel()) for each in norms]

    def parts(self) -> LlamaParts:
        """What it is made of, for a compiled call."""
        products, mixture = [self.qkv, self.out], None
        if isinstance(self.mlp, Mixture):
            mixture = self.mlp.packed
        else:
            products += [self.mlp.gate_up, self.mlp.down]
        return LlamaParts(
            [one for one in products if isinstance(one, PackedLinear)],
            (self.before, self.between),
            [weight for weight, _ in self.head_norms],
            mixture,
        )

    def heads(self, call: LayerOpsCall, qkv: Tensor) -> Tensor:
        """qkv [B, Q, (H + 2 K) E] with queries and keys normed head by head."""
        *parts, values = qkv.split_with_sizes(self._widths, -1)
        for number, (weight, size) in enumerate(self.head_norms):
            part = parts[number]
            _, normed = call.norm(part.reshape(*part.shape[:-1], -1, size), None, weight)
            parts[number] = normed.flatten(-2)
        return torch.cat([*parts, values], -1)
