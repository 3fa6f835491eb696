"""The unmodified forward of a transformers encoder-decoder as a runner: any device and dtype.

Self-attention entries lie in the slots of our cache, cross-attention keys and values in what the
cache keeps of the sources. Positions go by argument where the family takes them, else by table.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models.cache import SlotCache
from outrider.models.config import states_width
from outrider.models.decoder import additive
from outrider.models.hf import Mask, TransformersRunner, layers_asked
from outrider.models.model_lock import alone, evaluating, instead
from outrider.models.seq2seq.cross_attention_cache import CrossAttentionCache
from outrider.models.seq2seq.reader import EncoderReader, StatesReader
from outrider.models.seq2seq.tables import (
    UNMASKED_ALONE,
    Patch,
    biases,
    embeddings,
    masked_alone,
)
from outrider.types import Encoded, Inputs, Output


class Seq2SeqRunner(TransformersRunner):
    """Runs the decoder of an encoder-decoder through `ForConditionalGeneration.forward`."""

    # not `n_positions`: T5 checkpoints name it, but its bias reaches any distance
    reaches = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
    prefix = "decoder_"  #: of the arguments that are the text's, not the source's
    states = "decoder_hidden_states"
    encoder: type[EncoderReader] = EncoderReader  #: what reads the sources

    def __init__(self, model: PreTrainedModel, shares: bool = False) -> None:
        """`shares` leaves the model's encoder unused: states come from the target's."""
        super().__init__(model)
        self._decoder: torch.nn.Module = model.get_decoder()
        self._named = self._takes_positions()
        with torch.no_grad():
            self._patches = self._tables()
        self.tracks = self.tracks or any(patch.by_key for patch in self._patches)
        wide, kind = states_width(model.config), StatesReader if shares else self.encoder
        self.reader: EncoderReader | StatesReader = kind(model, self.crossed, wide)

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
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        """What the model's own forward returns."""
        text: dict[str, object] = {"input_ids": tokens_BQ, "attention_mask": mask}
        if positions_BQ is not None and self._named:
            text["position_ids"] = positions_BQ
        named = {f"{self.prefix}{name}": value for name, value in text.items()}
        return self.model(
            **named,
            **source,
            **layers_asked(taps),
            past_key_values=past,
            use_cache=past is not None,
        )

    def _run(
        self,
        cache: SlotCache,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        mask: Mask | None,
        last: int | None,
        taps: tuple[int, ...],
    ) -> Output:
        crossed = cache.inputs
        if not isinstance(crossed, CrossAttentionCache):
            raise ConfigurationError(
                f"{self.name} reads a source beside its text; got rows without one; give inputs"
            )
        past = EncoderDecoderCache(cache, crossed.cache())
        source = self.given(crossed.states(), crossed.seen(tokens_BQ.shape[1]))
        with evaluating(self.model, self._parts), self._listening(-1 in taps, last) as heard:
            output = self._ask(tokens_BQ, past, source, mask, positions_BQ, taps)
        logits: Tensor = output.logits
        return Output(logits, self._tapped(taps, heard, output, logits.shape[1]))

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
