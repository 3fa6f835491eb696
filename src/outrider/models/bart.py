"""A lean decoder for the CPU, of BART and its like: the same weights, a third of the calls.

Query, key and value are one product, weights may be packed, positions come from a table, and the
encoder's states become keys and values once per row which the cache owns.
Scores equal transformers' to rounding (tests/models); plain and speculative decoding run through it
alike. Whisper (`models.whisper`) is one of them, with an encoder of sound.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from outrider.models import memory
from outrider.models.attention import BatchInvariantAttention, steady, unscaled
from outrider.models.bart_encoder import (
    FAMILIES,
    Embedding,
    Family,
    Joined,
    TextEncoder,
    joints,
    norm_in,
)
from outrider.models.batch_invariance import BatchInvariance
from outrider.models.cache import SlotCache, SlotLayer
from outrider.models.config import read
from outrider.models.cpu_kernels import decoder_layers, layer_kernels
from outrider.models.cpu_kernels.layer_kernels import KernelCall
from outrider.models.cpu_kernels.packed_linear import PackedLinear
from outrider.models.decoder import EncoderAdapter, LeanRunner, additive
from outrider.models.linear import Product, fused, product
from outrider.models.seq2seq.input_modality import InputModality, TextInput, there
from outrider.models.seq2seq.reader import check_width, made_up_states
from outrider.models.seq2seq.runner import positions_of
from outrider.types import Encoded, Inputs, Nodes, Output

if TYPE_CHECKING:
    from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoder

from outrider.models import batch_invariance
from outrider.models.batch_invariance import PaddingPolicy
from outrider.models.cpu_kernels import cross_attention

# What a lean decoder keeps of its sources, and how it attends to them.
#
# Attention is compiled for bfloat16 and float32, in one order of sums for every number of nodes.
# Else it is two products, as torch's fused kernel takes another path for one query than for
# several, eight times as slow over the 1,500 states of a Whisper's window.


class KeyValueLayout(NamedTuple):
    """How keys and values are kept, and how they are read."""

    compiled: bool  #: as `cpu_kernels.cross_attention` reads them; else as torch's operators do
    attention: BatchInvariantAttention = BatchInvariantAttention(unscaled, PaddingPolicy())

    @classmethod
    def best(cls, like: Tensor) -> "KeyValueLayout":
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
    as `kept` has them. `slots` says how many states a row has. Newcomers are written into free
    rows; nobody else's entries are copied while there are any, and no source is longer.
    """

    def __init__(
        self, table: Tensor, slots: Sequence[int], most: int, kept: KeyValueLayout
    ) -> None:
        """`most` is the number of states that the table has room for."""
        self.table, self.rows, self.slots, self.kept = table, len(slots), [*slots], kept
        self.most = most
        self._planes = table[:, : self.rows].unbind(0)  # once: every layer of every call reads two
        self._slots_B = torch.tensor(self.slots, dtype=torch.int64, device="cpu")
        self._masks: dict[int, Tensor | None] = {}

    def attend(self, layer: int, q_BQHE: Tensor, scale: float) -> Tensor:
        """softmax(scale q k') v [B, Q, H E] over the states of each row's source."""
        keys, values = self._planes[2 * layer], self._planes[2 * layer + 1]
        if self.kept.compiled:
            made = cross_attention.attend(q_BQHE, keys, values, self._slots_B, self.most, scale)
            return made.flatten(2)
        mask = self._mask(q_BQHE)
        x_BHQE = self.kept.attention(q_BQHE.transpose(1, 2) * scale, keys, values, mask)
        return x_BHQE.transpose(1, 2).reshape(*q_BQHE.shape[:2], -1)

    def compiled(self) -> tuple[Tensor, Tensor, int] | None:
        """Planes of the rows in use, states of each and most of them; None: not read by kernels."""
        return (
            (self.table[:, : self.rows], self._slots_B, self.most) if self.kept.compiled else None
        )

    def _mask(self, q_BQHE: Tensor) -> Tensor | None:
        """What queries see of shorter sources; None if all are of one length."""
        queries = q_BQHE.shape[1]
        if queries not in self._masks:
            there_BT = torch.arange(self.most, device=self._slots_B.device) < self._slots_B[:, None]
            seen = additive(there_BT[:, None].expand(-1, queries, -1), q_BQHE.dtype)
            whole = all(slots == self.most for slots in self.slots)
            self._masks[queries] = None if whole else self.kept.attention.mask(seen)
        return self._masks[queries]

    def take(self, rows: Sequence[int]) -> "Cross":
        table = torch.cat([self.table[:, :0], *(self.table[:, r : r + 1] for r in rows)], 1)
        return Cross(table, [self.slots[row] for row in rows], self.most, self.kept)

    def put(self, into: Sequence[int], other: "Cross") -> "Cross":
        rows, most = max(self.rows, 1 + max(into, default=-1)), max(self.most, other.most)
        self._fit(rows, other.table.shape[3])
        slots = self.slots + [0] * (rows - self.rows)
        used = slice(0, other.table.shape[3])
        for row, at in enumerate(into):
            self.table[:, at, :, used] = other.table[:, row]
            slots[at] = other.slots[row]
        return Cross(self.table, slots, most, self.kept)

    def _fit(self, rows: int, room: int) -> None:
        """A table for more rows, or with more room in a row (states lie in their order), if there
        is too little: rows that nobody has yet take no memory."""
        planes, have, heads, size, *entry = self.table.shape
        more = have if rows <= have else max(rows, 2 * have)
        if (more, max(size, room)) == (have, size):
            return
        table = memory.zeros(self.table, (planes, more, heads, max(size, room), *entry))
        table[:, : self.rows, :, :size] = self.table[:, : self.rows]
        self.table = table

    def narrow(self, rows: int) -> "Cross":
        """The first rows; those behind them are free for `put`."""
        return Cross(self.table, self.slots[:rows], self.most, self.kept)


#: inputs -> states [1, T, E] of each row
Encoder: TypeAlias = Callable[[Inputs], list[Tensor]]
_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")


class _DecoderLayer(NamedTuple):
    """One decoder layer with fused products."""

    qkv: Product
    out: Product
    read_text: Joined
    query: Product
    keys_values: Product
    cross_out: Product
    read_source: Joined
    up: Product
    down: Product
    after: Joined

    def products(self) -> list[Product]:
        """Those that a step runs."""
        return [self.qkv, self.out, self.query, self.cross_out, self.up, self.down]

    def joints(self) -> list[Joined]:
        """What follows each of its parts."""
        return [self.read_text, self.read_source, self.after]


def _layer(
    layer: "BartDecoderLayer", parts: Sequence[Joined], packed: bool, int8: bool, long: bool
) -> _DecoderLayer:
    a, c = layer.self_attn, layer.encoder_attn
    made = partial(fused, packed=packed, int8=int8, compiled=True)
    return _DecoderLayer(
        made([a.q_proj, a.k_proj, a.v_proj]),
        made([a.out_proj]),
        parts[0],
        made([c.q_proj]),
        # once a source, over all states: not what steps read
        fused([c.k_proj, c.v_proj], packed, int8_activations=long, compiled=not long),
        made([c.out_proj]),
        parts[1],
        made([layer.fc1]),
        made([layer.fc2]),
        parts[2],
    )


class BartReader:
    """Sources to states, and states to the keys and values of every layer."""

    def __init__(
        self,
        config: PretrainedConfig,
        layers: Sequence[_DecoderLayer],
        encoder: Encoder | None,
        kind: InputModality,
        dtype: torch.dtype,
        kept: KeyValueLayout,
    ) -> None:
        """`kind` is what the encoder reads; without one states come from the target's."""
        self._layers, self._encoder, self._kind, self._kept = layers, encoder, kind, kept
        self._heads: int = config.decoder_attention_heads
        self._width: int = config.d_model
        self._dtype = dtype
        self.shares = encoder is None

    def examine(self, inputs: Inputs) -> None:
        """Refuse what the encoder cannot read, or states of another width: ConfigurationError."""
        if inputs.encoded is not None:
            check_width(inputs.encoded, self._width)
        elif not self.shares:
            self._kind.examine(inputs)

    @torch.no_grad()
    def encode(self, inputs: Inputs) -> Encoded:
        """The encoder's states, padded to the longest.

        Whisper attends to padding, too: a window is 30 seconds, what follows the audio is silence.
        """
        assert self._encoder is not None
        self._kind.examine(inputs)
        each = self._encoder(inputs)
        lengths = [states.shape[1] for states in each]
        whole = each[0].new_zeros(len(each), max(lengths), self._width)
        for row, states in zip(whole, each, strict=True):
            row[: states.shape[1]] = states[0]
        return Encoded(whole, there(lengths))

    def keep(self, encoded: Encoded) -> Cross:
        """Keys and values of every layer in one piece."""
        check_width(encoded, self._width)
        states = encoded.states_BTE.to(self._dtype)
        rows, length, _ = states.shape
        shape = rows, length, 2, self._heads, self._width // self._heads
        table: Tensor | None = None
        for number, layer in enumerate(self._layers):
            keys, values = layer.keys_values(states).view(shape).permute(2, 0, 3, 1, 4)
            for at, plane in enumerate(self._kept.planes(keys, values)):
                if table is None:
                    table = plane.new_empty(2 * len(self._layers), *plane.shape)
                table[2 * number + at] = plane
        assert table is not None, "a decoder has layers"
        slots: list[int] = encoded.mask_BT.sum(1).tolist()
        return Cross(table, slots, length, self._kept)

    def probe(self, rows: int) -> Inputs:
        """Small sources, and states that are made up: a check needs no encoder's work."""
        made, lengths = self._kind.made_up(rows)
        states, mask = made_up_states(lengths, self._width)
        return made._replace(encoded=Encoded(states.to(self._dtype), mask))


class BartRunner(LeanRunner):
    """Runs a model's weights on one CPU device; `shares` leaves an encoder that it has unused."""

    def __init__(
        self, model: PreTrainedModel, packed: bool, shares: bool = False, int8: bool = False
    ) -> None:
        config, decoder = model.config, model.get_decoder()
        family = FAMILIES[config.model_type]
        self.name = type(model).__name__
        self.packed = packed
        self.context: int = getattr(config, family.context)
        self.heads: int = config.decoder_attention_heads
        self.width: int = config.d_model
        self._embedding = Embedding.of(decoder, family, family.norms_tokens)
        weight = self._embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        like = torch.empty(0, self.width, dtype=self.dtype, device=self.device)
        self._places = positions_of(decoder.embed_positions, self.context, like)
        self.kv_heads, self.size, self.eps = self.heads, self.width // self.heads, 0.0
        self._scaling = self.size**-0.5
        self._attention, self.rounding, self.means = self._choose()
        last = norm_in(decoder, "layer_norm")
        self._first, parts = joints(decoder.layers, _NORMS, last, family.norms_ahead)
        each = zip(decoder.layers, parts, strict=True)
        self._layers = [
            _layer(layer, joined, packed, int8, family.long_sources) for layer, joined in each
        ]
        self.layers = len(self._layers)
        head: torch.nn.Linear = model.get_output_embeddings()
        self.vocab_size: int = weight.shape[0]  # that it reads: a draft may write fewer of them
        self._head = product(head.weight, _bias(model, head), packed, int8, True, compiled=True)
        self._act = ACT2FN[config.activation_function]
        #: All layers as one call; None where their parts run one by one.
        self.whole = self._joined(config.activation_function, family.norms_ahead)
        encoder = None
        if config.is_encoder_decoder and not shares:
            encoder = self._encoder(model.get_encoder(), family, packed)
        self.reader: EncoderAdapter = BartReader(
            config, self._layers, encoder, self._kind(config), self.dtype, KeyValueLayout.best(like)
        )

    def _encoder(self, module: "BartEncoder", family: Family, packed: bool) -> Encoder:
        return TextEncoder(module, family, packed)

    def _kind(self, config: PretrainedConfig) -> InputModality:
        return TextInput(config)

    def _choose(self) -> "tuple[layer_kernels.CpuKernels | _Operators, BatchInvariance, str]":
        """What attends to the text, what is left to look after, and what it is called."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        unfit = layer_kernels.cannot_attend(self, like)
        if unfit is None:
            whole = like.new_ones(self.context, self.size)  # places turn nothing
            attention = layer_kernels.CpuKernels(self, whole, torch.zeros_like(whole))
            return attention, layer_kernels.ROUNDING, "a lean decoder, compiled"
        torchs, rounding = steady(unscaled, self.heads, 1, self.size, like)
        said = f"a lean decoder, torch's operators: {unfit}"
        return _Operators(self, torchs), rounding, said

    def _joined(self, act: str, ahead: bool) -> decoder_layers.DecoderLayers | None:
        """All layers as one call; None where their parts run one by one."""
        each = [(one.products(), one.joints()) for one in self._layers]
        norms = [joint.norm for _, joints in each for joint in joints]
        unfit = decoder_layers.unsupported_reason([p for some, _ in each for p in some], act)
        kernels = isinstance(self._attention, layer_kernels.CpuKernels)
        if unfit or not kernels or self.dtype is not torch.float32 or None in norms:
            return None
        parts = [
            decoder_layers.LayerParts(
                [p for p in some if isinstance(p, PackedLinear)],
                [joint.norm for joint in joints if joint.norm is not None],
            )
            for some, joints in each
        ]
        return decoder_layers.DecoderLayers(parts, act, ahead, self._scaling)

    def __call__(
        self, cache: SlotCache, nodes: Nodes, last: int | None, aux_layers: tuple[int, ...]
    ) -> Output:
        """Logits of the (last) nodes, and their states at the aux layers."""
        tokens_BQ, positions_BQ, *_ = nodes
        cross = cache.inputs
        assert isinstance(cross, Cross), "rows without a source"
        state = self._embedding(tokens_BQ, self._places[positions_BQ])
        x = state if self._first is None else self._first(state)
        call, sources = self._attention.open(nodes), cross.compiled()
        if self.whole is None or sources is None or not isinstance(call, KernelCall):
            x, kept = self._one_by_one(call, cache, state, x, aux_layers)
        else:
            kept = self.whole(call, cache, sources, state, x, aux_layers)
        if last is not None:
            x = x[:, -last:]
        kept[-1] = x
        few = slice(-x.shape[1], None)
        return Output(self._head(x), tuple(kept[layer][:, few] for layer in aux_layers))

    def _one_by_one(
        self,
        call: "KernelCall | _OperatorsCall",
        cache: SlotCache,
        state: Tensor,
        x: Tensor,
        aux_layers: tuple[int, ...],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What the output layer reads, and the states at the aux layers."""
        cross, kept = cache.inputs, dict[int, Tensor]()
        assert isinstance(cross, Cross)
        for number, (layer, store) in enumerate(zip(self._layers, cache.layers, strict=True)):
            if number in aux_layers:
                kept[number] = state
            state, x = layer.read_text(state, layer.out(call.attend(layer.qkv(x), store)))
            q = layer.query(x).view(*x.shape[:2], self.heads, self.size)
            more = layer.cross_out(cross.attend(number, q, self._scaling))
            state, x = layer.read_source(state, more)
            state, x = layer.after(state, layer.down(self._act(layer.up(x))))
        return x, kept


def _bias(model: PreTrainedModel, head: torch.nn.Linear) -> Tensor | None:
    """What is added to logits: the output layer's, and a bias that some families keep apart."""
    own = read(model, "final_logits_bias", Tensor)
    if own is None or not bool(own.any()):
        return head.bias
    apart = own[0].to(head.weight.dtype)
    return apart if head.bias is None else head.bias + apart


class _Operators:
    """Attention to the text by torch's operators."""

    def __init__(self, shape: BartRunner, attention: BatchInvariantAttention) -> None:
        self.shape, self.attention, self.scaling = shape, attention, shape.size**-0.5

    def open(self, nodes: Nodes) -> "_OperatorsCall":
        """The mask of a call, once for all layers."""
        dtype = self.shape.dtype
        return _OperatorsCall(self, self.attention.mask(additive(nodes.visible_BQW, dtype)))


class _OperatorsCall(NamedTuple):
    of: _Operators
    mask: Tensor

    def attend(self, qkv: Tensor, store: SlotLayer) -> Tensor:
        """Attention [B, Q, H E] of qkv [B, Q, 3 H E], whose keys and values are stored."""
        batch, queries, wide = qkv.shape
        heads, size = self.of.shape.heads, self.of.shape.size
        q, k, v = qkv.view(batch, queries, 3, heads, size).permute(2, 0, 3, 1, 4)
        keys, values = store.update(k, v)
        x = self.of.attention(q * self.of.scaling, keys, values, self.mask)
        return x.transpose(1, 2).reshape(batch, queries, wide // 3)
