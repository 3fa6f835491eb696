"""What comes of a recording: text, timed segments, words, and how it was made."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, Self

from outrider.errors import OutriderError
from outrider.speech.audio import Recording
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
    settings: Mapping[str, object]  #: what was asked for, and how windows were cut
    name: str  #: of the recording


def whole_text(segments: "tuple[Segment, ...]") -> str:
    """The segments' texts as one."""
    return "".join(segment.text for segment in segments).strip()


# Segments as they come: what every way to transcribe recordings has in common.


class OpenRecording(Protocol):
    """A recording that is being transcribed."""

    number: int  #: which of the recordings it is
    segments: list[Segment]  #: what has been said of it
    stats: TranscriptStats  #: what it took so far


class SegmentStream(Iterator[Segment], ABC):
    """The segments of one recording or several, in the order of each.

    `transcripts` are what has come of each recording, None while it is not done; `errors` names
    recordings that failed on the way, the others go on. `several` is whether a list was asked for.
    """

    def __init__(self, recordings: Sequence[Recording], several: bool) -> None:
        self.recordings, self.several = tuple(recordings), several
        self.transcripts: list[Transcript | None] = [None] * len(self.recordings)
        self.errors: dict[int, OutriderError] = {}
        self._waiting = deque(range(len(self.recordings)))
        self._ready: deque[Segment] = deque()

    @abstractmethod
    def _under_way(self) -> Sequence[OpenRecording]:
        """The recordings that were begun and are not over."""

    @abstractmethod
    def _turn(self) -> None:
        """Begin what there is room for, one step of the model, tell what is over."""

    @property
    def done(self) -> bool:
        """Whether every recording is over."""
        return not self._waiting and not self._under_way()

    def seconds_done(self, number: int) -> float:
        """Seconds of a recording that are behind its last segment, for progress."""
        if self.transcripts[number] is not None or number in self.errors:
            return self.recordings[number].seconds
        found = [one for one in self._under_way() if one.number == number and one.segments]
        return found[0].segments[-1].end if found else 0.0

    def _tell_transcript(
        self, one: OpenRecording, language: str | None, settings: Mapping[str, object]
    ) -> None:
        """All of a recording has been heard, by these settings."""
        segments, stats = tuple(one.segments), one.stats
        stats.decoded.seconds = stats.decoder_ms / 1e3
        name, text = self.recordings[one.number].name, whole_text(segments)
        self.transcripts[one.number] = Transcript(
            text, language, segments, stats.audio_seconds, stats, settings, name
        )

    def _tell_error(self, number: int, error: Exception) -> None:
        """A recording has failed; the others go on. Raises what is no error of a recording's."""
        if not isinstance(error, OutriderError):
            raise error
        error.add_note(f"while transcribing {self.recordings[number].name}")
        self.errors[number] = error

    def step(self) -> list[Segment]:
        """One turn, a step of the model at most; the segments that it brought."""
        if not self.done:
            self._turn()
        fresh = list(self._ready)
        self._ready.clear()
        return fresh

    def drain(self) -> Self:
        """Transcribe to the end."""
        for _ in self:
            pass
        return self

    def __next__(self) -> Segment:
        while not self._ready:
            if self.done:
                raise StopIteration
            self._turn()
        return self._ready.popleft()
