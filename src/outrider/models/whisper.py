"""A lean Whisper decoder for the CPU: the same weights, a third of the operator calls.

Query, key and value are one product, weights may be packed, positions come from the table, and the
encoder's states become keys and values once per row (`Cross`), which the cache owns. Attention is
two products for every number of nodes: torch's fused kernel takes another path for one query than
for several, eight times as slow over the 1,500 states of a window, and then a plain step and a
chain would round differently in half precision. Scores equal transformers' to rounding
(tests/models); plain and speculative decoding run through it alike.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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

from outrider.models.attention import steady, unscaled
from outrider.models.cache import SlotCache
from outrider.models.causal import Reader, additive
from outrider.models.config import read
from outrider.models.linear import Product, fused
from outrider.models.seq2seq.kinds import Window
from outrider.models.seq2seq.reader import check_width
from outrider.models.whisper_encoder import Norm, WhisperEncoder
from outrider.types import Encoded, Inputs, Nodes, Output

Whisper: TypeAlias = WhisperForConditionalGeneration | WhisperForCausalLM


def fits(model: PreTrainedModel) -> bool:
    """Whether the lean runner computes this model: a Whisper, or its decoder alone."""
    if not isinstance(model, WhisperForConditionalGeneration | WhisperForCausalLM):
        return False
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return read(model.config, "quantization_config", object) is None and all(
        type(m) is torch.nn.Linear for m in linears
    )


class Cross:
    """Keys and values of the encoder's states, made once per row. A `RowStore`.

    `table` is [planes, seats, H, T, E]: keys of layer i in plane 2 i, its values in 2 i + 1.
    Newcomers are written into free seats; nobody else's entries are copied while there are any.
    """

    def __init__(self, table: Tensor, rows: int) -> None:
        self.table, self.rows = table, rows

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, E] of a layer."""
        return self.table[2 * layer, : self.rows], self.table[2 * layer + 1, : self.rows]

    def take(self, rows: Sequence[int]) -> "Cross":
        """A copy of these rows, in this order."""
        table = self.table
        return Cross(torch.cat([table[:, :0], *(table[:, r : r + 1] for r in rows)], 1), len(rows))

    def put(self, seats: Sequence[int], other: "Cross") -> "Cross":
        """The rows of `other` in these seats; seats behind the last row add rows."""
        rows = max(self.rows, 1 + max(seats, default=-1))
        have = self.table.shape[1]
        if rows > have:
            more = max(rows, 2 * have) - have
            self.table = F.pad(self.table, (0, 0, 0, 0, 0, 0, 0, more))
        for row, seat in enumerate(seats):
            self.table[:, seat] = other.table[:, row]
        self.rows = rows
        return self

    def narrow(self, rows: int) -> "Cross":
        """The first rows; the seats behind them are free for `put`."""
        return Cross(self.table, rows)


class _Layer(NamedTuple):
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


def _layer(layer: WhisperDecoderLayer, packed: bool) -> _Layer:
    a, c = layer.self_attn, layer.encoder_attn
    return _Layer(
        Norm.of(layer.self_attn_layer_norm),
        fused([a.q_proj, a.k_proj, a.v_proj], packed, (a.scaling, 1.0, 1.0)),
        fused([a.out_proj], packed),
        Norm.of(layer.encoder_attn_layer_norm),
        fused([c.q_proj], packed, (c.scaling,)),
        fused([c.k_proj, c.v_proj], packed),
        fused([c.out_proj], packed),
        Norm.of(layer.final_layer_norm),
        fused([layer.fc1], packed),
        fused([layer.fc2], packed),
    )


class WhisperReader:
    """Log-mel frames to states, and states to the keys and values of every layer."""

    def __init__(
        self, config: WhisperConfig, layers: Sequence[_Layer], encoder: WhisperEncoder | None
    ) -> None:
        self._layers, self._encoder = layers, encoder
        self._heads: int = config.decoder_attention_heads
        self._width: int = config.d_model
        self._shapes = config.max_source_positions, config.num_mel_bins
        self._dtype = layers[0].before.weight.dtype
        self.shares = encoder is None
        self._window = Window(config)

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
        """Keys and values of every layer, [2 layers, B, H, T, E] in one piece."""
        check_width(encoded, self._width)
        states = encoded.states_BTE.to(self._dtype)
        rows, length, _ = states.shape
        heads, size = self._heads, self._width // self._heads
        table = states.new_empty(2 * len(self._layers), rows, heads, length, size)
        for number, layer in enumerate(self._layers):
            both = layer.keys_values(states).view(rows, length, 2, heads, size)
            table[2 * number : 2 * number + 2] = both.permute(2, 0, 3, 1, 4)
        return Cross(table, rows)

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
    means = "a lean decoder, torch's operators"

    def __init__(self, model: Whisper, packed: bool, shares: bool = False) -> None:
        config, decoder = model.config, model.model.decoder
        self.name = type(model).__name__
        self.packed = packed
        self.vocab_size: int = config.vocab_size
        self.context: int = config.max_target_positions
        self.heads: int = config.decoder_attention_heads
        self.width: int = config.d_model
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._places: Tensor = decoder.embed_positions.weight.detach()
        size = self.width // self.heads
        self._attention, self.rounding = steady(unscaled, self.heads, 1, size, self._embedding)
        self._layers = [_layer(layer, packed) for layer in decoder.layers]
        self.layers = len(self._layers)
        self._norm = Norm.of(decoder.layer_norm)
        self._head = fused([model.get_output_embeddings()], packed)
        self._act = ACT2FN[config.activation_function]
        encoder = None
        if isinstance(model, WhisperForConditionalGeneration) and not shares:
            encoder = WhisperEncoder(model.model.encoder, packed)
        self.reader: Reader = WhisperReader(config, self._layers, encoder)

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._embedding.dtype

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
        tokens_BQ, positions_BQ, _, visible_BQW = nodes
        batch, queries = tokens_BQ.shape
        heads, size = self.heads, self.width // self.heads
        cross = cache.inputs
        assert isinstance(cross, Cross), "rows without audio"
        mask = self._attention.mask(additive(visible_BQW, self.dtype))
        state = F.embedding(tokens_BQ, self._embedding) + self._places[positions_BQ]
        kept: dict[int, Tensor] = {}
        for number, (layer, store) in enumerate(zip(self._layers, cache.layers, strict=True)):
            if number in taps:
                kept[number] = state
            qkv = layer.qkv(layer.before(state)).view(batch, queries, 3, heads, size)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            keys, values = store.update(k, v)
            x = self._attention(q, keys, values, mask)
            state = state + layer.out(x.transpose(1, 2).reshape(batch, queries, self.width))
            q = layer.query(layer.between(state)).view(batch, queries, heads, size)
            keys, values = cross.of(number)
            x = self._attention(q.transpose(1, 2), keys, values)
            state = state + layer.cross_out(x.transpose(1, 2).reshape(batch, queries, self.width))
            state = state + layer.down(self._act(layer.up(layer.after(state))))
        if last is not None:
            state = state[:, -last:]
        state = self._norm(state)
        kept[-1] = state
        few = slice(-state.shape[1], None)
        return Output(self._head(state), tuple(kept[tap][:, few] for tap in taps))
