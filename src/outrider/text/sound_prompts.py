"""Transcription by models that are no Whisper: audio language models and encoder-decoders."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from outrider.engine.request import StopConditions
from outrider.errors import ConfigurationError, OutriderError, PromptError, first_line
from outrider.models.config import found
from outrider.sampling.sampling_params import SamplingParams
from outrider.speech.audio import Samples
from outrider.speech.vocabulary import language_name
from outrider.text.decoder_prompt import ModelDefaults, ruled
from outrider.text.media_processor import MediaProcessor
from outrider.types import Inputs, MultiModalInputs

#: What is asked where a processor has no words of its own for it.
INSTRUCTION = "Transcribe the speech of this recording word for word. Write nothing else."
SECONDS = 30.0  #: of a window: what the encoders of these models hear at once


@dataclass(frozen=True)
class TranscribingModel:
    """What is the same of all `SoundPrompts`: how an answer is drawn, where it ends, its text."""

    name: str
    media: MediaProcessor
    tokenizer: Any
    eos_ids: tuple[int, ...]
    defaults: ModelDefaults

    @property
    def rate(self) -> int:
        return self.media.rate

    def sampling(self, temperature: float, seed: int, prompt: Sequence[int]) -> SamplingParams:
        own = SamplingParams(temperature, seed=seed)
        return ruled(own, self.defaults.rules_without(len(prompt)))

    def limits(self, most: int) -> StopConditions:
        return StopConditions(most, self.eos_ids)

    def within(self, limits: StopConditions, sound: Inputs | MultiModalInputs) -> StopConditions:
        """Where the text of this recording ends."""
        return limits

    def text(self, tokens: Sequence[int]) -> str:
        """The words of an answer's tokens."""
        plain = [token for token in tokens if token not in self.eos_ids]
        words: str = self.tokenizer.decode(plain, skip_special_tokens=True)
        return words


@dataclass(frozen=True)
class TranscriptionPrompts(TranscribingModel):
    """Transcription by a model whose prompts may hold sound. A `SoundPrompts`.

    The processor's own `apply_transcription_request` makes the prompt where it has one, else the
    chat template, of `INSTRUCTION` or of what is asked in its place.
    """

    @cached_property
    def longest(self) -> float:
        return min(SECONDS, self.media.most_seconds)

    def asked(
        self, samples: Samples, language: str | None, told: str | None
    ) -> tuple[list[int], MultiModalInputs]:
        request = found(self.media.processor, "apply_transcription_request")
        if request is None:
            text = INSTRUCTION if told is None else told
            if language is not None:
                text = f"{text} It is in {language_name(language)}."
            sound = {"array": samples, "sampling_rate": self.rate}
            parts = [{"type": "audio", "audio": sound}, {"type": "text", "text": text}]
            return self.media.conversation([{"role": "user", "content": parts}])
        takes = inspect.signature(request).parameters
        known = {
            "audio": samples,
            "language": language,
            "prompt": told,
            "model_id": self.name,
            "sampling_rate": self.rate,
            "format": "wav",
        }
        given = {name: known[name] for name in takes if known.get(name) is not None}
        return self.media.made(lambda: request(**given), "a recording to be transcribed")

    def answer_text(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without what the processor knows to be none."""
        text = self.text(tokens)
        extract = found(self.media.processor, "extract_transcription")
        return text if extract is None else str(extract(text))


# Transcription by encoder-decoders that hear a recording as their source: Moonshine, Canary.

_FEATURES = ("input_features", "input_values")


@dataclass(frozen=True)
class SourceTranscription(TranscribingModel):
    """Transcription by a model with an encoder of sound that is no Whisper. A `SoundPrompts`.

    begun  what an answer begins with where the processor has no words for it
    """

    begun: tuple[int, ...]
    longest: float = SECONDS

    def asked(
        self, samples: Samples, language: str | None, told: str | None
    ) -> tuple[list[int], Inputs]:
        """What the text begins with, and the sound as the encoder reads it.

        Raises ConfigurationError for a prompt, and for a language that the model is not told of, or
        has to be told and is not.
        """
        if told is not None:
            raise ConfigurationError(
                f"{self.name} is told nothing ahead of a text; got initial_prompt; leave it out"
            )
        processor = self.media.processor
        asks = found(processor, "apply_transcription_request")  # Canary's
        cohere = found(processor, "get_decoder_prompt_ids") is not None
        told_language = asks is not None or cohere
        by_token = found(self.tokenizer, "tgt_lang") is not None  # SeamlessM4T's
        if (told_language or by_token) and language is None:
            write = "eng" if by_token else "en"
            raise ConfigurationError(
                f"{self.name} has to be told the language; got none; write language={write!r}"
            )
        if by_token:
            assert language is not None
            return self._in_language(samples, language)
        if language is not None and not told_language:
            raise ConfigurationError(
                f"{self.name} is not told the language; got language={language!r}; leave it out"
            )
        try:
            with torch.device("cpu"):  # tensors of a processor's, whatever the caller's default
                if asks is not None:
                    made = asks(audio=samples, source_language=language)
                elif told_language:
                    made = processor(samples, language=language, sampling_rate=self.rate)
                else:
                    reads = found(processor, "feature_extractor") or processor
                    made = reads(samples, sampling_rate=self.rate, return_tensors="pt")
                return self._read(made)
        except OutriderError:
            raise
        except Exception as error:  # a processor is a program of its own
            raise PromptError(
                f"the processor of {self.name} does not take a recording of {len(samples)} "
                f"samples: {type(error).__name__}: {first_line(error)}; give another language, or "
                "longer sound"
            ) from error

    def _in_language(self, samples: Samples, language: str) -> tuple[list[int], Inputs]:
        """For a model whose text begins with the token of its language."""
        word = f"__{language.strip('_')}__"
        token = self.tokenizer.convert_tokens_to_ids(word)
        if token in (None, self.tokenizer.unk_token_id):
            raise ConfigurationError(
                f"{self.name} is told a language as its tokenizer names it; got "
                f"language={language!r}, and no token {word}; write one such as 'eng'"
            )
        reads = self.media.processor.feature_extractor
        with torch.device("cpu"):
            ids, source = self._read(reads(samples, sampling_rate=self.rate, return_tensors="pt"))
        return [*ids, token], source

    def _read(self, made: Mapping[str, object]) -> tuple[list[int], Inputs]:
        """What a processor made of one recording, without padding."""
        name = next(name for name in _FEATURES if name in made)
        features, seen = torch.as_tensor(made[name], device="cpu"), made.get("attention_mask")
        if name == "input_values" and features.dim() == 3:  # of one channel
            features = features[:, 0]
        if seen is not None:
            features = features[:, : int(torch.as_tensor(seen, device="cpu").sum())]
        there = torch.ones(1, features.shape[1], dtype=torch.bool, device="cpu")
        given, ids = made.get("decoder_input_ids"), list(self.begun)
        if given is not None:  # as `generate` has it: behind the start, if that is not its first
            asked = torch.as_tensor(given, device="cpu")[0].tolist()
            ids = asked if asked[: len(ids)] == ids else [*ids, *asked]
        return ids, Inputs(None, features, there)

    def within(self, limits: StopConditions, sound: Inputs | MultiModalInputs) -> StopConditions:
        """Where the text of this recording ends: with it, if each token is read with a moment."""
        if not self.media.moment:
            return limits
        assert isinstance(sound, Inputs)
        moments = sound.mask_BS.shape[1] // self.media.moment
        most = moments if limits.max_new_tokens is None else min(moments, limits.max_new_tokens)
        return replace(limits, max_new_tokens=most)

    def answer_text(self, tokens: Sequence[int]) -> str:
        return self.text(tokens)
