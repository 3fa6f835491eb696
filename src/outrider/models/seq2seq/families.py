"""Encoder-decoders, and decoders of composites, that need more than slots and positions."""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.moonshine.modeling_moonshine import MoonshineEncoderModelOutput
from transformers.utils import ModelOutput

from outrider.models.config import encoder_of, read, states_width
from outrider.models.hf import FULL, SLIDING, Mask
from outrider.models.model_lock import alone, evaluating, parts_of
from outrider.models.seq2seq.input_modality import (
    TextAndPixelInput,
    TextInput,
    by_length,
    convolved,
)
from outrider.models.seq2seq.reader import EncoderReader
from outrider.models.seq2seq.runner import Seq2SeqRunner
from outrider.types import Inputs


class StatesRunner(Seq2SeqRunner):
    """Runs the decoder through `ForCausalLM.forward`, with states that another model made."""

    prefix, states = "", "hidden_states"

    def __init__(self, model: PreTrainedModel, shares: bool = True) -> None:
        super().__init__(model, shares=True)

    def _takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(self._decoder.forward).parameters

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """States by the name that the family has for them."""
        name = "encoder_outputs" if "encoder_outputs" in self._takes else "encoder_hidden_states"
        source: dict[str, object] = {name: states}
        if seen is not None and "encoder_attention_mask" in self._takes:
            source["encoder_attention_mask"] = seen
        return source


@contextmanager
def _as_configured(model: PreTrainedModel) -> Iterator[None]:
    """The attention that the configuration names, before and after; one thread at a time."""
    with alone(model):
        encoder = model.get_encoder()
        encoder.set_attention_type(encoder.config.attention_type)
        try:
            yield
        finally:
            encoder.set_attention_type(encoder.config.attention_type)


class _Unpadded(TextInput):
    """Texts read in groups of one length."""

    def groups(self, inputs: Inputs) -> Sequence[Sequence[int]]:
        """Rows of one length."""
        return by_length(inputs)


class _Reader(EncoderReader):
    def modality(self) -> _Unpadded:
        """Texts of one length."""
        return _Unpadded(encoder_of(self.model.config))

    def states(self, inputs: Inputs) -> Tensor:
        """The encoder's states of rows of one length."""
        with _as_configured(self.model):
            return super().states(inputs)


class BigBirdPegasusRunner(Seq2SeqRunner):
    """BigBird-Pegasus: an encoder whose sparse attention depends on the length of the whole call.

    It looks at the first and last blocks of what it is given, padding included, and a short source
    switches it to full attention for good. Here every source is read at its own length, with the
    attention that the configuration names.
    """

    encoder = _Reader

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor:
        with _as_configured(self.model):
            return super().plain(tokens_1Q, inputs)


class MaskedStatesRunner(Seq2SeqRunner):
    """Moonshine, Canary, Cohere ASR: the mask goes with the states."""

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """The encoder's own output object."""
        outputs = MoonshineEncoderModelOutput(last_hidden_state=states, attention_mask=seen)
        return {"encoder_outputs": outputs}


class _ImageTextReader(EncoderReader):
    """An encoder of text with an image's states in it."""

    def modality(self) -> TextAndPixelInput:
        """Florence-2's: made-up images have two by two states and their mean."""
        config = self.model.config
        image = config.vision_config
        side = 2 * math.prod(image.patch_stride)
        shape = (read(image, "in_channels", int) or 3, side, side)
        return TextAndPixelInput(encoder_of(config), config.image_token_id, shape, 5)

    def states(self, inputs: Inputs) -> Tensor:
        """What the model makes of text and image, by a call that decodes one token of no account"""
        asked = self.asked(inputs)
        first = asked["input_ids"].new_zeros(len(inputs.mask_BS), 1)
        with evaluating(self.model, self._parts):
            output = self.model(**asked, decoder_input_ids=first, use_cache=False)
        states: Tensor = output.encoder_last_hidden_state
        return states


class Florence2Runner(Seq2SeqRunner):
    """Florence-2: BART's encoder reads a task with an image's states in it."""

    encoder = _ImageTextReader


class _GemmaReader(_ImageTextReader):
    def modality(self) -> TextAndPixelInput:
        """T5Gemma 2's: images of one size, or none."""
        config = self.model.config
        part = config.encoder
        image, token = part.vision_config, config.image_token_id
        shape = (int(image.num_channels), int(image.image_size), int(image.image_size))
        return TextAndPixelInput(
            encoder_of(config), token, shape, part.mm_tokens_per_image, text_alone=True
        )


class T5Gemma2Runner(Seq2SeqRunner):
    """T5Gemma 2: one attention over the text and the source, whose masks are laid side by side."""

    encoder = _GemmaReader

    def masks(self, visible_BQW: Tensor, positions_BQ: Tensor, keys_BW: Tensor | None) -> Mask:
        """A mask for each of its two types of layers, whether it has both or not."""
        made = super().masks(visible_BQW, positions_BQ, keys_BW)
        assert isinstance(made, dict)
        return {**dict.fromkeys((FULL, SLIDING), next(iter(made.values()))), **made}

    def _ask(
        self,
        tokens_BQ: Tensor,
        past: EncoderDecoderCache | None,
        source: dict[str, object],
        mask: Mask | None = None,
        positions_BQ: Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> ModelOutput:
        """Beside our additive masks the source's is one, too, where all of it is there."""
        if isinstance(mask, dict) and "attention_mask" not in source:
            states = source["encoder_outputs"].last_hidden_state  # type: ignore[attr-defined]
            rows, queries = tokens_BQ.shape
            source = source | {
                "attention_mask": states.new_zeros(rows, 1, queries, states.shape[1])
            }
        return super()._ask(tokens_BQ, past, source, mask, positions_BQ, aux_layers)


class _ProjectedReader(EncoderReader):
    def states(self, inputs: Inputs) -> Tensor:
        """What the encoder's last step makes of its states for the decoder."""
        with evaluating(self.model, self._parts):
            states: Tensor = self.model.get_encoder()(**self.asked(inputs)).pooler_output
        return states


class PPFormulaNetRunner(Seq2SeqRunner):
    """PP-FormulaNet: a decoder that attends to states which a projection has made narrower."""

    encoder = _ProjectedReader

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """The encoder's own output object."""
        outputs = BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=states)
        return {"encoder_outputs": outputs}


class _WindowedReader(EncoderReader):
    def asked(self, inputs: Inputs) -> dict[str, Tensor]:
        """Samples, and that all are there: without a mask its encoder has no windows."""
        asked = super().asked(inputs)
        return asked | {"attention_mask": torch.ones_like(asked["input_values"], dtype=torch.long)}


class MoonshineStreamingRunner(MaskedStatesRunner):
    """Moonshine's streaming form: an encoder of windows; its decoder writes to the states."""

    encoder = _WindowedReader

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """A copy of the states: the decoder adds positions to what it is given, in place."""
        return super().given(states.clone(), seen)


def _counted(seen: Tensor) -> Tensor:
    """[B]: how many states are there, of a mask [B, T] or an additive one [B, 1, Q, T]."""
    return (seen[:, 0, 0] == 0 if seen.dim() == 4 else seen).sum(1)


class SeamlessRunner(Seq2SeqRunner):
    """SeamlessM4T, from text or from speech: states of speech are said in frames."""

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """As many frames as its adaptor makes these states of."""
        if seen is None or self.model.main_input_name == "input_ids":
            return super().given(states, seen)
        source, config = super().given(states, None), self.model.config
        stride, kernel = int(config.adaptor_stride), int(config.adaptor_kernel_size)
        frames = (_counted(seen) - 1) * stride + kernel - 2 * (kernel // 2)
        steps = torch.arange((states.shape[1] - 1) * stride + kernel, device=seen.device)
        source["attention_mask"] = (steps < frames[:, None]).long()
        return source


class SpeechToTextRunner(Seq2SeqRunner):
    """Speech2Text: states are said in frames, of which each convolution leaves every second."""

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """As many frames as make the states that are there."""
        source = super().given(states, None)
        if seen is not None:
            there = _counted(seen)
            leaves = 2 ** int(self.model.config.num_conv_layers)
            steps = torch.arange((states.shape[1] - 1) * leaves + 1, device=seen.device)
            source["attention_mask"] = (steps <= (there[:, None] - 1) * leaves).long()
        return source


class ConvolvedRunner(Seq2SeqRunner):
    """wav2vec 2.0 and its kin as encoders, SpeechT5: states of speech are said in samples."""

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """As many samples as make the states that are there: their number, which is what the
        family makes of a mask before it counts states."""
        source = super().given(states, None)
        if seen is not None:
            there = convolved(encoder_of(self.model.config), _counted(seen))
            source["attention_mask"] = there[:, None]
        return source


class _VisionReader(EncoderReader):
    def states(self, inputs: Inputs) -> Tensor:
        """The states of images."""
        with evaluating(self.model, self._parts):
            states: Tensor = self.model.vision_model(**self.asked(inputs)).last_hidden_state
        return states


class BlipRunner(StatesRunner):
    """BLIP: its forward wants the image at every call, so the decoder inside of it runs alone."""

    def __init__(self, model: PreTrainedModel, shares: bool = False) -> None:
        super().__init__(model.text_decoder)
        self.whole, self.name = model, type(model).__name__
        if not shares:
            self.reader = _VisionReader(model, self.crossed, states_width(model.config))

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor:
        if inputs is None or inputs.encoded is not None:
            return super().plain(tokens_1Q, inputs)
        assert isinstance(self.reader, EncoderReader), f"{self.name} has no encoder in use"
        asked = self.reader.asked(inputs)
        with evaluating(self.whole, parts_of(self.whole)):
            logits: Tensor = self.whole(input_ids=tokens_1Q, **asked).logits
        return logits
