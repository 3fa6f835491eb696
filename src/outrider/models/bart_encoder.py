"""A lean encoder for the CPU, of BART and its like: packed weights, attention that stays in cache.

Half of a window's time is a Whisper's encoder's. In half precision torch's fused attention takes
most of that; products over a part of the queries at a time take less than half as long, because
their scores never leave the cache. Where weights are kept in 8 bits, a Whisper's products are of
whole numbers of 8 bits, and its attention of 16 wherever products round: int8's and bfloat16's. The
states of a text are too few for that: unpacking the weights takes longer than what it saves.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from outrider.models.config import read
from outrider.models.cpu_kernels import int16_attention
from outrider.models.layer import whole
from outrider.models.linear import Product, fused
from outrider.models.seq2seq.runner import positions_of
from outrider.models.weight_only import round_to_8_bits
from outrider.types import Inputs

if TYPE_CHECKING:
    from transformers.models.bart.modeling_bart import BartEncoder, BartEncoderLayer


# Encoder-decoders with BART's layers, which the lean runner computes, and how they differ.


class Family(NamedTuple):
    """One of them."""

    #: names of its classes: with an encoder, and of a decoder alone
    classes: tuple[str, ...]
    norms_ahead: bool  #: whether a norm stands ahead of each part (pre-norm), or behind the sum
    norms_tokens: bool = False  #: whether a decoder norms tokens alone, before positions are added
    scales: bool = True  #: whether embeddings are scaled where the configuration says so
    counts_tokens: bool = False  #: whether padding within a source has no position
    #: whether a source is a thousand states and more, over which rounding to 8 bits pays
    long_sources: bool = False
    #: the context by name
    context: str = "max_position_embeddings"


#: By the type that a configuration names.
FAMILIES: Mapping[str, Family] = {
    "bart": Family(("BartForConditionalGeneration", "BartForCausalLM"), False),
    "blenderbot": Family(("BlenderbotForConditionalGeneration", "BlenderbotForCausalLM"), True),
    "blenderbot-small": Family(
        ("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallForCausalLM"),
        False,
        norms_tokens=True,
    ),
    "m2m_100": Family(("M2M100ForConditionalGeneration",), True, counts_tokens=True),
    "marian": Family(("MarianMTModel", "MarianForCausalLM"), False),
    "mbart": Family(("MBartForConditionalGeneration", "MBartForCausalLM"), True),
    "pegasus": Family(("PegasusForConditionalGeneration", "PegasusForCausalLM"), True),
    "plbart": Family(("PLBartForConditionalGeneration", "PLBartForCausalLM"), False),
    "whisper": Family(
        ("WhisperForConditionalGeneration", "WhisperForCausalLM"),
        True,
        scales=False,
        long_sources=True,
        context="max_target_positions",
    ),
}


def fits(model: PreTrainedModel) -> bool:
    """Whether the lean runner computes this model: one of `FAMILIES`, with or without an encoder.

    Not one whose weights are sharded, or quantised by another library.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is None or type(model).__name__ not in family.classes:
        return False
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    quantised = read(model.config, "quantization_config", object) is not None
    return not quantised and all(whole(layer) for layer in linears)


_PIECE = 500  #: queries whose scores are made at a time


class Norm(NamedTuple):
    """A layer norm's weights."""

    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def of(cls, module: torch.nn.LayerNorm) -> "Norm":
        """The norm of a module."""
        return cls(module.weight.detach(), module.bias.detach(), module.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Normed rows."""
        return torch.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def norm_in(module: torch.nn.Module, name: str) -> Norm | None:
    """The norm that a module has by this name, if it has one."""
    norm = read(module, name, torch.nn.LayerNorm)
    return None if norm is None else Norm.of(norm)


class Joined(NamedTuple):
    """What stands between two parts of a layer: the sum of what was and what came, and its norm.

    `ahead` of the next part (pre-norm) the sum goes on as it is; else its norm does.
    """

    norm: Norm | None
    ahead: bool

    def __call__(self, state: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        """What goes on, and what the next part reads."""
        total = state + more
        if total.dtype is torch.float16:
            most = torch.finfo(total.dtype).max - 1000
            total = total.clamp(-most, most)
        normed = total if self.norm is None else self.norm(total)
        return (total if self.ahead else normed), normed


def joints(
    layers: Sequence[torch.nn.Module], names: Sequence[str], last: Norm | None, ahead: bool
) -> tuple[Norm | None, list[list[Joined]]]:
    """The norm ahead of the first layer, and what follows each part of each.

    `names` are those of a layer's norms, part by part; `last` is the norm behind the last layer.
    """
    norms = [norm_in(layer, name) for layer in layers for name in names]
    norms = [*norms, last] if ahead else [None, *norms]
    each, parts = [Joined(norm, ahead) for norm in norms[1:]], len(names)
    return norms[0], [each[i * parts : (i + 1) * parts] for i in range(len(layers))]


class Embedding(NamedTuple):
    """Tokens and positions as states."""

    weight: Tensor
    scale: float
    norm: Norm | None
    early: bool  #: whether tokens are normed, not sums

    @classmethod
    def of(cls, module: PreTrainedModel, family: Family, early: bool = False) -> "Embedding":
        """That of an encoder or a decoder."""
        config: PretrainedConfig = module.config
        scaled = family.scales and bool(read(config, "scale_embedding", bool))
        weight: Tensor = module.embed_tokens.weight.detach()
        scale = float(config.d_model) ** 0.5 if scaled else 1.0
        return cls(weight, scale, norm_in(module, "layernorm_embedding"), early)

    def __call__(self, ids_BT: Tensor, places: Tensor) -> Tensor:
        """States [B, T, E] of tokens at `places` [B, T, E] or [T, E]."""
        x = F.embedding(ids_BT, self.weight)
        if self.scale != 1.0:
            x = x * self.scale
        if self.norm is None:
            return x + places
        return self.norm(x) + places if self.early else self.norm(x + places)


class _EncoderLayer(NamedTuple):
    qkv: Product
    out: Product
    between: Joined
    up: Product
    down: Product
    after: Joined


class EncoderLayers:
    """Runs an encoder's layers over the embedded states [1, T, E] of one row."""

    def __init__(self, module: "BartEncoder", family: Family, packed: bool) -> None:
        config, layers = module.config, list(module.layers)
        self.heads: int = config.encoder_attention_heads
        width: int = config.d_model
        self._act = ACT2FN[config.activation_function]
        self._scaling = (width // self.heads) ** -0.5
        #: Whether attention is in whole numbers, too.
        self.in_int16 = (
            family.long_sources
            and round_to_8_bits(
                layer.self_attn.get_submodule(f"{part}_proj") for layer in layers for part in "qkv"
            )
            and not int16_attention.unsupported_reason(width // self.heads)
        )
        last = norm_in(module, "layer_norm")
        self._first, each = joints(
            layers, ("self_attn_layer_norm", "final_layer_norm"), last, family.norms_ahead
        )
        made = partial(
            fused,
            packed=packed,
            int8_activations=family.long_sources,
            compiled=not family.long_sources,
        )
        self._layers = [_layer(*one, made) for one in zip(layers, each, strict=True)]

    def __call__(self, state: Tensor) -> Tensor:
        """The states."""
        _, length, width = state.shape
        x = state if self._first is None else self._first(state)
        for layer in self._layers:
            qkv = layer.qkv(x).view(length, 3, self.heads, width // self.heads)
            if self.in_int16:
                heads = int16_attention.attend(qkv, self._scaling)
            else:
                q, k, v = qkv.permute(1, 2, 0, 3)
                heads = attention(q, k, v, self._scaling).transpose(0, 1)
            state, x = layer.between(state, layer.out(heads.reshape(1, length, width)))
            state, x = layer.after(state, layer.down(self._act(layer.up(x))))
        return x


def _layer(
    layer: "BartEncoderLayer", parts: Sequence[Joined], made: Callable[..., Product]
) -> _EncoderLayer:
    a = layer.self_attn
    return _EncoderLayer(
        made([a.q_proj, a.k_proj, a.v_proj]),
        made([a.out_proj]),
        parts[0],
        made([layer.fc1]),
        made([layer.fc2]),
        parts[1],
    )


def attention(q_HTE: Tensor, k_HTE: Tensor, v_HTE: Tensor, scale: float) -> Tensor:
    """softmax(scale q k') v for each head."""
    if q_HTE.dtype is torch.float32:  # the fused kernel is the faster one
        q, k, v = (x[None].contiguous() for x in (q_HTE, k_HTE, v_HTE))
        return F.scaled_dot_product_attention(q, k, v, scale=scale)[0]
    out = torch.empty_like(q_HTE, memory_format=torch.contiguous_format)
    for queries, keys, values, result in zip(q_HTE * scale, k_HTE, v_HTE, out, strict=True):
        columns = keys.T.contiguous()
        for q, into in zip(queries.split(_PIECE), result.split(_PIECE), strict=True):
            torch.mm(torch.softmax(q @ columns, -1), values, out=into)
    return out


class TextEncoder:
    """Runs an encoder of text: token ids to states."""

    def __init__(self, module: "BartEncoder", family: Family, packed: bool) -> None:
        config = module.config
        self._embedding = Embedding.of(module, family)
        like = torch.empty(0, config.d_model, dtype=self._embedding.weight.dtype, device="cpu")
        most: int = config.max_position_embeddings
        self._places_PE = positions_of(module.embed_positions, most, like)
        self._padding: int | None = config.pad_token_id if family.counts_tokens else None
        self._layers = EncoderLayers(module, family, packed)

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        """States [1, T, E] of each row."""
        assert inputs.ids_BS is not None
        lengths: list[int] = inputs.mask_BS.sum(1).tolist()
        # one row at a time: nothing is padded, and a text does not depend on its neighbours
        rows = zip(inputs.ids_BS, lengths, strict=True)
        return [self._row(row[None, :length]) for row, length in rows]

    def _row(self, ids_1T: Tensor) -> Tensor:
        places = self._places_PE[: ids_1T.shape[1]]
        if self._padding is not None and bool((ids_1T == self._padding).any()):
            there_1T = ids_1T != self._padding
            at_1T = (there_1T.cumsum(1) - 1).clamp(min=0)
            places = self._places_PE[at_1T] * there_1T[..., None]
        return self._layers(self._embedding(ids_1T, places))
