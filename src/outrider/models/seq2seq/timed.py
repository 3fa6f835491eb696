"""Models that read each token together with the sound of its moment: Kyutai STT, Voxtral Realtime.

They are decoders of text alone, whose embedding of a token has that of a moment of the recording
added to it: the k-th token is read with the k-th moment, whatever the text is. So the recording is
heard ahead of the text, as an encoder hears it, and what is made of its moments is kept beside the
row; nodes of a tree find theirs by position. A text has as many tokens as the recording has
moments, which is the caller's to ask for: behind the last one its sound is heard again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import ConfigurationError
from outrider.models.cache import SlotCache
from outrider.models.hf import ForwardCall, TransformersRunner
from outrider.models.model_lock import alone, evaluating, instead
from outrider.models.seq2seq import moment
from outrider.models.seq2seq.input_modality import RecordingInput, there
from outrider.models.seq2seq.reader import EncoderReader
from outrider.models.seq2seq.runner import Seq2SeqRunner
from outrider.row_params import RowTable
from outrider.types import Encoded, Inputs, Output, RowStore

_SEED = 22  #: of made-up moments


@dataclass(frozen=True)
class MomentRows(RowTable):
    """What is read with rows' tokens: of each moment [B, T, E], and how many there are."""

    moments_BTE: Tensor
    count_B: Tensor


class TimedRunner(Seq2SeqRunner, ABC):
    """Runs such a model over trees, each node with the moment of its position."""

    prefix, states = "", "hidden_states"
    delay = 0  #: how many tokens stand ahead of the first moment

    def _depth(self) -> int:
        return TransformersRunner._depth(self)

    def crossed(self, encoded: Encoded) -> RowStore:  # type: ignore[override]
        """The moments, as they are."""
        return MomentRows(encoded.states_BTE, encoded.mask_BT.sum(1))

    def moments(self, rows: MomentRows, positions_BQ: Tensor) -> Tensor:
        """[B, Q, E]: the moment of each node."""
        at_BQ = (positions_BQ - self.delay).clamp(min=0).minimum(rows.count_B[:, None] - 1)
        each = torch.arange(len(at_BQ), device=at_BQ.device)[:, None]
        return rows.moments_BTE[each, at_BQ]

    @abstractmethod
    def listening(
        self, tokens_BQ: Tensor, positions_BQ: Tensor, rows: MomentRows
    ) -> AbstractContextManager[Tensor]:
        """What the model is given as ids, for the time of a call that hears these moments."""

    def _run(self, cache: SlotCache, call: ForwardCall) -> Output:
        rows = cache.inputs
        if not isinstance(rows, MomentRows):
            raise ConfigurationError(
                f"{self.name} reads a recording beside its text; got rows without one; give inputs"
            )
        with self.listening(call.tokens_BQ, call.positions_BQ, rows) as ids:
            return TransformersRunner._run(self, cache, call._replace(tokens_BQ=ids))

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor:
        """Logits of a whole text by the model's own forward; windows are those of `generate`."""
        assert inputs is not None, f"{self.name} reads sources; got a text alone"
        encoded = inputs.encoded or self.reader.encode(inputs)
        rows = MomentRows(encoded.states_BTE, encoded.mask_BT.sum(1))
        steps = torch.arange(tokens_1Q.shape[1], device=tokens_1Q.device)[None]
        mask = self.windows(tokens_1Q)
        with self.listening(tokens_1Q, steps, rows) as ids:
            return self.logits_of(ids, attention_mask=mask, **self.call_arguments)

    @property
    def call_arguments(self) -> dict[str, object]:
        """What each call is told besides."""
        return {}

    def beside(self, cache: SlotCache, queries: int) -> dict[str, object]:
        """The same for calls with a cache."""
        return self.call_arguments


class _CodeReader(EncoderReader):
    """Kyutai's: the codes of a recording, of each moment one in each of its codebooks."""

    def __init__(
        self, model: PreTrainedModel, keeper: Callable[[Encoded], RowStore], wide: int
    ) -> None:
        super().__init__(model, keeper, model.config.num_codebooks)

    def modality(self) -> RecordingInput:
        """Samples, a moment at a time."""
        frame = moment(self.model.config)
        return RecordingInput("input_values", frame, None, frame)

    def states(self, inputs: Inputs) -> Tensor:
        """Codes [B, T, K] by the model's codec, as `generate` has it hear them."""
        values = self.kind.asked(inputs, torch.float32)["input_values"][:, None]
        begun = torch.zeros(len(values), 1, dtype=torch.int64, device=values.device)
        with evaluating(self.model, self._parts):
            asked = {"input_values": values, "audio_window_size": None}
            _, _, made = self.model._prepare_model_inputs(begun, None, asked)
            names = ("encoder_past_key_values", "padding_cache")
            caches = {name: made[name] for name in names if name in made}
            codes: Tensor = self.model.codec_model.encode(values, **caches).audio_codes
        return codes.transpose(1, 2)

    def probe(self, rows: int) -> Inputs:
        """Noise, and codes of unequal lengths."""
        made, lengths = self.kind.made_up(rows)
        random = torch.Generator().manual_seed(_SEED)
        shape = rows, max(lengths), self.model.config.num_codebooks
        most = self.model.config.codebook_vocab_size - 1
        codes = torch.randint(most, shape, generator=random, device="cpu").to(self.model.device)
        moved = Inputs(None, made.features, made.mask_BS.to(self.model.device))
        return moved._replace(encoded=Encoded(codes, there(lengths).to(self.model.device)))


class KyutaiRunner(TimedRunner):
    """Kyutai's speech to text: a token's ids are its own and the codes of its moment."""

    encoder = _CodeReader
    delay = 1

    @contextmanager
    def listening(
        self, tokens_BQ: Tensor, positions_BQ: Tensor, rows: MomentRows
    ) -> Iterator[Tensor]:
        """Ids [B, Q, 1 + K]; the first token stands ahead of all sound."""
        codes = self.moments(rows, positions_BQ)
        first = positions_BQ[..., None] <= 0
        codes = codes.masked_fill(first, self.config.audio_bos_token_id)
        yield torch.cat([tokens_BQ[..., None], codes], -1)


class _MomentReader(EncoderReader):
    """Voxtral's: states of a recording, projected to the width of the text's."""

    def __init__(
        self, model: PreTrainedModel, keeper: Callable[[Encoded], RowStore], wide: int
    ) -> None:
        super().__init__(model, keeper, model.config.text_config.hidden_size)

    def modality(self) -> RecordingInput:
        """Frames, a moment at a time."""
        config, step = self.model.config, moment(self.model.config)
        return RecordingInput("input_features", step, config.audio_config.num_mel_bins, step)

    def states(self, inputs: Inputs) -> Tensor:
        """[B, T, E]: one for each token."""
        frames = self.asked(inputs)["input_features"].transpose(1, 2)
        with evaluating(self.model, self._parts):
            embedded = self.model.model.audio_tower.embedder(frames)
            made = self.model.get_audio_features(encoder_inputs_embeds=embedded)
        states: Tensor = made.pooler_output
        return states


class VoxtralRealtimeRunner(TimedRunner):
    """Voxtral Realtime: a token's embedding and its moment's are added up.

    It is told the delay that its configuration names.
    """

    encoder = _MomentReader

    @contextmanager
    def listening(
        self, tokens_BQ: Tensor, positions_BQ: Tensor, rows: MomentRows
    ) -> Iterator[Tensor]:
        """The text's ids; the model's own function returns the moments."""
        moments = self.moments(rows, positions_BQ)
        made = SimpleNamespace(pooler_output=moments, past_key_values=None, padding_cache=None)
        inner, name = self.model.model, "get_audio_features"
        with instead(alone(self.model), inner, name, lambda *_, **__: made):
            yield tokens_BQ

    @property
    def call_arguments(self) -> dict[str, object]:
        """A recording, which is there already, and the delay."""
        nothing = torch.zeros(0, dtype=torch.float32, device=self.device)
        delay = self.model.config.default_num_delay_tokens
        return {"encoder_inputs_embeds": nothing, "num_delay_tokens": delay}
