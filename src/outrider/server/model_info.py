"""What is known of a served model where its requests are read and its answers are written.

It holds no weights, so that it can go to another process: `outrider.server.engine_process`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.server.speculation_methods import MethodSet
from outrider.speech.vocabulary import Vocabulary
from outrider.text.decoder_prompt import SILENT, ModelDefaults
from outrider.text.media_processor import MediaProcessor


@dataclass(frozen=True)
class TextModelInfo:
    """A model that goes on from text.

    context, vocab_size  tokens that it can read, and how many there are
    fingerprint          names what a seeded text depends on:
    `outrider.server.engine_factory.fingerprint`
    """

    tokenizer: Any
    eos_ids: tuple[int, ...]
    context: int
    vocab_size: int
    methods: MethodSet
    fingerprint: str
    defaults: ModelDefaults = SILENT  #: of the model's generation configuration
    adapters: Mapping[str, str] = field(default_factory=dict)  #: their fingerprints by name
    media: MediaProcessor | None = None  #: of models whose prompts may hold images or sound
    remote_media: bool = False  #: whether images may be fetched from other machines

    def fingerprint_of(self, model: str) -> str:
        """That of an adapter, or of the target under whatever name."""
        return self.adapters.get(model, self.fingerprint)


@dataclass(frozen=True)
class SpeechModelInfo:
    """A model that turns speech into text; `rate` is its samples per second.

    An audio language model has no `vocabulary`: it is asked for a language in words.
    """

    name: str
    vocabulary: Vocabulary | None
    rate: int


ModelInfo = TextModelInfo | SpeechModelInfo
