"""The unmodified forward of a transformers encoder-decoder as a runner: any device and dtype.

Self-attention entries lie in the slots of our cache, cross-attention keys and values in what the
cache keeps of the sources. Positions go by argument where the family takes them, else by table.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models.cache import SlotCache
from outrider.models.config import decoder_of, read, states_width
from outrider.models.decoder import additive
from outrider.models.hf import ForwardCall, Mask, TransformersRunner, filled_layer, layers_asked
from outrider.models.model_lock import alone, evaluating, instead
from outrider.models.seq2seq.reader import EncoderReader, StatesReader
from outrider.types import Encoded, Inputs, Output

# What a decoder keeps of its sources: cross-attention keys and values, computed once per row.


class CrossAttentionCache:
    """Cross-attention keys and values of rows whose sources differ in length. A `RowStore`.

    Each plane is [max_rows, H, T, E], keys and values of a layer one after the other; the first
    `rows` are in use. Nothing here ever moves while a row decodes, and `take`, `put` and `narrow`
    copy the rows they name.
    """

    derived = frozenset({"_cache"})  #: what follows from the planes

    def __init__(self, planes: Sequence[Tensor], mask_BT: Tensor, wide: int) -> None:
        """`mask_BT` says which states are there; `wide` is the width of the encoder's states."""
        self.planes, self.wide = list(planes), wide
        self.rows = mask_BT.shape[0]
        self._mask = mask_BT
        self._ragged = not bool(mask_BT.all())  # a wait, once a source: no call asks the device
        self._seen: Tensor | None = None
        self._cache: DynamicCache | None = None

    @property
    def length(self) -> int:
        """T, the states of the longest source."""
        return self._mask.shape[1]

    def cache(self) -> DynamicCache:
        """The planes of the rows in use as transformers' cache; nothing is copied."""
        if self._cache is None:
            self._cache = DynamicCache()
            shown = [plane[: self.rows] for plane in self.planes]
            self._cache.layers += map(filled_layer, shown[::2], shown[1::2])
        return self._cache

    def seen(self, queries: int) -> Tensor | None:
        """Additive mask [B, 1, Q, T] of the states that are there; None if all are."""
        if not self._ragged:
            return None
        if self._seen is None:
            self._seen = additive(self._mask[: self.rows, None], self.planes[0].dtype)
        return self._seen.expand(-1, -1, queries, -1)

    def states(self) -> Tensor:
        """[B, T, E] in place of the encoder's states, which are not read again; takes no memory."""
        nothing = self.planes[0].new_zeros(1, 1, 1)
        return nothing.expand(self.rows, self.length, self.wide)

    def take(self, rows: Sequence[int]) -> "CrossAttentionCache":
        picked = [_picked(plane, rows) for plane in self.planes]
        return CrossAttentionCache(picked, _picked(self._mask, rows), self.wide)

    def put(self, into: Sequence[int], other: "CrossAttentionCache") -> Self:
        """The rows of `other` at these rows, in place; shorter sources are masked behind."""
        rows = max(self.rows, 1 + max(into, default=-1))
        old_rows, old_length = self._mask.shape
        more = max(other.length - old_length, 0)
        free = 0 if rows <= old_rows else max(rows, 2 * old_rows) - old_rows
        if more or free:
            self.planes = [pad(plane, (0, 0, 0, more, 0, 0, 0, free)) for plane in self.planes]
            self._mask = pad(self._mask, (0, more, 0, free))
        used = slice(0, other.length)
        for mine, theirs in zip(self.planes, other.planes, strict=True):
            for row, at in enumerate(into):
                mine[at, :, used].copy_(theirs[row])
        for row, at in enumerate(into):
            self._mask[at] = False
            self._mask[at, used] = other._mask[row]
        shorter = other.length < self.length
        self._ragged = self._ragged or other._ragged or shorter or (more > 0 and self.rows > 0)
        return self._show(rows)

    def narrow(self, rows: int) -> Self:
        return self._show(rows)

    def derive(self) -> None:
        """Other planes of the same shapes have taken the places of its own."""
        self._cache = None

    def _show(self, rows: int) -> Self:
        self.rows, self._seen, self._cache = rows, None, None
        return self


def _picked(plane: Tensor, rows: Sequence[int]) -> Tensor:
    """Copies of these rows, by numbers known on the host."""
    return torch.cat([plane[:0], *(plane[row : row + 1] for row in rows)])


# Positions of families that count cache entries: their own tables, read by position.
#
# The BART kin add an embedding by the cache's length, the T5 kin a bias by slot. Both are wrong on
# a tree, where siblings share a position. Each is asked once, on a plain chain, what it answers
# there; for the time of a call the answers are looked up by position instead. Learned or sinusoidal
# tables, offsets and buckets so need no knowledge of the family. The tables are copies: they are
# made when the runner is.

Forward = Callable[..., Any]


class ByPosition:
    """An embedding of positions, `embed_positions` in the BART kin."""

    name, by_key = "forward", False

    def __init__(self, owner: torch.nn.Module, most: int, like: Tensor) -> None:
        """`most` positions; `like` has the width, dtype and device of the decoder's states."""
        self.owner = owner
        self.table_PE = positions_of(owner, most, like)

    def at(self, positions_BQ: Tensor, keys_BW: Tensor | None) -> Callable[..., Tensor]:
        """Rows of the table, whatever the module is asked."""
        rows = self.table_PE[positions_BQ]
        return lambda *_, **__: rows


class ByDistance:
    """A bias by the distance from query to key, `compute_bias` in the T5 kin."""

    name, by_key = "compute_bias", True

    def __init__(self, owner: torch.nn.Module) -> None:
        self.owner = owner
        far = read(owner, "relative_attention_max_distance", int)
        assert far, f"{type(owner).__name__} names no distance from which on its bias is constant"
        chain = owner.compute_bias(far + 1, far + 1)  # type: ignore[operator]
        self.table_DH: Tensor = chain[0, :, -1].flip(-1).T.contiguous()  # the last query's keys

    def at(self, positions_BQ: Tensor, keys_BW: Tensor | None) -> Callable[..., Tensor]:
        """The bias [B, H, Q, W] by position. What lies ahead is masked anyway."""
        assert keys_BW is not None
        apart = (positions_BQ[:, :, None] - keys_BW[:, None]).clamp(0, len(self.table_DH) - 1)
        bias = self.table_DH[apart].permute(0, 3, 1, 2)
        return lambda *_, **__: bias


#: A function of a module that is replaced for the time of one call: of its `owner`, by `name`; `at`
#: makes what stands in for it, `by_key` of the positions of the keys, too.
Patch: TypeAlias = ByPosition | ByDistance

#: Types of decoders whose first token stands at `pad_token_id + 1`.
BEHIND_PADDING = frozenset({"roberta", "xlm-roberta"})

#: Types whose decoder looks at its mask in calls of several tokens alone: a lone token is taken to
#: see all entries, and a cache with slots that are empty or another branch's has more.
UNMASKED_ALONE = frozenset({"led"})


def masked_alone(decoder: torch.nn.Module, mask: Tensor) -> list[tuple[torch.nn.Module, Forward]]:
    """Self-attention modules of such a decoder, each with a forward that is given the mask."""

    def seeing(owner: torch.nn.Module) -> Forward:
        own = partial(type(owner).forward, owner)
        return lambda *given, **named: own(*given, **(named | {"attention_mask": mask}))

    owners = [one for name, one in decoder.named_modules() if name.split(".")[-1] == "self_attn"]
    return [(owner, seeing(owner)) for owner in owners]


def embeddings(decoder: torch.nn.Module, most: int, like: Tensor) -> list[Patch]:
    """The tables of positions that a decoder adds by the length of its cache."""
    named = decoder.named_modules()
    owners = [module for name, module in named if name.split(".")[-1] == "embed_positions"]
    return [ByPosition(owner, most, like) for owner in owners]


def biases(decoder: torch.nn.Module) -> list[Patch]:
    """The position biases that a decoder computes by slot."""
    owners = [m for m in decoder.modules() if read(m, "has_relative_attention_bias", bool)]
    return [ByDistance(owner) for owner in owners]


def positions_of(owner: torch.nn.Module, most: int, like: Tensor) -> Tensor:
    """What a position embedding answers on a chain of `most` tokens: [P, E]."""
    first = list(inspect.signature(type(owner).forward).parameters)[1]
    if first == "input_ids_shape":
        answer = owner(torch.Size((1, most)))
    elif first == "inputs_embeds":
        answer = owner(like.new_zeros(1, most, like.shape[-1]))
    else:
        padding = read(owner, "padding_idx", int) or 0
        answer = owner(torch.full((1, most), padding + 1, device=like.device))
    table: Tensor = answer if answer.dim() == 2 else answer[0]
    return table.detach().to(like.dtype).clone()


class Seq2SeqRunner(TransformersRunner):
    """Runs the decoder of an encoder-decoder through `ForConditionalGeneration.forward`."""

    # not `n_positions`: T5 checkpoints name it, but its bias reaches any distance
    reaches = (
        "max_target_positions",
        "max_decoder_position_embeddings",
        "max_text_positions",
        "max_position_embeddings",
    )
    prefix = "decoder_"  #: of the arguments that are the text's, not the source's
    states = "decoder_hidden_states"
    encoder: type[EncoderReader] = EncoderReader  #: what reads the sources

    def __init__(self, model: PreTrainedModel, shares: bool = False) -> None:
        """`shares` leaves the model's encoder unused: states come from the target's."""
        if decoder_of(model.config).model_type in BEHIND_PADDING:
            self.first_position = None
        super().__init__(model)
        self._decoder: torch.nn.Module = model.get_decoder()
        self._named = self._takes_positions()
        with torch.no_grad():
            self._patches = self._tables()
        self.tracks = self.tracks or any(patch.by_key for patch in self._patches)
        wide, kind = states_width(model.config), StatesReader if shares else self.encoder
        self.reader: StatesReader = kind(model, self.crossed, wide)

    def _takes_positions(self) -> bool:
        """Whether positions go by argument: by name, or by prefix to a decoder of its own kind."""
        if f"{self.prefix}position_ids" in self._takes:
            return True
        inner = inspect.signature(self._decoder.forward).parameters
        return self.config is not self.model.config and "position_ids" in inner

    def _tables(self) -> list[Patch]:
        if self._named:
            return []
        wide = int(self.config.hidden_size)
        like = torch.empty(0, wide, dtype=self.dtype, device=self.device)
        return [*embeddings(self._decoder, self.context, like), *biases(self._decoder)]

    def _depth(self) -> int:
        """Layers that write entries, counted in a call.

        Configurations have five names for their number, of which two mean the encoder's.
        """
        nothing = torch.zeros(
            1, 1, states_width(self.model.config), dtype=self.dtype, device=self.device
        )
        past = self._first(Encoded(nothing, nothing.new_ones(1, 1, dtype=torch.bool)))
        own, cross = len(past.self_attention_cache.layers), len(past.cross_attention_cache.layers)
        if own != cross or not own:
            raise UnsupportedModel(
                f"an encoder-decoder keeps as many layers of cross attention as of its own; got "
                f"{self.name}, which keeps {cross} and {own}; use another model"
            )
        return own

    def _first(self, encoded: Encoded) -> EncoderDecoderCache:
        """A call that fills the cross-attention cache; its one token is of no account."""
        states, mask = encoded
        past = EncoderDecoderCache(DynamicCache(), DynamicCache())
        tokens = torch.zeros(len(states), 1, dtype=torch.int64, device=states.device)
        with torch.no_grad(), evaluating(self.model, self._parts):
            self._ask(tokens, past, self.given(states.to(self.dtype), mask.long()))
        return past

    def crossed(self, encoded: Encoded) -> CrossAttentionCache:
        """What a cache keeps of these states: cross-attention keys and values."""
        layers = self._first(encoded).cross_attention_cache.layers
        planes = [plane.contiguous() for layer in layers for plane in (layer.keys, layer.values)]
        return CrossAttentionCache(planes, encoded.mask_BT, encoded.states_BTE.shape[-1])

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """The arguments that hand on states [B, T, E] and which of them are there.

        `seen` is [B, T], or an additive mask [B, 1, Q, T]; None: all are.
        """
        source: dict[str, object] = {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}
        if seen is not None and "attention_mask" in self._takes:
            source["attention_mask"] = seen
        return source

    def _ask(
        self,
        tokens_BQ: Tensor,
        past: EncoderDecoderCache | None,
        source: dict[str, object],
        mask: Mask | None = None,
        positions_BQ: Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> ModelOutput:
        """What the model's own forward returns."""
        text: dict[str, object] = {"input_ids": tokens_BQ, "attention_mask": mask}
        if positions_BQ is not None and self._named:
            text["position_ids"] = positions_BQ
        named = {f"{self.prefix}{name}": value for name, value in text.items()}
        return self.model(
            **named,
            **source,
            **layers_asked(aux_layers),
            past_key_values=past,
            use_cache=past is not None,
        )

    def _run(self, cache: SlotCache, call: ForwardCall) -> Output:
        crossed = cache.inputs
        if not isinstance(crossed, CrossAttentionCache):
            raise ConfigurationError(
                f"{self.name} reads a source beside its text; got rows without one; give inputs"
            )
        past = EncoderDecoderCache(cache, crossed.cache())
        tokens_BQ, positions_BQ, mask, last, aux = call
        source = self.given(crossed.states(), crossed.seen(tokens_BQ.shape[1]))
        with evaluating(self.model, self._parts), self._listening(-1 in aux, last) as heard:
            output = self._ask(tokens_BQ, past, source, mask, positions_BQ, aux)
        logits: Tensor = output.logits
        return Output(logits, self._aux_states(aux, heard, output, logits.shape[1]))

    @contextmanager
    def around(
        self, keys_BW: Tensor | None, positions_BQ: Tensor, visible_BQW: Tensor
    ) -> Iterator[None]:
        """Positions by table for the time of a call, where the family counts cache entries; and the
        mask of a lone token, where the family leaves it out."""
        with ExitStack() as swaps:
            if positions_BQ.shape[1] == 1 and self.model.config.model_type in UNMASKED_ALONE:
                mask = additive(visible_BQW, self.dtype)
                for owner, forward in masked_alone(self._decoder, mask):
                    swaps.enter_context(instead(alone(self.model), owner, "forward", forward))
            for patch in self._patches:
                answer = patch.at(positions_BQ, keys_BW)
                swaps.enter_context(instead(alone(self.model), patch.owner, patch.name, answer))
            yield

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor:
        """Logits of a whole text by the model's own means: no cache, no masks or tables of ours.

        The encoder runs unless its states are there already.
        """
        assert inputs is not None, f"{self.name} reads sources; got a text alone"
        if inputs.encoded is not None:
            source = self.given(inputs.encoded.states_BTE, inputs.encoded.mask_BT.long())
        else:
            assert isinstance(self.reader, EncoderReader), f"{self.name} has no encoder in use"
            source = {**self.reader.asked(inputs)}
        with evaluating(self.model, self._parts):
            output = self._ask(tokens_1Q, None, source, torch.ones_like(tokens_1Q))
        logits: Tensor = output.logits
        return logits
