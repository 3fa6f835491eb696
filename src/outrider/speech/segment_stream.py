"""Segments as they come: what every way to transcribe recordings has in common."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

from outrider.errors import OutriderError
from outrider.speech.audio import Recording
from outrider.speech.result import Segment, Transcript


class OpenRecording(Protocol):
    """A recording that is being transcribed."""

    @property
    def number(self) -> int:
        """Which of the recordings it is."""

    @property
    def segments(self) -> Sequence[Segment]:
        """What has been said of it."""


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

    def heard(self, number: int) -> float:
        """Seconds of a recording that are behind its last segment, for progress."""
        if self.transcripts[number] is not None or number in self.errors:
            return self.recordings[number].seconds
        found = [one for one in self._under_way() if one.number == number and one.segments]
        return found[0].segments[-1].end if found else 0.0

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

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Segment:
        while not self._ready:
            if self.done:
                raise StopIteration
            self._turn()
        return self._ready.popleft()
