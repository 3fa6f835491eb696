"""Recordings being transcribed as a run of the engine's loop: one turn each in every step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from outrider.speech.audio import Samples
from outrider.speech.result import Segment, Transcript
from outrider.speech.settings import TranscribeSettings
from outrider.speech.transcriber import Transcription

LANE = "speech"


@dataclass(frozen=True, eq=False)
class TranscriptionRequest:
    """A recording, at the rate that the model hears, and how it is to be transcribed."""

    samples: Samples
    settings: TranscribeSettings


class TranscriptionOutput(NamedTuple):
    """What one step has brought of a recording; `finish_reason` and the transcript at its end."""

    row: int  #: the request's number
    segments: list[Segment]
    finish_reason: str | None = None
    transcript: Transcript | None = None


class TranscriptionRunner:
    """Requests of one Whisper model. A `BatchRunner`.

    `begin` is `transcription` with the model's engine.
    """

    def __init__(self, begin: Callable[[TranscriptionRequest], Transcription]) -> None:
        self._begin = begin
        self._going: dict[int, Transcription] = {}
        self._count = 0
        self.errors: dict[int, Exception] = {}

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return not self._going

    def submit(self, request: TranscriptionRequest) -> int:
        """Take a recording; its number. Raises what the model cannot honour."""
        self._going[self._count] = self._begin(request)
        self._count += 1
        return self._count - 1

    def step(self) -> list[TranscriptionOutput]:
        """A turn of each; what it brought, and who is over."""
        return [self._turn(number, one) for number, one in list(self._going.items())]

    def _turn(self, number: int, one: Transcription) -> TranscriptionOutput:
        try:
            segments = one.step()
        except Exception as error:  # this recording's own
            self.errors[number] = error
            del self._going[number]
            return TranscriptionOutput(number, [], "error")
        if not one.done:
            return TranscriptionOutput(number, segments)
        del self._going[number]
        if one.errors:
            self.errors[number] = one.errors[0]
            return TranscriptionOutput(number, segments, "error")
        return TranscriptionOutput(number, segments, "stop", one.transcripts[0])

    def end(self, number: int, reason: str) -> None:
        """Nobody wants it any more."""
        self._going.pop(number, None)

    def release(self, number: int) -> None:
        """Keep nothing of a recording that is over."""
        self.errors.pop(number, None)

    def cached(self, number: int) -> int:
        """Nothing of a recording is copied."""
        return 0
