"""A recording as windows: one after another, or cut at pauses and read in any order."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.speech import vad
from outrider.speech.audio import Samples
from outrider.speech.feature_extractor import frames
from outrider.speech.settings import TranscribeSettings
from outrider.speech.speech_model import WhisperModel
from outrider.speech.timestamps_split import TimedPiece, cut
from outrider.speech.window_decoder import WindowText
from outrider.types import Inputs


@dataclass(frozen=True, eq=False)
class AudioWindow:
    """Some sound of a recording. Times are counted in frames from the recording's start."""

    number: int
    first: int
    count: int  #: frames of sound; the rest of the window is padding
    features_FS: Tensor
    draft_FS: Tensor | None  #: for a draft model whose encoder reads other features
    previous: tuple[int, ...]  #: what the model is told was said before
    whole: bool  #: no other window reads its end


@dataclass(frozen=True, eq=False)
class DecodedWindow:
    """A window's text in pieces; `text.tokens[first:last]` of each."""

    window: AudioWindow
    text: WindowText
    inputs: Inputs
    pieces: tuple[TimedPiece, ...]  #: those that say something, times in states of the window


class WindowSource(Protocol):
    """The windows of one recording, and what they have said."""

    @property
    def kind(self) -> str:
        """How they are cut."""

    @property
    def done(self) -> bool:
        """Whether all have been heard."""

    def take(self) -> AudioWindow | None:
        """The next window that can be decoded now."""

    def hear(self, window: AudioWindow, text: WindowText, inputs: Inputs) -> list[DecodedWindow]:
        """What can be told in order, now that this window's text is there."""


def spoken(
    hearing: WhisperModel, pieces: Sequence[TimedPiece], text: WindowText
) -> tuple[TimedPiece, ...]:
    """The pieces that last and say something; silence says nothing."""
    if text.silent:
        return ()
    return tuple(
        piece
        for piece in pieces
        if piece.start < piece.end and hearing.text(text.tokens[piece.first : piece.last]).strip()
    )


class SequentialWindows:
    """Each window begins at the last timestamp of the one before it, and is told its text."""

    kind = "sequential"

    def __init__(
        self, hearing: WhisperModel, settings: TranscribeSettings, samples: Samples
    ) -> None:
        self._hearing, self._timed = hearing, settings.timed
        self._sound = frames(hearing.extractor, samples)
        other = hearing.draft_extractor
        self._draft = None if other is None else frames(other, samples)
        self._conditioned = settings.conditioned(self.kind)
        self._history = list(told(hearing, settings))
        self._since = 0  # what was said before is told no more
        self._seek, self._number, self._waits = 0, 0, False

    @property
    def done(self) -> bool:
        """Whether all have been heard."""
        return self._seek >= self._sound.count and not self._waits

    def take(self) -> AudioWindow | None:
        """The window behind the last one, once that has been heard."""
        if self._waits or self.done:
            return None
        self._waits = True
        size = self._hearing.frames
        window = AudioWindow(
            self._number,
            self._seek,
            min(size, self._sound.count - self._seek),
            self._sound.window(self._seek, size),
            None if self._draft is None else self._draft.window(self._seek, size),
            tuple(self._history[self._since :]),
            False,
        )
        self._number += 1
        return window

    def hear(self, window: AudioWindow, text: WindowText, inputs: Inputs) -> list[DecodedWindow]:
        """Its pieces; the next window begins where the last of them ends."""
        stride, self._waits = self._hearing.stride, False
        size = window.count // stride
        pieces, advance = [TimedPiece(0, len(text.tokens), 0, size)], size
        if self._timed and not text.silent:
            first = self._hearing.vocabulary.first_timestamp_id
            pieces, advance = cut(text.tokens, first, size)
        self._seek += window.count if advance >= size else stride * advance
        kept = spoken(self._hearing, pieces, text)
        if not text.silent:
            for piece in kept:
                self._history += text.tokens[piece.first : piece.last]
            if not self._conditioned or text.temperature > 0.5:
                self._since = len(self._history)
        return [DecodedWindow(window, text, inputs, kept)] if kept else []


class VadWindows:
    """Windows that are known beforehand and do not depend on each other."""

    def __init__(
        self, hearing: WhisperModel, settings: TranscribeSettings, samples: Samples, name: str
    ) -> None:
        self._hearing, self._timed, self._samples = hearing, settings.timed, samples
        longest = hearing.seconds(hearing.frames)
        self.kind = "pauses" if settings.vad is None else "vad"
        if settings.vad is None:
            spans = vad.at_pauses(samples, hearing.rate, longest)
        else:
            spans = vad.of_speech(settings.vad, samples, hearing.rate, longest, name)
        self._spans = deque(enumerate(spans))
        self._told = tuple(told(hearing, settings))
        self._ready: dict[int, list[DecodedWindow]] = {}
        self._next, self._count = 0, len(spans)

    @property
    def done(self) -> bool:
        """Whether all have been heard."""
        return self._next >= self._count

    def take(self) -> AudioWindow | None:
        """The next window; its features are its own, padded by silence."""
        if not self._spans:
            return None
        number, (start, end) = self._spans.popleft()
        rate, hop = self._hearing.rate, self._hearing.extractor.hop_length
        samples = self._samples[int(start * rate) : int(end * rate)]
        size, other = self._hearing.frames, self._hearing.draft_extractor
        sound = frames(self._hearing.extractor, samples)
        return AudioWindow(
            number,
            round(start * rate / hop),
            min(sound.count, size),
            sound.window(0, size),
            None if other is None else frames(other, samples).window(0, size),
            self._told,
            True,
        )

    def hear(self, window: AudioWindow, text: WindowText, inputs: Inputs) -> list[DecodedWindow]:
        """This window's pieces and those behind it that waited for it."""
        size = window.count // self._hearing.stride
        pieces = [TimedPiece(0, len(text.tokens), 0, size)]
        if self._timed:
            first = self._hearing.vocabulary.first_timestamp_id
            pieces = cut(text.tokens, first, size, whole=True).pieces
        kept = spoken(self._hearing, pieces, text)
        self._ready[window.number] = [DecodedWindow(window, text, inputs, kept)] if kept else []
        now: list[DecodedWindow] = []
        while self._next in self._ready:
            now += self._ready.pop(self._next)
            self._next += 1
        return now


def told(hearing: WhisperModel, settings: TranscribeSettings) -> list[int]:
    """The initial prompt's tokens."""
    given = settings.initial_prompt
    if given is None:
        return []
    if isinstance(given, str):
        return hearing.encode(f" {given.strip()}") if given.strip() else []
    return [int(token) for token in given]


def opened(
    hearing: WhisperModel, settings: TranscribeSettings, samples: Samples, name: str
) -> WindowSource:
    """A recording's windows as the settings ask. Without timestamps nothing says where a next
    window should begin, so recordings longer than one are cut at pauses."""
    long = len(samples) > hearing.seconds(hearing.frames) * hearing.rate
    if settings.at_pauses or (long and not settings.timed):
        return VadWindows(hearing, settings, samples, name)
    return SequentialWindows(hearing, settings, samples)
