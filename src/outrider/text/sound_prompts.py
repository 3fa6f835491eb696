"""Questions to audio language models: what is said in this recording?"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider.engine.request import StopConditions
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
        """Samples per second that it hears."""
        return self.media.rate

    def sampling(self, temperature: float, seed: int, prompt: Sequence[int]) -> SamplingParams:
        """With the rules that the model's generation configuration has for tokens."""
        own = SamplingParams(temperature, seed=seed)
        return ruled(own, self.defaults.rules_without(len(prompt)))

    def limits(self, most: int) -> StopConditions:
        """Where a text ends."""
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
        """Seconds of a window, at most."""
        return min(SECONDS, self.media.most_seconds)

    def asked(
        self, samples: Samples, language: str | None, told: str | None
    ) -> tuple[list[int], MultiModalInputs]:
        """The prompt that asks for what is said, and the sound beside it."""
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

    def said(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without what the processor knows to be none."""
        text = self.text(tokens)
        extract = found(self.media.processor, "extract_transcription")
        return text if extract is None else str(extract(text))
