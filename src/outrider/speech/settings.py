"""What is asked of a transcription, checked before any work is done."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from outrider import arguments
from outrider.engine.beam_search import Beams
from outrider.errors import ConfigurationError, UnknownName
from outrider.speech.captions import Reference
from outrider.speech.formats import TIMES
from outrider.speech.vad import Vad

# Whether a window's text will do: how probable, how repetitive, and whether anyone speaks.


@dataclass(frozen=True)
class Thresholds:
    """Beyond which a window is decoded again at the next temperature, or left out as silence.

    compression_ratio  a text that compresses better repeats itself: again
    logprob            a text whose mean log-probability is lower: again
    no_speech          a window whose start is more probably silence, and whose text is no more
                       probable than `logprob`: left out
    None switches one off.
    """

    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6


def compression_ratio(text: str) -> float:
    """How much shorter zlib makes a text: above 2.4 it repeats itself.

    >>> round(compression_ratio("so it goes, " * 20), 1)
    10.4
    """
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def silent(limits: Thresholds, no_speech: float, logprob: float) -> bool:
    """Whether nobody speaks: the window is left out."""
    if limits.no_speech is None or no_speech <= limits.no_speech:
        return False
    return limits.logprob is None or logprob <= limits.logprob


def needs_fallback(limits: Thresholds, ratio: float, logprob: float, no_speech: float) -> bool:
    """Whether another temperature is to be tried."""
    unlikely = limits.logprob is not None and logprob < limits.logprob
    if unlikely and limits.no_speech is not None and no_speech > limits.no_speech:
        return False  # silence: no text will be more probable
    return unlikely or (limits.compression_ratio is not None and ratio > limits.compression_ratio)


TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SIDE_BY_SIDE = 8  #: recordings, or windows between pauses, where nothing else is asked for


class TranscribeOptions(TypedDict, total=False):
    """What may be asked of `transcribe`, by name: the fields of `TranscribeSettings`."""

    language: str | None
    task: str
    temperature: float | Sequence[float]
    best_of: int | None
    beam_size: int | None
    patience: float | None
    length_penalty: float
    condition_on_previous_text: bool | None
    initial_prompt: str | Sequence[int] | None
    timestamps: str | bool
    word_timestamps: bool
    batch_size: int | None
    vad: "Vad | None"
    reference: "Reference | Sequence[Reference | None] | None"
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    suppress_tokens: str | Sequence[int] | None
    max_new_tokens: int | None
    seed: int
    sampling_rate: int | None


@dataclass(frozen=True)
class TranscribeSettings:
    """How recordings are transcribed.

    language        code or English name; None: detected in each recording's first window
    task            "transcribe", or "translate" into English
    temperature     0 is greedy. Of several the next one is tried where a window's text will not do
    best_of         texts that are drawn at a temperature above 0, of which the most probable stays
    beam_size       beams of a search at temperature 0, as many windows as there are side by side;
                    None or 1: greedy
    patience, length_penalty  of that search: those of `outrider.Beams`, whose default is how
                    transformers ends a search; openai-whisper and faster-whisper have patience 1
    condition_on_previous_text  tell a window what was said before it. None: where windows are read
                    one after another
    initial_prompt  text (or tokens) that is told to the first window: names, spelling; to every
                    window where none is told what was said before
    timestamps      "segment", "word" or "none" (True: "segment", False: "none")
    word_timestamps True is timestamps="word"
    batch_size      None: windows follow each other, each begins at the last timestamp of the one
                    before it, and recordings are read side by side. A number above 1: recordings
                    are cut at pauses, and so many windows are decoded at once. 1: one at a time
    vad             where somebody speaks: [(start, end)] in seconds, or a function of the samples
                    that returns them; windows are cut there, and the rest is not decoded
    reference       text to copy from, as captions or plain; several recordings take one each
    compression_ratio_threshold, logprob_threshold, no_speech_threshold   see `Thresholds`
    suppress_tokens None, -1 or "-1": those that the model names. Ids: these; [] for none
    max_new_tokens  most tokens of a window. None: half of the decoder's context
    seed            of temperatures above 0: the same seed, recording and settings, the same text
    sampling_rate   of samples that are given as arrays. None: what the model hears

    Raises ConfigurationError for values of another kind or outside their range.

    >>> TranscribeSettings(language="en", temperature=0).temperatures
    (0,)
    """

    language: str | None = None
    task: str = "transcribe"
    temperature: float | Sequence[float] = TEMPERATURES
    best_of: int | None = None
    beam_size: int | None = None
    patience: float | None = None
    length_penalty: float = 1.0
    condition_on_previous_text: bool | None = None
    initial_prompt: str | Sequence[int] | None = None
    timestamps: str | bool = "segment"
    word_timestamps: bool = False
    batch_size: int | None = None
    vad: "Vad | None" = field(default=None, repr=False)
    reference: "Reference | Sequence[Reference | None] | None" = field(default=None, repr=False)
    compression_ratio_threshold: float | None = Thresholds.compression_ratio
    logprob_threshold: float | None = Thresholds.logprob
    no_speech_threshold: float | None = Thresholds.no_speech
    suppress_tokens: str | Sequence[int] | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    sampling_rate: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "timestamps", self._times())
        if not self.temperatures or any(not 0 <= t < math.inf for t in self.temperatures):
            what, do = "0 or more, one or several", "write temperature=(0.0, 0.2, 0.4)"
            arguments.refuse("temperature", what, self.temperature, do)
        counts = ("best_of", "beam_size", "batch_size", "max_new_tokens")
        for name, given in arguments.fields_of(self, counts).items():
            if given is not None:
                value = arguments.whole(name, given, "leave it out", least=1)
                object.__setattr__(self, name, value)
        if self.beams is None and (self.patience is not None or self.length_penalty != 1):
            raise ConfigurationError(
                "patience and length_penalty are of a beam search; got "
                f"patience={self.patience!r} and length_penalty={self.length_penalty!r} without "
                "beams; say beam_size=5"
            )
        if self.beams is not None and all(self.temperatures):
            raise ConfigurationError(
                f"beams are searched at temperature 0; got beam_size={self.beam_size} with "
                f"temperature={self.temperature!r}; add 0, or use best_of"
            )
        limits = [f"{name}_threshold" for name in ("compression_ratio", "logprob", "no_speech")]
        for name, given in arguments.fields_of(self, limits).items():
            if given is not None:
                arguments.number(name, given, "a number", "None switches it off")
        if self.initial_prompt is not None and not isinstance(self.initial_prompt, str):
            do = "give text, or the tokens of it"
            arguments.several("initial_prompt", self.initial_prompt, "text", do, arguments.is_whole)
        arguments.whole("seed", self.seed, "use an integer of 64 bits", least=0)
        if self.condition_on_previous_text and self.at_pauses:
            why = "vad" if self.vad is not None else f"batch_size={self.batch_size}"
            raise ConfigurationError(
                "windows that are decoded side by side cannot be told what was said before them; "
                f"got condition_on_previous_text=True with {why}; leave one out"
            )

    def _times(self) -> str:
        given = self.timestamps
        if isinstance(given, bool):
            given = "segment" if given else "none"
        if given not in TIMES:
            raise UnknownName("timestamps", str(given), TIMES)
        if self.word_timestamps:
            if given == "none" and self.timestamps is not False:
                raise ConfigurationError(
                    "timestamps='none' contradicts word_timestamps=True; got both; drop one"
                )
            return "word"
        return given

    @property
    def temperatures(self) -> tuple[float, ...]:
        """All of them, in the order in which they are tried."""
        given = arguments.plain(self.temperature)
        if arguments.is_number(given):
            return (given,)
        do = "write temperature=(0.0, 0.2, 0.4)"
        return arguments.several("temperature", given, "numbers", do, arguments.is_number)

    @property
    def beams(self) -> Beams | None:
        """The search at temperature 0; None: there is none."""
        if self.beam_size is None or self.beam_size == 1:
            return None
        return Beams(self.beam_size, self.length_penalty, patience=self.patience)

    @property
    def thresholds(self) -> Thresholds:
        """Beyond which a text will not do."""
        return Thresholds(
            self.compression_ratio_threshold, self.logprob_threshold, self.no_speech_threshold
        )

    @property
    def timed(self) -> bool:
        """Whether the model writes timestamps."""
        return self.timestamps != "none"

    @property
    def at_pauses(self) -> bool:
        """Whether recordings are cut at pauses, whatever their length."""
        return self.vad is not None or (self.batch_size or 1) > 1

    @property
    def rows(self) -> int:
        """Windows that are decoded at once, at most."""
        return self.batch_size or SIDE_BY_SIDE

    def suppressed(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that never come; `usual` are those that the model names."""
        given = arguments.plain(self.suppress_tokens)
        if given is None or given in ("-1", -1):
            return usual
        if isinstance(given, str):
            parts = [part.strip() for part in given.split(",") if part.strip()]
            if not all(part.lstrip("-").isdigit() for part in parts):
                what, do = "token ids", 'write suppress_tokens="-1,220", or [] for none'
                arguments.refuse("suppress_tokens", what, given, do)
            given = [int(part) for part in parts]
        do = "write suppress_tokens=[-1] for those that the model names, [] for none"
        ids = arguments.several("suppress_tokens", given, "token ids", do, arguments.is_whole)
        own = usual if -1 in ids else ()
        return tuple(dict.fromkeys((*own, *(int(i) for i in ids if i >= 0))))

    def told(self, windows: str) -> Mapping[str, object]:
        """For the transcript: what was asked for, as plain values, and how windows were cut."""
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name in ("vad", "reference"):
                value = value is not None
            elif isinstance(value, Sequence) and not isinstance(value, str):
                value = list(value)
            values[name] = value
        values["windows"] = windows
        return values | {"condition_on_previous_text": self.conditioned(windows)}

    def conditioned(self, windows: str) -> bool:
        """Whether windows are told what was said before them."""
        asked = self.condition_on_previous_text
        return windows == "sequential" and (True if asked is None else asked)
