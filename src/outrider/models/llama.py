"""A lean decoder of Llama and its like: the same weights, a fraction of the calls.

transformers spends most of a small model's step in operators around the products. Here query, key
and value are one product, gate and up another, rotary factors come from a table, and the weights
may be packed; what stands between the products is compiled in bfloat16 and float32, and where
packed weights have float32 states all layers are one call; on a CUDA device Triton's kernels stand
there. Scores equal transformers' to rounding
(tests/models); plain and speculative decoding run through it alike.
"""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from outrider.models import weight_only_tensor
from outrider.models.cache import SlotCache
from outrider.models.config import found, read
from outrider.models.cpu_kernels.decoder_layers import LlamaLayers, unsupported_reason
from outrider.models.cpu_kernels.layer_kernels import CpuKernels, KernelCall
from outrider.models.decoder import EncoderAdapter, LeanRunner
from outrider.models.layer import (
    STATIC_ROPE,
    GatedMlp,
    Layer,
    LayerOpsCall,
    chosen,
    is_mixture,
    whole,
)
from outrider.models.linear import Product, fused
from outrider.models.lora import LoraBank
from outrider.types import Nodes, Output

#: Models with a Llama's layers, by the type that a configuration names. Products may have biases,
#: and heads of queries and keys norms of their own: whatever a layer has is run.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def fits(model: PreTrainedModel, adapters: bool = False) -> bool:
    """Whether the lean runner computes this model: one of `FAMILIES` with fixed rotary tables, and
    without windows. Not a mixture of experts whose rows have `adapters`.

    Not one whose weights are sharded: a process has a part of each, and the model's own forward is
    what brings the parts together.
    """
    config = model.config
    rope = read(config, "rope_parameters", dict) or {}
    return (
        type(model).__name__ == FAMILIES.get(config.model_type)
        and not _windows(config)
        and rope.get("rope_type", "default") in STATIC_ROPE
        and read(config, "quantization_config", object) is None
        and read(config, "clip_qkv", float) is None  # of queries, keys and values
        and all(whole(m) for m in _linears(model, adapters))
    )


def _windows(config: PretrainedConfig) -> bool:
    """Whether a layer sees no more than the last so many tokens."""
    kinds = read(config, "layer_types", (list, tuple))
    return any(kind != "full_attention" for kind in kinds or ()) or (
        kinds is None and read(config, "sliding_window", int) is not None
    )


def _linears(model: LlamaForCausalLM, adapters: bool) -> list[object]:
    parts: list[object] = [model.lm_head]
    for layer in model.model.layers:
        parts += [found(layer.self_attn, f"{name}_proj") for name in "qkvo"]
        if adapters or not is_mixture(layer.mlp):  # another mixture has no such parts
            parts += [found(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")]
    return parts


class LlamaRunner(LeanRunner):
    """Runs the weights of a LlamaForCausalLM, or another of `FAMILIES`, on one device."""

    reader: EncoderAdapter | None = None

    def __init__(self, model: LlamaForCausalLM, packed: bool, int8: bool = False) -> None:
        config = model.config
        self.name = type(model).__name__
        self.vocab_size: int = config.vocab_size
        self.context: int = config.max_position_embeddings
        self.layers: int = config.num_hidden_layers
        self.packed = packed
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.size: int = read(config, "head_dim", int) or config.hidden_size // self.heads
        self.eps: float = config.rms_norm_eps
        self.hidden: int = config.hidden_size
        dense = [one.mlp for one in model.model.layers if not is_mixture(one.mlp)]
        self.inner: int = dense[0].gate_proj.out_features if dense else 0
        weight: Tensor = model.model.embed_tokens.weight.detach()
        self._embedded = weight_only_tensor.embedding(weight)
        self.device, self.dtype = weight.device, weight.dtype
        self._between, self.rounding, self.means = chosen(
            self, config.hidden_act, model.model.rotary_emb, self.context, weight
        )
        self._layers = [Layer(layer, packed, int8, self._between) for layer in model.model.layers]
        self._norm = self._between.weight(model.model.norm.weight)
        self._head = fused([model.lm_head], packed, int8=int8, wide=True)
        #: All layers as one call, without adapters; None where their parts run one by one.
        self.whole = self._joined()

    def _joined(self) -> LlamaLayers | None:
        kernels = isinstance(self._between, CpuKernels) and self.dtype is torch.float32
        by_head = all(size == self.size for one in self._layers for _, size in one.head_norms)
        products = [run for run, _ in self.products()[:-1]]
        if not (kernels and by_head) or unsupported_reason(products, "silu"):
            return None
        return LlamaLayers([each.parts() for each in self._layers], self, self._norm)

    def keep_layers(self, numbers: tuple[int, ...]) -> None:
        """Run these of its layers alone from now on."""
        self._layers = [self._layers[number] for number in numbers]
        self.layers = len(self._layers)
        self.whole = self._joined()

    def adapt(self, bank: LoraBank) -> None:
        """Let rows have adapters of their own."""
        for number, each in enumerate(self._layers):
            attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
            qkv = [f"{attention}.{part}_proj" for part in "qkv"]
            each.qkv = bank.adapted(each.qkv, qkv)
            each.out = bank.adapted(each.out, [f"{attention}.o_proj"])
            if isinstance(each.mlp, GatedMlp):
                each.mlp.adapt(bank, mlp)
        self._head = bank.adapted(self._head, ["lm_head"])

    def products(self) -> list[tuple[Product, int]]:
        """Those that all nodes go through, in the order of a call, and how many numbers of a node
        each takes."""
        found: list[tuple[Product, int]] = []
        for each in self._layers:
            heads = self.heads * self.size
            found += [(each.qkv, self.hidden), (each.out, heads)]
            if isinstance(each.mlp, GatedMlp):
                found += [(each.mlp.gate_up, self.hidden), (each.mlp.down, self.inner)]
        return [*found, (self._head, self.hidden)]

    def __call__(
        self, cache: SlotCache, nodes: Nodes, last: int | None, aux_layers: tuple[int, ...]
    ) -> Output:
        """Logits of the (last) nodes, and their states at the aux layers."""
        call = self._between.open(nodes)
        state = self._embedded(nodes.tokens_BQ)
        if self.whole is None or cache.adapters or not isinstance(call, KernelCall):
            x, kept = self._one_by_one(call, cache, state, last, aux_layers)
        else:
            x, kept = self.whole(call, cache, state.contiguous(), last, aux_layers)
        kept[-1] = x
        few = slice(-x.shape[1], None)
        states = tuple(kept[layer][:, few] for layer in aux_layers) if aux_layers else ()
        return Output(self._head(x), states)

    def _one_by_one(
        self,
        call: LayerOpsCall,
        cache: SlotCache,
        state: Tensor,
        last: int | None,
        aux_layers: tuple[int, ...],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What the output layer reads of the (last) nodes, and the states at the aux layers."""
        more: Tensor | None = None
        kept: dict[int, Tensor] = {}
        for number, (layer, store) in enumerate(zip(self._layers, cache.layers, strict=True)):
            state, x = call.norm(state, more, layer.before)
            if number in aux_layers:
                kept[number] = state
            qkv = layer.qkv(x)
            x = call.attend(layer.heads(call, qkv) if layer.head_norms else qkv, store)
            state, x = call.norm(state, layer.out(x), layer.between)
            more = layer.mlp(call, x)
        if last is not None:
            state, more = state[:, -last:], None if more is None else more[:, -last:]
        return call.norm(state, more, self._norm)[1], kept
