"""The unmodified forward of a transformers model as a runner: any device, eager and sdpa attention.

Positions, slots and 4-D additive masks are given; everything else is the model's own. Windows and
chunks are cut by position, never by slot: siblings of a tree share a position. The few families
that derive something from the cache's length have a subclass each (alibi.py, gpt_neo.py).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import ModelOutput, output_capturing

from outrider.errors import UnsupportedModel
from outrider.models import (
    attention,
    batch_invariance,
    foreign_layers,
    linear,
    placement,
    weight_only,
)
from outrider.models.batch_invariance import BatchInvariance, PaddingPolicy
from outrider.models.cache import SlotCache
from outrider.models.config import decoder_of, found, read, vocabulary_of
from outrider.models.decoder import EncoderAdapter, additive
from outrider.models.model_lock import CONFIGURATION, evaluating, mine, parts_of, sharded
from outrider.models.row_padding import FUSED, RowPadding
from outrider.types import Inputs, Nodes, Output

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
#: Types of layers that choose what they attend to; the second before transformers 5.18.
INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})
_REACH = ("sliding_window", "attention_chunk_size")

#: For all layers, or for each type of layer; None for those without one.
Mask: TypeAlias = Tensor | dict[str, Tensor | None] | None


class ForwardCall(NamedTuple):
    """What a model's own forward is asked."""

    tokens_BQ: Tensor
    positions_BQ: Tensor
    mask: Mask
    last: int | None  #: of how many nodes logits are wanted; None: of all
    aux_layers: tuple[int, ...]  #: the layers behind which states are


#: Whether models take a list of layers, with the numbers that all their states have.
_PICKS_LAYERS = found(output_capturing, "resolve_hidden_states_indices") is not None

_SIZE = 64  #: of a head, where a configuration does not say
UNLIMITED = 1 << 30  #: a model that says nothing of its context


def steady_context(config: PretrainedConfig) -> int:
    """Positions at which the rotary frequencies do not depend on the length of the text.

    `longrope` and `dynamic` switch frequencies for a whole call once a position passes the original
    length, so a block across it would score its first nodes otherwise than plain decoding does.
    """
    rope = read(config, "rope_parameters", dict) or {}
    settings = [rope, *(s for s in rope.values() if isinstance(s, dict))]
    if not any(s.get("rope_type") in ("longrope", "dynamic") for s in settings):
        return UNLIMITED
    original = [s.get("original_max_position_embeddings") for s in settings]
    original.append(read(config, "original_max_position_embeddings", int))
    original.append(read(config, "max_position_embeddings", int))
    return min(int(n) for n in original if n)


def layers_asked(aux_layers: tuple[int, ...]) -> dict[str, object]:
    """The argument that asks a model for its states after these layers, if any is wanted.

    Where a list does not count the embeddings as the first (transformers 5.17), all are asked for.
    """
    layers = [layer for layer in aux_layers if layer >= 0]
    return {"output_hidden_states": layers if _PICKS_LAYERS else True} if layers else {}


def filled_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    """A layer of transformers' own caches over keys and values, of which nothing is copied."""
    layer = DynamicLayer()
    layer.keys, layer.values, layer.is_initialized = keys, values, True
    return layer


def _arguments(model: PreTrainedModel) -> frozenset[str]:
    """What a model's forward takes by name: also positions, if it hands on what it does not know
    to a decoder that takes them."""
    takes = inspect.signature(model.forward).parameters
    names = set(takes)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values()):
        inner = found(model.get_decoder(), "forward")
        names |= {"position_ids"} & set(inspect.signature(inner).parameters if inner else ())
    return frozenset(names)


def _looks_up(model: PreTrainedModel) -> bool:
    """Whether layers look the function up that attends, and it is torch's."""
    backend: bool = model._supports_attention_backend
    return backend and decoder_of(model.config)._attn_implementation == FUSED


class TransformersRunner:
    """Runs a decoder through `ForCausalLM.forward`, so soft-caps and logit scales stay in."""

    trees = True  #: whether nodes may branch
    #: where a text's first token stands, of the positions that it is given; None: behind padding's
    first_position: int | None = 0
    packed = False
    recurrent = False
    limit = (0.0, float("inf"))
    means = "the model's own forward"
    reader: EncoderAdapter | None = None
    tracks = False  #: whether it reads the position of every cache slot
    takes_cache = "past_key_values"  #: the argument that takes a cache
    returns_cache = True  #: whether it is asked to return the cache, which it takes anyway
    states = "hidden_states"  #: the field of an output with the states after each layer
    #: fields of a configuration that say how many positions there are, the first that is there
    reaches: tuple[str, ...] = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.name = model, type(model).__name__
        if model.dtype == torch.float32 and foreign_layers.compute_in_float32(model):
            self.means = f"{self.means}, its 4-bit layers in float32"
        #: where it runs, if its weights are fetched for each call
        self._placed = placement.device_of(model) if placement.offloaded(model) else None
        if self._placed is not None:
            self.means = f"{self.means}, weights fetched for each call"
        self._parts = parts_of(model)
        if self._parts.compiled:
            self.means = f"{self.means}, not as torch.compile made it"
        self.config = decoder_of(model.config)
        self.vocab_size: int = vocabulary_of(model.config)
        with CONFIGURATION:  # another thread may be narrowing it for a check
            self._reach = {name: read(self.config, name, int) for name in _REACH}
        sizes = (read(self.config, name, int) for name in self.reaches)
        self.context = next((int(n) for n in sizes if isinstance(n, int) and n > 0), UNLIMITED)
        self.context = min(self.context, steady_context(self.config))
        first = self.first_position
        self._offset = int(self.config.pad_token_id) + 1 if first is None else first
        self.context -= self._offset
        self._takes = _arguments(model)
        kinds = read(self.config, "layer_types", (list, tuple))
        self._kinds: tuple[str, ...] | None = tuple(sorted(set(kinds))) if kinds else None
        self.tracks = type(self).tracks or self._cuts()
        self.layers = self._depth()
        #: of calls whose rows have to be alike
        self._padding: Callable[[int], AbstractContextManager[object]] = nullcontext
        self.rounding = self._rounding() if self.trees else BatchInvariance()

    def _rounding(self) -> BatchInvariance:
        """Found for attention of the decoder's shape, and for linear layers that are sharded.

        Others take care of themselves (`parts`), and so do calls where products round what they are
        given (`row_padding`). What the model does otherwise is not looked at.
        """
        rounds = weight_only.rounds_inputs(self.model.parameters())
        if not rounds and not batch_invariance.applies_to(self.dtype, self.device):
            return BatchInvariance()
        heads = read(self.config, "num_attention_heads", int) or batch_invariance.HEADS
        wide = read(self.config, "hidden_size", int)
        size = read(self.config, "head_dim", int) or (wide or _SIZE * heads) // heads
        torchs = self.model.config._attn_implementation == FUSED
        if rounds:
            self._padding = RowPadding()
            asked = read(self.config, "num_key_value_heads", int) or heads
            forms = [(attention.fused, asked)] if torchs else []
            if not _looks_up(self.model):
                forms.append((attention.unscaled, heads))
            each = [attention.tried(form, n, 1, size, self.dtype)[1] for form, n in forms]
            odd = {width for found in each for width in found.skipped or ()}
            return BatchInvariance(skipped=tuple(sorted(odd)))
        heads //= read(self.model, "_tp_size", int) or 1  # of a sharded model: its own
        found = batch_invariance.of_attention(
            attention.fused if torchs else attention.products, heads, size, self.dtype
        )
        rows = found.rows or PaddingPolicy()
        linears = [part for part in self._parts.modules if type(part) is torch.nn.Linear]
        for shape in {tuple(w.shape) for w in map(sharded, linears) if w is not None}:
            rows = rows.beside(linear.rows_of(shape, self.dtype, packed=False))
        return found._replace(rows=rows)

    def _depth(self) -> int:
        """How many layers write entries."""
        depth: int = self.config.num_hidden_layers
        return depth

    @property
    def device(self) -> torch.device:
        return self._placed or torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    def __call__(
        self, cache: SlotCache, nodes: Nodes, last: int | None, aux_layers: tuple[int, ...]
    ) -> Output:
        tokens_BQ, positions_BQ, _, visible_BQW, _ = nodes
        keys_BW = cache.place(positions_BQ)[:, : cache.width] if self.tracks else None
        with self.around(keys_BW, positions_BQ, visible_BQW), self._padding(tokens_BQ.numel()):
            mask = self.masks(visible_BQW, positions_BQ, keys_BW)
            at_BQ = positions_BQ + self._offset if self._offset else positions_BQ
            return self._run(cache, ForwardCall(tokens_BQ, at_BQ, mask, last, aux_layers))

    def _run(self, cache: SlotCache, call: ForwardCall) -> Output:
        """The model's own forward. Without a mask it makes one from the cache's length."""
        aux_layers, last = call.aux_layers, call.last
        extra: dict[str, object] = layers_asked(aux_layers)
        if "position_ids" in self._takes:
            extra["position_ids"] = call.positions_BQ
        if "logits_to_keep" in self._takes:
            extra["logits_to_keep"] = last or 0
        extra |= self.beside(cache, call.tokens_BQ.shape[1])
        with evaluating(self.model, self._parts), self._listening(-1 in aux_layers) as states:
            output = self.model(
                input_ids=call.tokens_BQ,
                attention_mask=call.mask,
                use_cache=self.returns_cache,
                **{self.takes_cache: cache},
                **extra,
            )
        logits: Tensor = output.logits
        if last is not None:  # a model that takes `logits_to_keep` has cut them
            logits = logits[:, -last:]
        return Output(logits, self._aux_states(aux_layers, states, output, logits.shape[1]))

    def beside(self, cache: SlotCache, queries: int) -> dict[str, object]:
        """What a call is given besides, of what the cache keeps of the rows' inputs."""
        return {}

    def _aux_states(
        self, aux_layers: tuple[int, ...], heard: list[Tensor], output: ModelOutput, few: int
    ) -> tuple[Tensor, ...]:
        """The states of the last `few` nodes at each aux layer, of a call's inputs and results."""
        layers = output.get(self.states, ())
        if any(
            layer >= len(layers) or layers[layer].dim() != 3 for layer in aux_layers if layer >= 0
        ):
            raise UnsupportedModel(
                f"one state per token after layers {aux_layers} was asked for; got {self.name}, "
                f"which has {len(layers)} layers' states, not one per token each; use a drafter "
                "that does not read them"
            )
        return tuple((heard[0] if layer < 0 else layers[layer])[:, -few:] for layer in aux_layers)

    @contextmanager
    def _listening(self, wanted: bool, last: int | None = None) -> Iterator[list[Tensor]]:
        """Gathers what this thread's call hands to the output layer, if it is wanted.

        With `last` the layer is given the last states alone: for models that know no
        `logits_to_keep`.
        """
        states: list[Tensor] = []
        if not wanted and last is None:
            yield states
            return
        head: torch.nn.Module | None = self.model.get_output_embeddings()
        if head is None:
            raise UnsupportedModel(
                f"the states before the output layer were asked for; got {self.name}, which names "
                "no output layer; use a drafter that does not read them"
            )

        def note(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            cut = arguments[0] if last is None else arguments[0][:, -last:]
            if wanted:
                states.append(cut)
            return (cut, *arguments[1:])

        handle = head.register_forward_pre_hook(mine(note, lambda _, arguments: arguments))
        try:
            yield states
        finally:
            handle.remove()

    def masks(self, visible_BQW: Tensor, positions_BQ: Tensor, keys_BW: Tensor | None) -> Mask:
        """The mask the model asks for: one tensor, or one for each of its layer types."""
        window, chunk = self._reach["sliding_window"], self._reach["attention_chunk_size"]

        def cut(kind: str) -> Tensor:
            seen = visible_BQW
            if kind in (SLIDING, CHUNKED) and keys_BW is not None:
                here, there = positions_BQ[:, :, None], keys_BW[:, None]
                if kind == SLIDING and window:
                    seen = seen & (here - there < window)
                elif kind == CHUNKED and chunk:
                    seen = seen & (here // chunk == there // chunk)
            return additive(seen, self.dtype)

        if self._kinds is not None:
            return {kind: cut(kind) for kind in self._kinds}
        return cut(SLIDING if window else CHUNKED if chunk else FULL)

    def _cuts(self) -> bool:
        if self._kinds is not None:
            return not INDEXED.union({FULL}).issuperset(self._kinds)
        return any(self._reach.values())

    def around(
        self, keys_BW: Tensor | None, positions_BQ: Tensor, visible_BQW: Tensor
    ) -> AbstractContextManager[None]:
        """What an exceptional family changes for the time of one call."""
        return nullcontext()

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor | None:
        return self.logits_of(tokens_1Q)

    def logits_of(self, tokens_1Q: Tensor, **given: object) -> Tensor:
        """Logits of a whole sequence by the model's own forward, which is `given` this besides."""
        with evaluating(self.model, self._parts):
            logits: Tensor = self.model(input_ids=tokens_1Q, use_cache=False, **given).logits
        return logits

    def windows(self, tokens_1Q: Tensor) -> Mask:
        """The masks of a whole sequence each of whose tokens sees its window."""
        steps = torch.arange(tokens_1Q.shape[1], device=tokens_1Q.device)[None]
        return self.masks(steps[:, :, None] >= steps[:, None], steps, steps)

    @contextmanager
    def short_windows(self, size: int) -> Iterator[None]:
        """Windows and chunks of `size` for a check, so that a short text reaches past them.

        The model's own configuration is narrowed too, because `plain` reads it. Runners that exist
        already keep what they have read, and new ones wait until it is whole again.
        """
        with CONFIGURATION:
            before = {name: value for name, value in self._reach.items() if value}
            try:
                for name, value in before.items():
                    self._reach[name] = min(size, value)
                    setattr(self.config, name, self._reach[name])
                yield
            finally:
                for name, value in before.items():
                    self._reach[name] = value
                    setattr(self.config, name, value)


# The fallback where trees cannot be exact: one row at a time, a chain, the model's own mask.
#
# The cache is shown to the model with the exact length it expects, so whatever the model derives
# from that length is right. Rows have different lengths, so each is run alone.


class ChainRunner(TransformersRunner):
    """Runs each row's chain with `attention_mask=None`."""

    trees = False

    def __call__(
        self, cache: SlotCache, nodes: Nodes, last: int | None, aux_layers: tuple[int, ...]
    ) -> Output:
        """Logits of the (last) nodes of every row's chain, and their states at the aux layers."""
        slots_BQ = nodes.slots_BQ
        starts: list[int] = slots_BQ[:, 0].tolist()
        repeated: list[bool] = (slots_BQ[:, :1] == slots_BQ[:, 1:2]).any(1).tolist()
        rows: list[Output] = []
        skips: list[int] = []
        for row, start in enumerate(starts):
            # a one-token prompt re-feeds its only token twice, into one slot
            skip = int(repeated[row])
            tokens, positions, slots, _ = (t[row : row + 1, skip:] for t in nodes[:4])
            own = cache.row(row)
            own.begin(slots, start + slots.shape[1], start)
            assert own.size == cache.size, "a row sees more slots than the whole batch"
            output = self._run(own, ForwardCall(tokens, positions, None, None, aux_layers))
            if not cache.stacks:  # the first call of all has made the row's buffers
                cache.put([row], own)
            rows.append(output)
            skips.append(skip)
        wanted = slice(None if last is None else -last, None)

        def whole(parts: Iterable[Tensor]) -> Tensor:
            each = zip(parts, skips, strict=True)
            return torch.cat([torch.cat([x[:, :skip], x], 1) for x, skip in each])[:, wanted]

        states = zip(*(output.hidden for output in rows), strict=True)
        return Output(whole(output.logits_BQV for output in rows), tuple(map(whole, states)))
