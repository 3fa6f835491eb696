"""What comes of a recording: text, timed segments, words, and how it was made."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.stats import RequestStats


@dataclass(frozen=True)
class Word:
    """One word and the seconds between which it is said."""

    word: str  #: with the blank that stands ahead of it
    start: float
    end: float
    probability: float  #: mean over its tokens, at temperature 1


@dataclass(frozen=True)
class Segment:
    """Some text and the seconds between which it is said.

    Temperature and the three figures below it are those of the window that it was heard in.
    """

    text: str  #: with the blank that stands ahead of it
    start: float
    end: float
    tokens: tuple[int, ...]  #: timestamps included
    temperature: float  #: that the window was decoded at, after fallbacks
    avg_logprob: float  #: mean log-probability of its tokens at temperature 1, the end included
    compression_ratio: float
    no_speech_prob: float
    window: int  #: number of the window, from 0
    seek: int  #: hundredths of a second at which the window begins
    recording: int  #: number of the recording in the call
    words: tuple[Word, ...] | None = None  #: if they were asked for


@dataclass
class TranscriptStats:
    """What a transcript cost.

    windows      pieces of sound that were encoded, each once
    attempts     texts that were decoded: windows, fallbacks and copies
    silent       windows that were left out because nobody speaks
    decoded      tokens, steps and acceptance of the decoder; its `seconds` are those of all rows
                 that ran beside this one's
    Times are in milliseconds. Where recordings run side by side each is told its share of windows.
    """

    audio_seconds: float = 0.0
    windows: int = 0
    attempts: int = 0
    silent: int = 0
    features_ms: float = 0.0
    encoder_ms: float = 0.0
    decoder_ms: float = 0.0
    words_ms: float = 0.0
    decoded: RequestStats = field(default_factory=RequestStats)

    @property
    def milliseconds(self) -> float:
        """All of it."""
        return self.features_ms + self.encoder_ms + self.decoder_ms + self.words_ms

    @property
    def real_time_factor(self) -> float:
        """Seconds of sound for each second of work."""
        return 1e3 * self.audio_seconds / self.milliseconds if self.milliseconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON, derived figures included."""
        values = asdict(self) | {"decoded": self.decoded.as_dict()}
        return values | {"real_time_factor": self.real_time_factor}


@dataclass(frozen=True)
class Transcript:
    """One recording as text.

    >>> transcript.segments[0].start, transcript.text  # doctest: +SKIP
    (0.0, 'Please enter your password.')
    """

    text: str
    language: str | None  #: its code; None for models that know English alone
    segments: tuple[Segment, ...]
    duration: float  #: seconds of sound
    stats: TranscriptStats
    settings: Mapping[str, Any]  #: what was asked for, and how windows were cut
    name: str  #: of the recording


def whole_text(segments: "tuple[Segment, ...]") -> str:
    """The segments' texts as one."""
    return "".join(segment.text for segment in segments).strip()
