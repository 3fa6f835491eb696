"""EAGLE-3 heads (Li et al. 2025): a decoder layer over the next token and the target's own states.

Entry p of a head is made of token p and of what the target made of the tokens before it, its states
at p - 1 after some layers (`aux_layers`), fused into one by a product. Its output is the law of
token p + 1, and takes the place of the target's state below a token that was drafted:

    fused_p = fc(states_{p-1})                        # committed tokens
    x_p     = layers(embedding(token_p), fused_p)     # of drafted tokens: x of the token before
    law     = softmax(lm_head(norm(x_p))) over the draft's vocabulary

Modules and weights have the names of the speculators layout, so a state dict is a checkpoint.
Everything is differentiable; a call without a cache reads whole sequences.
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from outrider.models.cache import SlotCache
from outrider.models.config import read
from outrider.models.decoder import additive
from outrider.models.heads.model import DraftHead
from outrider.models.layer import STATIC_ROPE, Layer, chosen
from outrider.models.linear import Product, product
from outrider.types import Nodes


class Eagle3Variant(NamedTuple):
    """The parts of a family that a head's decoder layers are made of."""

    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


#: By transformers' model_type.
KINDS = {
    "llama": Eagle3Variant(
        modeling_llama.LlamaDecoderLayer,
        modeling_llama.LlamaRMSNorm,
        modeling_llama.LlamaRotaryEmbedding,
    ),
    "qwen3": Eagle3Variant(
        modeling_qwen3.Qwen3DecoderLayer,
        modeling_qwen3.Qwen3RMSNorm,
        modeling_qwen3.Qwen3RotaryEmbedding,
    ),
}


@dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 head computes.

    layer                 transformers' configuration of its decoder layers, a Llama's or a Qwen3's;
                          `vocab_size` is the target's
    aux_layers                  the target's states that it reads: numbers of layers, as
                          `LanguageModel.forward` counts them
    draft_vocab_size      how many tokens it can propose
    target_width          width of the target's states; None: its own
    norm_before_residual  the first layer's residual is the fused state behind its norm
    norm_before_fc        one norm over all states, before they are fused
    fc_norm               one norm for each state, before they are fused
    norm_output           what the next drafted token is given is the state behind the last norm
    """

    layer: PretrainedConfig
    aux_layers: tuple[int, ...]
    draft_vocab_size: int
    target_width: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class HeadStates(NamedTuple):
    """What a head makes of its nodes."""

    next_BQE: Tensor  #: what the tokens below are given in place of the target's states
    read_BQE: Tensor  #: what the output layer reads


class Eagle3(DraftHead):
    """An EAGLE-3 head; `ids_K` are the tokens that it can propose.

    >>> head = Eagle3(config, embedding_VE=target.get_input_embeddings().weight)  # doctest: +SKIP
    >>> states = head(tokens[:, 1:], head.fuse(hidden)[:, :-1])                   # doctest: +SKIP
    >>> head.logits(states)                               # [B, T - 1, K]         # doctest: +SKIP
    """

    window: int | None = None  #: its attention reaches back to the beginning

    def __init__(
        self,
        config: Eagle3Config,
        *,
        embedding_VE: Tensor | None = None,
        output_KE: Tensor | None = None,
        ids_K: Tensor | None = None,
    ) -> None:
        inner, kind = copy.deepcopy(config.layer), KINDS[config.layer.model_type]
        # sdpa is causal where no mask is given; a configuration made by hand names nothing
        inner._attn_implementation = "sdpa"
        wide, eps = int(inner.hidden_size), inner.rms_norm_eps
        super().__init__(inner.vocab_size, wide, embedding_VE, output_KE)
        self.config = dataclasses.replace(config, layer=inner)
        each = config.target_width or wide
        count = len(config.aux_layers)
        if config.norm_before_fc:
            self.input_norm = kind.norm(count * each, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(kind.norm(each, eps=eps) for _ in range(count))
        self.fc = nn.Linear(count * each, wide, bias=False)
        rest = (kind.layer(inner, number) for number in range(1, inner.num_hidden_layers))
        self.layers = nn.ModuleList([_First(self.config), *rest])
        self.aux_layers, self.depth = config.aux_layers, len(self.layers)
        self.norm = kind.norm(wide, eps=eps)
        if ids_K is None and config.draft_vocab_size < inner.vocab_size:
            ids_K = torch.arange(config.draft_vocab_size, device="cpu")
        self.speak(config.draft_vocab_size, ids_K)
        self._packed: Product | None = None
        self.turned_by(kind.rotary(inner))

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        fused: Tensor = self.fc(self.concatenated(hidden))
        return fused

    def concatenated(self, hidden: Sequence[Tensor]) -> Tensor:
        """The states side by side, as they are before they are fused."""
        if self.config.fc_norm:
            hidden = [norm(state) for norm, state in zip(self.fc_norm, hidden, strict=True)]
        states = torch.cat(list(hidden), -1)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        return states

    def forward(
        self,
        tokens_BQ: Tensor,
        states_BQE: Tensor,
        positions_BQ: Tensor | None = None,
        mask_B1QW: Tensor | None = None,
        cache: Cache | None = None,
    ) -> HeadStates:
        """Entries of tokens, each with the (fused) state of the token before it.

        `mask` is additive. None: every token sees those before it, in a call without a cache.
        """
        if positions_BQ is None:
            positions_BQ = torch.arange(1, 1 + tokens_BQ.shape[1], device=tokens_BQ.device)[None]
        embedded = self.embedded(tokens_BQ)
        turned = self.rotary(embedded, positions_BQ)
        first, *rest = self.layers
        x = first(embedded, states_BQE, mask_B1QW, turned, cache)
        for layer in rest:
            x = layer(
                x, attention_mask=mask_B1QW, position_embeddings=turned, past_key_values=cache
            )
        normed = self.norm(x)
        return HeadStates(normed if self.config.norm_output else x, normed)

    def entries(self, nodes: Nodes, states_BQE: Tensor, cache: SlotCache) -> HeadStates:
        """Entries of nodes, each with the (fused) state of the token before it."""
        mask = additive(nodes.visible_BQW, self.dtype)
        made: HeadStates = self(nodes.tokens_BQ, states_BQE, nodes.positions_BQ, mask, cache)
        return made

    def logits(self, states: HeadStates) -> Tensor:
        if self._packed is not None:
            return self._packed(states.read_BQE)
        return F.linear(states.read_BQE, self.output)

    def pack(self, int8: bool = False) -> None:
        """Lay its weights out for this processor, or in 8 bits; they must not change any more."""
        for part in self.modules():
            if type(part) is nn.Linear:
                vars(part)["forward"] = product(part.weight, part.bias, True, int8)
        self._packed = product(self.output, None, True, int8)


class _First(nn.Module):
    """A decoder layer whose attention reads the embedding and the state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        inner, kind = config.layer, KINDS[config.layer.model_type]
        whole = kind.layer(inner, 0)
        self.self_attn = whole.get_submodule("self_attn")
        for name in ("q_proj", "k_proj", "v_proj"):
            old = self.self_attn.get_submodule(name)
            assert isinstance(old, nn.Linear)
            wide = nn.Linear(2 * inner.hidden_size, old.out_features, bias=old.bias is not None)
            self.self_attn.add_module(name, wide)
        self.mlp = whole.get_submodule("mlp")
        self.input_layernorm = whole.get_submodule("input_layernorm")
        self.hidden_norm = kind.norm(inner.hidden_size, eps=inner.rms_norm_eps)
        self.post_attention_layernorm = whole.get_submodule("post_attention_layernorm")
        self._normed = config.norm_before_residual

    def forward(
        self,
        embedded_BQE: Tensor,
        state_BQE: Tensor,
        mask_B1QW: Tensor | None,
        turned: tuple[Tensor, Tensor],
        cache: Cache | None,
    ) -> Tensor:
        """The layer's output, [B, Q, E]."""
        normed = self.hidden_norm(state_BQE)
        both = torch.cat([self.input_layernorm(embedded_BQE), normed], -1)
        attended, _ = self.self_attn(
            both, position_embeddings=turned, attention_mask=mask_B1QW, past_key_values=cache
        )
        x = (normed if self._normed else state_BQE) + attended
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


# EAGLE-3 heads of Llama layers: the same weights in a few calls.
#
# transformers' modules take more time around a head's products than the products take. Here they
# run as a lean decoder's do (`models.layer`); what is drafted is that of the module, to rounding.


def fits(head: Eagle3) -> bool:
    """Whether it is on a CPU or a CUDA device, of Llama layers with fixed rotary tables."""
    layer = head.config.layer
    rope = read(layer, "rope_parameters", dict) or {}
    return (
        head.device.type in ("cpu", "cuda")
        and layer.model_type == "llama"
        and rope.get("rope_type", "default") in STATIC_ROPE
    )


class Eagle3Llama:
    """A `StateHead` with the weights of an EAGLE-3 head, which must not change any more.

    `positions` are those that a text may have: the head's configuration may say fewer. `int8` keeps
    the weights of its products in 8 bits.

    >>> lean = Eagle3Llama(head, packed=True, positions=8192)  # doctest: +SKIP
    >>> HeadModel(AutoregressiveHead(lean), 49152)  # doctest: +SKIP
    """

    window: int | None = None

    def __init__(self, head: Eagle3, packed: bool, positions: int, int8: bool = False) -> None:
        config = head.config.layer
        self.aux_layers, self.depth, self.width = head.aux_layers, head.depth, head.width
        self.ids_K, self.device, self.dtype = head.ids_K, head.device, head.dtype
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.size: int = read(config, "head_dim", int) or head.width // self.heads
        self.eps: float = config.rms_norm_eps
        self.hidden, self.inner = head.width, int(config.intermediate_size)
        self._last = max(positions, int(config.max_position_embeddings)) - 1
        self._between, *_ = chosen(
            self, config.hidden_act, head.rotary, self._last + 1, head.fc.weight
        )
        self._layers = [Layer(layer, packed, int8, self._between) for layer in head.layers]
        weight = self._between.weight
        self._state_norm = weight(head.get_parameter("layers.0.hidden_norm.weight"))
        self._norm = weight(head.get_parameter("norm.weight"))
        self._embedding = head.table
        self._output = product(head.output, None, packed, int8, wide=True)
        self.module, self._fc = head, product(head.fc.weight, None, packed, int8)

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        return self._fc(self.module.concatenated(hidden))

    def entries(self, nodes: Nodes, states_BQE: Tensor, cache: SlotCache) -> HeadStates:
        """Entries of tokens, each with the state of the token before it."""
        positions = nodes.positions_BQ.clamp(max=self._last)
        call = self._between.open(nodes._replace(positions_BQ=positions))
        embedded = F.embedding(nodes.tokens_BQ, self._embedding)
        _, token = call.norm(embedded, None, self._layers[0].before)
        _, normed = call.norm(states_BQE, None, self._state_norm)
        state = normed if self.module.config.norm_before_residual else states_BQE
        x, more = torch.cat([token, normed], -1), None
        for number, (layer, store) in enumerate(zip(self._layers, cache.layers, strict=True)):
            if number:
                state, x = call.norm(state, more, layer.before)
            x = call.attend(layer.qkv(x), store)
            state, x = call.norm(state, layer.out(x), layer.between)
            more = layer.mlp(call, x)
        state, read = call.norm(state, more, self._norm)
        return HeadStates(read if self.module.config.norm_output else state, read)

    def logits(self, states: HeadStates) -> Tensor:
        return self._output(states.read_BQE)
