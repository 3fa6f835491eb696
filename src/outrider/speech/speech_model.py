"""A Whisper model as transcription sees it: its words, its windows, what its encoder makes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, WhisperFeatureExtractor

from outrider.errors import ConfigurationError, usable_file
from outrider.models import pretrained
from outrider.models.config import is_speech, reads_sound_in_prompts
from outrider.models.prefill import causal, inference
from outrider.models.sources import ModelSource
from outrider.speech.vocabulary import Vocabulary
from outrider.types import Inputs, LanguageModel

EXTRACTOR = "preprocessor_config.json"


def check(target: ModelSource, language: str | None, task: str) -> None:
    """Refuse, before weights are read, a target that does not hear, or not this language or task.

    Raises ConfigurationError and its kin, as a transcription itself does.
    """
    name = str(target)
    if reads_sound_in_prompts(target.config):
        return  # asked in words, and refused in words
    if not is_speech(target.config):
        raise not_a_speech_model(name)
    vocabulary = Vocabulary.of(target.settings(), name)
    vocabulary.language(language, name)
    vocabulary.task(task, name)


def not_a_speech_model(name: str) -> ConfigurationError:
    """What is said of a model that is no Whisper."""
    return ConfigurationError(
        f"{name} does not turn speech into text; got a recording; load a Whisper model: "
        'outrider.load("openai/whisper-base")'
    )


@dataclass(frozen=True)
class WhisperModel:
    """What beside the engine is needed to turn sound into text.

    model            transformers' own model: its generation configuration, and word times
    tokenizer        transformers' tokenizer of it
    extractor        transformers' feature extractor of it
    draft_extractor  of a draft model whose encoder reads other features, else None
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    extractor: Any
    draft_extractor: Any = None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Its special tokens. Raises UnsupportedModel if its configuration does not name them."""
        settings = self.model.generation_config
        with usable_file(self.name, "generation_config.json"):
            return Vocabulary.of({} if settings is None else settings.to_dict(), self.name)

    @property
    def rate(self) -> int:
        """Samples per second."""
        return int(self.extractor.sampling_rate)

    @property
    def states(self) -> int:
        """Encoder states of a window."""
        return int(self.model.config.max_source_positions)

    @property
    def stride(self) -> int:
        """Frames of a state: its convolutions halve them."""
        return 2

    @property
    def frames(self) -> int:
        """Frames of a window."""
        return self.stride * self.states

    @property
    def context(self) -> int:
        """Positions of the decoder."""
        return int(self.model.config.max_target_positions)

    def seconds(self, frames: float) -> float:
        """Frames as seconds."""
        return round(frames * int(self.extractor.hop_length) / self.rate, 3)

    def text(self, tokens: tuple[int, ...] | list[int]) -> str:
        """What tokens say, special ones and timestamps left out."""
        plain = [token for token in tokens if token < self.vocabulary.end_id]
        said: str = self.tokenizer.decode(
            plain, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return said

    def encode(self, text: str) -> list[int]:
        """A text's tokens, without special ones."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def opened(
    name: str,
    given: str | Path | PreTrainedModel,
    model: PreTrainedModel,
    tokenizer: Any,
    drafts: Sequence[PretrainedConfig] = (),
) -> WhisperModel | None:
    """What is needed to transcribe with this model; None for one that is no Whisper.

    `given` says where it comes from, `drafts` are the configurations of its draft models. Raises
    ConfigurationError for a feature extractor that makes other windows than the model reads.
    """
    if not is_speech(model.config):
        return None
    mels = model.config.num_mel_bins
    other = next((d for d in drafts if is_speech(d) and d.num_mel_bins != mels), None)
    extractor = usual(model.config)
    if not isinstance(given, PreTrainedModel):
        with usable_file(name, EXTRACTOR):
            try:
                extractor = pretrained.read_feature_extractor(str(given))
            except OSError:
                if (Path(given) / EXTRACTOR).is_file():
                    raise  # it is there, and broken
            else:
                _check_windows(extractor, model.config)
    return WhisperModel(name, model, tokenizer, extractor, None if other is None else usual(other))


def _check_windows(extractor: Any, config: PretrainedConfig) -> None:
    """Refuse an extractor whose windows are not those that the model reads, by one of silence."""
    frames, rate = 2 * config.max_source_positions, int(extractor.sampling_rate)
    features = extractor(
        np.zeros(extractor.n_samples // 2, np.float32), sampling_rate=rate, return_tensors="pt"
    )
    made = tuple(features["input_features"][0].shape)
    if made != (config.num_mel_bins, frames):
        raise ValueError(
            f"a window has {made} mels and frames, where the model reads "
            f"{(config.num_mel_bins, frames)}"
        )


def usual(config: PretrainedConfig) -> WhisperFeatureExtractor:
    """The feature extractor of a Whisper that comes without one."""
    plain = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    frames = 2 * config.max_source_positions
    if plain.nb_max_frames != frames:  # windows of another length
        seconds = frames * plain.hop_length // plain.sampling_rate
        return WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=seconds)
    return plain


def one_row(features_FS: Tensor, device: torch.device) -> Inputs:
    """A window's frames [F, S] as the inputs of one row, frames in rows."""
    features = features_FS.T[None].contiguous().to(device)
    return Inputs(None, features, torch.ones(features.shape[:2], dtype=torch.bool, device=device))


@inference
def encode(target: LanguageModel, each: list[Inputs]) -> tuple[list[Inputs], float]:
    """The inputs of several rows with what the target's encoder makes of them, and the
    milliseconds that it took.

    On a CPU rows are read one by one, as nothing is gained otherwise, so that who is read beside a
    row does not change its rounding.
    """
    device = torch.device(target.device)
    started = time.perf_counter()
    if device.type == "cpu" or len(each) == 1:
        done = [target.encode(inputs) for inputs in each]
    else:
        whole = each[0]
        for row, inputs in enumerate(each[1:], 1):
            whole = whole.put([row], inputs)
        whole = target.encode(whole)
        done = [whole.take([row]) for row in range(len(each))]
        torch.cuda.synchronize(device)
    return done, 1e3 * (time.perf_counter() - started)


@inference
def language(target: LanguageModel, vocabulary: Vocabulary, inputs: Inputs) -> str:
    """The most probable language of a row that is encoded: what the model says first.

    One call of the decoder; the encoder does not run.
    """
    device = torch.device(target.device)
    wide = target.width(1)
    cache = target.open(1, wide, inputs)
    start = torch.full((1, 1), vocabulary.start_id, device=device)
    nodes = causal(start, torch.zeros_like(start), wide)
    logits_V = target.forward(cache, nodes, last=1).logits_BQV[0, -1]
    codes = list(vocabulary.languages)
    ids = torch.tensor([vocabulary.languages[code] for code in codes], device=device)
    return codes[int(logits_V[ids].argmax())]
