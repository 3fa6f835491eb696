"""A recording as windows: one after another, or cut at pauses and read in any order."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.speech import vad
from outrider.speech.audio import Samples
from outrider.speech.settings import TranscribeSettings
from outrider.speech.speech_model import WhisperModel
from outrider.speech.window_decoder import WindowText
from outrider.types import Inputs

# A window's tokens as pieces of text with times, and where the next window begins.
#
# Times inside a window are counted in steps: one for each state of the encoder, 0.02 s in Whisper.


class TimedPiece(NamedTuple):
    """Some of a window's tokens, and the steps between which they are said."""

    first: int  #: the piece is tokens[first:last] of the window
    last: int
    start: int
    end: int


class WindowPieces(NamedTuple):
    """A window's pieces; `advance` steps ahead the next window begins."""

    pieces: list[TimedPiece]
    advance: int


def cut_at_timestamps(
    tokens: Sequence[int], first_timestamp_id: int, size: int, whole: bool = False
) -> WindowPieces:
    """Cut where two timestamps meet: one closes a piece, the next one opens another.

    `size` are the steps of sound in the window. What stands behind the last such place is left to
    the next window, which begins there, unless a closing timestamp ends it: then nothing is said
    behind it. With `whole` no window will read it again, and it is a piece up to the end.
    """
    stamps = [token >= first_timestamp_id for token in tokens]
    meets = [at + 1 for at in range(len(tokens) - 1) if stamps[at] and stamps[at + 1]]
    closed = stamps[-2:] == [False, True]

    def step(at: int) -> int:
        return tokens[at] - first_timestamp_id

    if not meets:
        times = [step(at) for at in range(len(tokens)) if stamps[at]]
        start = times[0] if whole and stamps[:1] == [True] else 0
        end = times[-1] if times and times[-1] > start else size
        return WindowPieces([TimedPiece(0, len(tokens), start, end)] if tokens else [], size)
    ends = [*meets, len(tokens)] if closed else meets
    pieces = [
        TimedPiece(first, last, step(first), step(last - 1))
        for first, last in zip([0, *ends], ends, strict=False)
    ]
    advance = size if closed else step(ends[-1] - 1)
    rest = ends[-1]
    if whole and not closed and rest + 1 < len(tokens):
        pieces.append(TimedPiece(rest, len(tokens), step(rest), size))
    return WindowPieces(pieces, advance if 0 < advance else size)


# Samples as what Whisper's encoder reads: log-mel frames, and windows of them.


@dataclass(frozen=True)
class Frames:
    """The log-mel frames of a recording.

    features_FS  all of them; a recording shorter than a window is padded to one by silence
    count        how many of them are sound: the rest is padding
    """

    features_FS: Tensor
    count: int

    def window(self, first: int, size: int) -> Tensor:
        """`size` frames from `first` on, [F, size]; behind the end of the recording there are
        zeros, as in the recipes that Whisper is used by."""
        if first == 0 and self.features_FS.shape[1] == size:
            return self.features_FS
        cut = self.features_FS[:, first : min(first + size, self.count)]
        return pad(cut, (0, size - cut.shape[1]))


def frames(extractor: Any, samples: Samples) -> Frames:
    """The frames of a whole recording, by the model's own extractor of transformers.

    Loudness is relative to the loudest frame of the recording, so windows are cut from these frames
    and not from the samples.
    """
    rate, hop = extractor.sampling_rate, extractor.hop_length
    long = len(samples) > extractor.n_samples
    with torch.device("cpu"):  # whatever the caller's default is
        features = extractor(
            samples,
            sampling_rate=rate,
            return_tensors="pt",
            truncation=False,
            padding="longest" if long else "max_length",
        )
    made: Tensor = features["input_features"][0]
    return Frames(made.to(torch.float32), max(1, len(samples) // hop))


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

    kind = "sequential"  #: how they are cut

    def __init__(
        self, hearing: WhisperModel, settings: TranscribeSettings, samples: Samples
    ) -> None:
        self._hearing, self._timed = hearing, settings.timed
        self._sound = frames(hearing.extractor, samples)
        other = hearing.draft_extractor
        self._draft = None if other is None else frames(other, samples)
        self._conditioned = settings.conditioned(self.kind)
        self._history = list(initial_prompt_ids(hearing, settings))
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
            pieces, advance = cut_at_timestamps(text.tokens, first, size)
        self._seek += window.count if advance >= size else stride * advance
        kept = spoken(self._hearing, pieces, text)
        if not text.silent:
            for piece in kept:
                self._history += text.tokens[piece.first : piece.last]
            if not self._conditioned or text.temperature > 0.5:
                self._since = len(self._history)
        return [DecodedWindow(window, text, inputs, kept)] if kept else []


class IndependentWindows:
    """Windows that are known beforehand and do not depend on each other: between pauses, or what a
    detector of voices (`vad`) calls speech."""

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
        self._told = tuple(initial_prompt_ids(hearing, settings))
        self._ready: dict[int, list[DecodedWindow]] = {}
        self._next, self._count = 0, len(spans)

    @property
    def done(self) -> bool:
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
            pieces = cut_at_timestamps(text.tokens, first, size, whole=True).pieces
        kept = spoken(self._hearing, pieces, text)
        self._ready[window.number] = [DecodedWindow(window, text, inputs, kept)] if kept else []
        now: list[DecodedWindow] = []
        while self._next in self._ready:
            now += self._ready.pop(self._next)
            self._next += 1
        return now


#: The windows of one recording, and what they have said.
WindowSource: TypeAlias = SequentialWindows | IndependentWindows


def initial_prompt_ids(hearing: WhisperModel, settings: TranscribeSettings) -> list[int]:
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
        return IndependentWindows(hearing, settings, samples, name)
    return SequentialWindows(hearing, settings, samples)
