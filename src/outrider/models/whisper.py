"""A lean Whisper decoder for the CPU: the same weights, a third of the operator calls.

Query, key and value are one product, weights may be packed, positions come from the table, and the
encoder's states become keys and values once per row (`Cross`), which the cache owns. Attention is
compiled for bfloat16 and float32, in one order of sums for every number of nodes. Else it is two
products, as torch's fused kernel takes another path for one query than for several, eight times as
slow over the 1,500 states of a window. Scores equal transformers' to rounding (tests/models); plain
and speculative decoding run through it alike.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    PreTrainedModel,
    WhisperConfig,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)
from transformers.activations import ACT2FN
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer

from outrider.models import batch_invariance
from outrider.models.attention import BatchInvariantAttention, steady, unscaled
from outrider.models.batch_invariance import BatchInvariance, PaddingPolicy
from outrider.models.cache import SlotCache, SlotLayer
from outrider.models.config import read
from outrider.models.cpu_kernels import cross_attention, layer_kernels
from outrider.models.decoder import EncoderAdapter, additive
from outrider.models.linear import Product, fused
from outrider.models.seq2seq.input_modality import WindowInput
from outrider.models.seq2seq.reader import check_width
from outrider.models.whisper_encoder import Norm, WhisperEncoder
from outrider.types import Encoded, Inputs, Nodes, Output

# What a lean Whisper decoder keeps of a window: keys and values of the encoder's states.


class Kept(NamedTuple):
    """How keys and values are kept, and how they are read."""

    compiled: bool  #: as `cpu_kernels.cross_attention` reads them; else as torch's operators do
    attention: BatchInvariantAttention = BatchInvariantAttention(unscaled, PaddingPolicy())

    @classmethod
    def best(cls, like: Tensor) -> "Kept":
        """The fastest way on this machine for states as `like`.

        torch rounds several queries over 1,500 states otherwise than one. Where that shows, in
        half precision, they are gone through one by one.
        """
        if not cross_attention.unsupported_reason(like):
            return cls(True)
        each = batch_invariance.applies_to(like.dtype, like.device)
        return cls(
            False,
            BatchInvariantAttention(unscaled, PaddingPolicy((1,), 0) if each else PaddingPolicy()),
        )

    def planes(self, keys_BHTE: Tensor, values_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are kept."""
        if not self.compiled:
            return keys_BHTE, values_BHTE
        return cross_attention.laid_keys(keys_BHTE), cross_attention.laid_values(values_BHTE)


class Cross:
    """Keys and values of the encoder's states, made once per row. A `RowStore`.

    `table` is [planes, max_rows, H, ...]: keys of layer i in plane 2 i, its values in 2 i + 1, each
    as `kept` has them. Newcomers are written into free rows; nobody else's entries are copied while
    there are any.
    """

    def __init__(self, table: Tensor, rows: int, slots: int, kept: Kept) -> None:
        self.table, self.rows, self.slots, self.kept = table, rows, slots, kept
        self._planes = table[:, :rows].unbind(0)  # once: every layer of every call reads two

    def attend(self, layer: int, q_BQHE: Tensor) -> Tensor:
        """Attention [B, Q, H E] of scaled queries over all states."""
        keys, values = self._planes[2 * layer], self._planes[2 * layer + 1]
        if self.kept.compiled:
            return cross_attention.attend(q_BQHE, keys, values, self.slots).flatten(2)
        x_BHQE = self.kept.attention(q_BQHE.transpose(1, 2), keys, values)
        return x_BHQE.transpose(1, 2).reshape(*q_BQHE.shape[:2], -1)

    def take(self, rows: Sequence[int]) -> "Cross":
        """A copy of these rows, in this order."""
        table = torch.cat([self.table[:, :0], *(self.table[:, r : r + 1] for r in rows)], 1)
        return Cross(table, len(rows), self.slots, self.kept)

    def put(self, into: Sequence[int], other: "Cross") -> "Cross":
        """The rows of `other` in these rows; numbers behind the last row add rows."""
        rows = max(self.rows, 1 + max(into, default=-1))
        have = self.table.shape[1]
        if rows > have:
            more = max(rows, 2 * have) - have
            self.table = F.pad(self.table, (*(0, 0) * (self.table.dim() - 2), 0, more))
        for row, at in enumerate(into):
            self.table[:, at] = other.table[:, row]
        return Cross(self.table, rows, self.slots, self.kept)

    def narrow(self, rows: int) -> "Cross":
        """The first rows; those behind them are free for `put`."""
        return Cross(self.table, rows, self.slots, self.kept)


Whisper: TypeAlias = WhisperForConditionalGeneration | WhisperForCausalLM


def fits(model: PreTrainedModel) -> bool:
    """Whether the lean runner computes this model: a Whisper, or its decoder alone."""
    if not isinstance(model, WhisperForConditionalGeneration | WhisperForCausalLM):
        return False
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return read(model.config, "quantization_config", object) is None and all(
        type(m) is torch.nn.Linear for m in linears
    )


class _DecoderLayer(NamedTuple):
    """One decoder layer with fused products."""

    before: Norm
    qkv: Product
    out: Product
    between: Norm
    query: Product
    keys_values: Product
    cross_out: Product
    after: Norm
    up: Product
    down: Product


def _layer(layer: WhisperDecoderLayer, packed: bool, int8: bool, scaling: float) -> _DecoderLayer:
    a, c = layer.self_attn, layer.encoder_attn
    made = partial(fused, packed=packed, int8=int8)
    return _DecoderLayer(
        Norm.of(layer.self_attn_layer_norm),
        made([a.q_proj, a.k_proj, a.v_proj], scales=(scaling, 1.0, 1.0)),
        made([a.out_proj]),
        Norm.of(layer.encoder_attn_layer_norm),
        made([c.q_proj], scales=(c.scaling,)),
        # once a window, over all states: not what steps read
        fused([c.k_proj, c.v_proj], packed, int8_activations=True),
        made([c.out_proj]),
        Norm.of(layer.final_layer_norm),
        made([layer.fc1]),
        made([layer.fc2]),
    )


class WhisperReader:
    """Log-mel frames to states, and states to the keys and values of every layer."""

    def __init__(
        self,
        config: WhisperConfig,
        layers: Sequence[_DecoderLayer],
        encoder: WhisperEncoder | None,
        kept: Kept,
    ) -> None:
        self._layers, self._encoder, self._kept = layers, encoder, kept
        self._heads: int = config.decoder_attention_heads
        self._width: int = config.d_model
        self._shapes = config.max_source_positions, config.num_mel_bins
        self._dtype = layers[0].before.weight.dtype
        self.shares = encoder is None
        self._window = WindowInput(config)

    def examine(self, inputs: Inputs) -> None:
        """Refuse frames of another shape, or states of another width: ConfigurationError."""
        if inputs.encoded is not None:
            check_width(inputs.encoded, self._width)
        elif not self.shares:
            self._window.examine(inputs)

    def encode(self, inputs: Inputs) -> Encoded:
        """The encoder's states of features [B, frames, mels]; all of them are there.

        Whisper attends to padding, too: a window is 30 seconds, what follows the audio is silence.
        """
        assert self._encoder is not None
        self._window.examine(inputs)
        assert inputs.features is not None
        states = self._encoder(inputs.features)
        return Encoded(states, states.new_ones(states.shape[:2], dtype=torch.bool))

    def keep(self, encoded: Encoded) -> Cross:
        """Keys and values of every layer in one piece."""
        check_width(encoded, self._width)
        states = encoded.states_BTE.to(self._dtype)
        rows, length, _ = states.shape
        shape = rows, length, 2, self._heads, self._width // self._heads
        planes: list[Tensor] = []
        for layer in self._layers:
            keys, values = layer.keys_values(states).view(shape).permute(2, 0, 3, 1, 4)
            planes += self._kept.planes(keys, values)
        return Cross(torch.stack(planes), rows, length, self._kept)

    def probe(self, rows: int) -> Inputs:
        """Noise, and states that are made up: a check of the decoder needs no encoder's work."""
        length, mels = self._shapes
        random = torch.Generator().manual_seed(0)
        states = torch.randn(rows, length, self._width, generator=random).to(self._dtype)
        features = torch.randn(rows, 2 * length, mels, generator=random)
        there = torch.ones(rows, length, dtype=torch.bool)
        heard = torch.ones(rows, 2 * length, dtype=torch.bool)
        return Inputs(None, features, heard, Encoded(states, there))


class WhisperRunner:
    """Runs a Whisper's weights on one CPU device; `shares` leaves an encoder that it has unused."""

    trees = True
    recurrent = False
    limit = (0.0, float("inf"))

    def __init__(
        self, model: Whisper, packed: bool, shares: bool = False, int8: bool = False
    ) -> None:
        config, decoder = model.config, model.model.decoder
        self.name = type(model).__name__
        self.packed = packed
        self.vocab_size: int = config.vocab_size
        self.context: int = config.max_target_positions
        self.heads: int = config.decoder_attention_heads
        self.width: int = config.d_model
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        self._places: Tensor = decoder.embed_positions.weight.detach()
        self.kv_heads, self.size, self.eps = self.heads, self.width // self.heads, 0.0
        self._attention, self.rounding, scaling, self.means = self._choose()
        self._layers = [_layer(layer, packed, int8, scaling) for layer in decoder.layers]
        self.layers = len(self._layers)
        self._norm = Norm.of(decoder.layer_norm)
        self._head = fused([model.get_output_embeddings()], packed, int8=int8, wide=True)
        self._act = ACT2FN[config.activation_function]
        kept, encoder = Kept.best(self._embedding), None
        if isinstance(model, WhisperForConditionalGeneration) and not shares:
            encoder = WhisperEncoder(model.model.encoder, packed)
        self.reader: EncoderAdapter = WhisperReader(config, self._layers, encoder, kept)

    def _choose(
        self,
    ) -> "tuple[layer_kernels.CpuKernels | _Operators, BatchInvariance, float, str]":
        """What attends to the text, what is left to look after, how far queries are scaled in
        their product, and what it is called."""
        unfit = layer_kernels.cannot_attend(self, self._embedding)
        if unfit is None:
            whole = torch.ones(self.context, self.size, dtype=self.dtype)  # places turn nothing
            attention = layer_kernels.CpuKernels(self, whole, torch.zeros_like(whole))
            return attention, layer_kernels.ROUNDING, 1.0, "a lean decoder, compiled"
        torchs, rounding = steady(unscaled, self.heads, 1, self.size, self._embedding)
        said = f"a lean decoder, torch's operators: {unfit}"
        return _Operators(self, torchs), rounding, self.size**-0.5, said

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor | None:
        """None: it has the weights alone, not the model's own forward."""
        return None

    def narrowed(self, size: int) -> AbstractContextManager[None]:
        """It has no windows to narrow."""
        return nullcontext()

    def __call__(
        self, cache: SlotCache, nodes: Nodes, last: int | None, taps: tuple[int, ...]
    ) -> Output:
        """Logits of the (last) nodes, and their states at the taps."""
        tokens_BQ, positions_BQ, *_ = nodes
        cross = cache.inputs
        assert isinstance(cross, Cross), "rows without audio"
        call = self._attention.open(nodes)
        state = F.embedding(tokens_BQ, self._embedding) + self._places[positions_BQ]
        kept: dict[int, Tensor] = {}
        for number, (layer, store) in enumerate(zip(self._layers, cache.layers, strict=True)):
            if number in taps:
                kept[number] = state
            x = call.attend(layer.qkv(layer.before(state)), store)
            state = state + layer.out(x)
            q = layer.query(layer.between(state)).view(*tokens_BQ.shape, self.heads, self.size)
            state = state + layer.cross_out(cross.attend(number, q))
            state = state + layer.down(self._act(layer.up(layer.after(state))))
        if last is not None:
            state = state[:, -last:]
        state = self._norm(state)
        kept[-1] = state
        few = slice(-state.shape[1], None)
        return Output(self._head(state), tuple(kept[tap][:, few] for tap in taps))


class _Operators:
    """Attention to the text by torch's operators; queries are scaled already."""

    def __init__(self, shape: WhisperRunner, attention: BatchInvariantAttention) -> None:
        self.shape, self.attention = shape, attention

    def open(self, nodes: Nodes) -> "_WhisperCall":
        """The mask of a call, once for all layers."""
        dtype = self.shape.dtype
        return _WhisperCall(self, self.attention.mask(additive(nodes.visible_BQW, dtype)))


class _WhisperCall(NamedTuple):
    of: _Operators
    mask: Tensor

    def attend(self, qkv: Tensor, store: SlotLayer) -> Tensor:
        """Attention [B, Q, H E] of qkv [B, Q, 3 H E], whose keys and values are stored."""
        batch, queries, wide = qkv.shape
        heads, size = self.of.shape.heads, self.of.shape.size
        q, k, v = qkv.view(batch, queries, 3, heads, size).permute(2, 0, 3, 1, 4)
        keys, values = store.update(k, v)
        x = self.of.attention(q, keys, values, self.mask)
        return x.transpose(1, 2).reshape(batch, queries, wide // 3)
