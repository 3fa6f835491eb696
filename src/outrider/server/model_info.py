"""What is known of a served model where its requests are read and its answers are written, and how
its tokens are.

It holds no weights, so that it can go to another process: `outrider.server.engine_process`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.models.token_bytes import spelling_of
from outrider.server.messages import JsonObject
from outrider.server.speculation_methods import COUPLED, DEFAULT, MethodSet
from outrider.speech.vocabulary import Vocabulary
from outrider.text.decoder_prompt import SILENT, ModelDefaults
from outrider.text.media_processor import MediaProcessor

# Tokens as people and clients see them: text, bytes, offsets.

_HALF = "\ufffd"  #: how a text ends whose last character is not complete
_UNFINISHED = 3  #: bytes of a character without its last one, at most: more are none


@dataclass(frozen=True)
class TokenFormatter:
    """What tokens of a tokenizer are called."""

    tokenizer: PreTrainedTokenizerBase

    def text(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def whole(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones with it."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def entry(self, token: int, logprob: float) -> JsonObject:
        """A token with its log-probability. Half a character has bytes that are no text alone."""
        raw = self.bytes_of(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, -9999.0),  # JSON has no infinity
            "bytes": list(raw),
            "id": token,
        }

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token."""
        return spelling_of(self.tokenizer).bytes_of(token)


@dataclass
class TextOffsets:
    """Where in a text its tokens begin, in characters. As it grows no token is decoded anew.

    A token that goes on with a character begins where that one does.
    """

    words: TokenFormatter
    _places: list[int] = field(default_factory=list)
    _before: int = 0  #: tokens up to the last one whose characters are complete,
    _whole: int = 0  #: and with it
    _length: int = 0  #: characters of these

    def since(self, ids: Sequence[int], since: int, count: int) -> list[int]:
        """Of so many tokens from a place on."""
        words, places = self.words, self._places
        for place in range(len(places), min(since + count, len(ids))):
            places.append(self._length)
            text = words.text(ids[self._before : place + 1])
            if not text.endswith(_HALF) or place - self._whole == _UNFINISHED:
                self._length += len(text) - len(words.text(ids[self._before : self._whole]))
                self._before, self._whole = self._whole, place + 1
        return places[since : since + count]


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

    def room(self, capacity: int, *methods: str) -> int:
        """Tokens of a prompt and its answer together, in a row of so many slots.

        methods  that may draft it; none: those of who asks for none
        """
        nodes = [self.methods.nodes[name] for name in methods or (DEFAULT, COUPLED)]
        return min(self.context, capacity - max(nodes))

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
