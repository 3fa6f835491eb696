"""A lean Whisper encoder for the CPU: packed weights, and attention in pieces that stay in cache.

Half of a window's time is the encoder's. In half precision torch's fused attention takes most of
that; products over a part of the queries at a time take less than half as long, because their
scores never leave the cache. Where weights are kept in 8 bits, products are of whole numbers.
Attention is in whole numbers of 16 bits wherever products round to 8 bits: int8's and bfloat16's.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.whisper.modeling_whisper import WhisperEncoder as Module
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

from outrider.errors import ConfigurationError
from outrider.models.cpu_kernels import int16_attention
from outrider.models.linear import Product, fused
from outrider.models.weight_only import round_to_8_bits

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


class _EncoderLayer(NamedTuple):
    before: Norm
    qkv: Product
    out: Product
    after: Norm
    up: Product
    down: Product


def _layer(layer: WhisperEncoderLayer, packed: bool, scaling: float) -> _EncoderLayer:
    a = layer.self_attn
    made = partial(fused, packed=packed, int8_activations=True)
    return _EncoderLayer(
        Norm.of(layer.self_attn_layer_norm),
        made([a.q_proj, a.k_proj, a.v_proj], scales=(scaling, 1.0, 1.0)),
        made([a.out_proj]),
        Norm.of(layer.final_layer_norm),
        made([layer.fc1]),
        made([layer.fc2]),
    )


class WhisperEncoder:
    """Runs the encoder's weights: log-mel frames [B, F, mels] to states [B, F / 2, E]."""

    def __init__(self, module: Module, packed: bool) -> None:
        config = module.config
        self.frames: int = 2 * config.max_source_positions
        self.mels: int = config.num_mel_bins
        self.heads: int = config.encoder_attention_heads
        self._act = ACT2FN[config.activation_function]
        self._first, self._second = module.conv1, module.conv2
        self._places = module.embed_positions.weight.detach()
        self._scaling = (config.d_model // self.heads) ** -0.5
        #: Whether attention is in whole numbers, too, and scales queries itself.
        self._in_int16 = round_to_8_bits(
            part
            for layer in module.layers
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        ) and not int16_attention.unfit(config.d_model // self.heads)
        scaling = 1.0 if self._in_int16 else self._scaling
        self._layers = [_layer(layer, packed, scaling) for layer in module.layers]
        self._norm = Norm.of(module.layer_norm)

    def __call__(self, features_BFM: Tensor) -> Tensor:
        """The states. Raises ConfigurationError for frames of another number or kind."""
        if features_BFM.dim() != 3 or features_BFM.shape[1:] != (self.frames, self.mels):
            raise ConfigurationError(
                f"the encoder reads {self.frames} log-mel frames of {self.mels} channels a row; "
                f"got features of shape {tuple(features_BFM.shape)}; pad the audio to 30 seconds "
                "and take the model's own feature extractor"
            )
        # one row at a time: nothing is won by more, and scores of one fit into the cache
        return torch.cat([self._row(row[None]) for row in features_BFM])

    def _row(self, features_1FM: Tensor) -> Tensor:
        x = features_1FM.transpose(1, 2).to(self._places.dtype)
        with torch.no_grad():
            x = F.gelu(self._second(F.gelu(self._first(x)))).transpose(1, 2)
        state = x + self._places
        _, length, width = state.shape
        for layer in self._layers:
            qkv = layer.qkv(layer.before(state)).view(length, 3, self.heads, width // self.heads)
            if self._in_int16:
                heads = int16_attention.attend(qkv, self._scaling)
            else:
                heads = attention(*qkv.permute(1, 2, 0, 3)).transpose(0, 1)
            state = state + layer.out(heads.reshape(1, length, width))
            state = state + layer.down(self._act(layer.up(layer.after(state))))
            if state.dtype is torch.float16:
                most = torch.finfo(state.dtype).max - 1000
                state = state.clamp(-most, most)
        return self._norm(state)


def attention(q_HTE: Tensor, k_HTE: Tensor, v_HTE: Tensor) -> Tensor:
    """softmax(q k') v for each head; q is scaled already."""
    if q_HTE.dtype is torch.float32:  # the fused kernel is the faster one
        q, k, v = (x[None].contiguous() for x in (q_HTE, k_HTE, v_HTE))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)[0]
    out = torch.empty_like(q_HTE, memory_format=torch.contiguous_format)
    for queries, keys, values, result in zip(q_HTE, k_HTE, v_HTE, out, strict=True):
        columns = keys.T.contiguous()
        for q, into in zip(queries.split(_PIECE), result.split(_PIECE), strict=True):
            torch.mm(torch.softmax(q @ columns, -1), values, out=into)
    return out
