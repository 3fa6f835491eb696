"""Recordings side by side: read, cut, encoded once, decoded together, told segment by segment."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.engine import Engine
from outrider.errors import ConfigurationError, OutriderError
from outrider.speech import audio, captions, speech_model, word_timestamps
from outrider.speech.audio import Recording
from outrider.speech.captions import ReferenceAligner
from outrider.speech.result import Segment, SegmentStream, TranscriptStats
from outrider.speech.settings import TranscribeSettings
from outrider.speech.speech_model import WhisperModel
from outrider.speech.vocabulary import Vocabulary
from outrider.speech.window_decoder import WindowDecoder, WindowRequest, device_of
from outrider.speech.windows import AudioWindow, DecodedWindow, WindowSource, opened
from outrider.types import Inputs

# What the decoder's text begins with: earlier text, language, task, and whether times come.


def window_prompt(
    words: Vocabulary,
    language: str | None,
    task: str,
    timestamps: bool,
    previous: Sequence[int] = (),
    most_previous: int = 223,
) -> tuple[list[int], int]:
    """The prompt of a window, and the place of its start token.

        [<|startofprev|> previous text] <|startoftranscript|> [<|en|> <|transcribe|>]
        [<|notimestamps|>]

    `previous` loses its beginning beyond `most_previous` tokens. Models without <|startofprev|>
    are not told earlier text, English-only models neither language nor task.
    """
    ids: list[int] = []
    if previous and words.previous_id is not None:
        ids += [words.previous_id, *previous[-most_previous:]]
    start = len(ids)
    ids.append(words.start_id)
    if words.multilingual:
        assert language is not None, "a language is given or detected before"
        ids += [words.languages[language], words.tasks[task]]
    if not timestamps:
        ids.append(words.no_timestamps_id)
    return ids, start


@dataclass(eq=False)
class _RecordingState:
    """One recording being transcribed."""

    number: int
    recording: Recording
    windows: WindowSource
    language: str | None
    script: ReferenceAligner | None
    stats: TranscriptStats
    segments: list[Segment] = field(default_factory=list)
    jobs: dict[WindowRequest, AudioWindow] = field(default_factory=dict)


class Transcription(SegmentStream):
    """The segments of one recording or several, as they are heard. Made by
    `Speculator.transcribe_stream`.

    Recordings are looked at before any work is done, and read when their turn comes. One that fails
    on the way is named in `errors`, and the others go on.

    >>> for segment in transcription:                           # doctest: +SKIP
    ...     print(segment.recording, segment.start, segment.text)
    >>> transcription.transcripts[0].text                       # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        hearing: WhisperModel,
        recordings: Sequence[Recording],
        settings: TranscribeSettings,
        several: bool = True,
    ) -> None:
        super().__init__(recordings, several)
        self.settings = settings
        self._hearing, self._engine = hearing, engine
        vocabulary = hearing.vocabulary
        self._language = vocabulary.language(settings.language, hearing.name)
        self._task = vocabulary.task(settings.task, hearing.name)
        self._references = _references(settings.reference, len(self.recordings))

        self._rows = WindowDecoder(engine, hearing, settings)
        self._tracks: list[_RecordingState] = []

    def _under_way(self) -> Sequence[_RecordingState]:
        return self._tracks

    def _turn(self) -> None:
        """Begin windows while there is room, one step of the decoder, tell what is over."""
        self._begin()
        for job in self._rows.step() if self._rows.jobs else ():
            track = next(track for track in self._tracks if job in track.jobs)
            if job.error is not None:
                self._fail(track, job.error)
            else:
                self._tell(track, job)
        for track in list(self._tracks):
            if track.windows.done and not track.jobs:
                self._finish(track)

    def _begin(self) -> None:
        """Encode windows and hand them to the decoder, until as many as asked for are under way."""
        found: list[tuple[_RecordingState, AudioWindow]] = []
        room = self.settings.rows - len(self._rows.jobs)
        for track in self._every():
            while len(found) < room and (window := track.windows.take()) is not None:
                found.append((track, window))
            if len(found) >= room:
                break
        if not found:
            return
        device, target = device_of(self._engine), self._engine.target
        each = [speech_model.one_row(window.features_FS, device) for _, window in found]
        for at, (_, window) in enumerate(found):
            if window.draft_FS is not None:
                each[at] = each[at]._replace(draft=speech_model.one_row(window.draft_FS, device))
        inputs, spent = speech_model.encode(target, each)
        for (track, window), read in zip(found, inputs, strict=True):
            track.stats.windows += 1
            track.stats.encoder_ms += spent / len(found)
            if track.language is None and self._hearing.vocabulary.multilingual:
                started = time.perf_counter()
                track.language = speech_model.language(target, self._hearing.vocabulary, read)
                track.stats.decoder_ms += 1e3 * (time.perf_counter() - started)
            job = self._job(track, window, read)
            track.jobs[job] = window
            try:
                self._rows.add(job)
            except OutriderError as error:
                self._fail(track, error)

    def _every(self) -> Iterator[_RecordingState]:
        """Recordings under way, then those that wait, opened as they are asked for."""
        yield from list(self._tracks)
        while self._waiting:
            number = self._waiting.popleft()
            try:
                track = self._open(number)
            except OutriderError as error:
                self.errors[number] = error
                continue
            self._tracks.append(track)
            yield track

    def _open(self, number: int) -> _RecordingState:
        recording, rate = self.recordings[number], self._hearing.rate
        started = time.perf_counter()
        samples = recording.read(rate)
        windows = opened(self._hearing, self.settings, samples, recording.name)
        seconds = len(samples) / rate
        stats = TranscriptStats(audio_seconds=seconds)
        stats.features_ms = 1e3 * (time.perf_counter() - started)
        lines = self._references[number]
        script = None if lines is None else ReferenceAligner(lines, self._hearing.encode, seconds)
        return _RecordingState(number, recording, windows, self._language, script, stats)

    def _job(self, track: _RecordingState, window: AudioWindow, inputs: Inputs) -> WindowRequest:
        ear = self._hearing
        ids, start = self._prompt(track, window)
        reference: list[int] = []
        if track.script is not None:
            begin = ear.seconds(window.first)
            end = ear.seconds(window.first + window.count)
            reference = track.script.tokens(begin, end, not window.whole)
        seed = self.settings.seed + 65536 * window.number
        return WindowRequest(inputs, ids, start, seed, reference)

    def _prompt(self, track: _RecordingState, window: AudioWindow) -> tuple[list[int], int]:
        """What a window's text begins with, and the place of its start token."""
        return window_prompt(
            self._hearing.vocabulary,
            track.language,
            self._task,
            self.settings.timed,
            window.previous,
            self._hearing.context // 2 - 1,
        )

    def _tell(self, track: _RecordingState, job: WindowRequest) -> None:
        """A window's text is there."""
        text, window = job.text, track.jobs.pop(job)
        assert text is not None
        stats = track.stats
        stats.attempts += job.attempts
        stats.decoder_ms += job.milliseconds
        stats.silent += text.silent
        stats.decoded.add(job.decoded)
        for heard in track.windows.hear(window, text, job.inputs):
            started = time.perf_counter()
            fresh = self._segments(track, heard)
            stats.words_ms += 1e3 * (time.perf_counter() - started)
            track.segments += fresh
            self._ready += fresh
            if track.script is not None:
                track.script.follow("".join(segment.text for segment in fresh))

    def _segments(self, track: _RecordingState, heard: DecodedWindow) -> list[Segment]:
        """A window's pieces as segments, with words if they are asked for."""
        window, text, ear = heard.window, heard.text, self._hearing
        said = None
        if self.settings.timestamps == "word":
            head, _ = self._prompt(track, window)
            said = word_timestamps.of_window(ear, heard, head, track.language)
        return [
            Segment(
                ear.text(text.tokens[piece.first : piece.last]),
                ear.seconds(window.first + ear.stride * piece.start),
                ear.seconds(window.first + ear.stride * piece.end),
                text.tokens[piece.first : piece.last],
                text.temperature,
                text.avg_logprob,
                text.compression_ratio,
                text.no_speech_prob,
                window.number,
                round(100 * ear.seconds(window.first)),
                track.number,
                None if said is None else said[at],
            )
            for at, piece in enumerate(heard.pieces)
        ]

    def _finish(self, track: _RecordingState) -> None:
        self._tracks.remove(track)
        self._tell_transcript(track, track.language, self.settings.told(track.windows.kind))

    def _fail(self, track: _RecordingState, error: Exception) -> None:
        """This recording is over."""
        self._tell_error(track.number, error)
        self._rows.drop(list(track.jobs))
        self._tracks.remove(track)


def _references(given: Any, count: int) -> list[list[captions.CaptionLine] | None]:
    """The lines to copy from of each recording."""
    if given is None:
        return [None] * count
    each = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(each) != count:
        raise ConfigurationError(
            f"reference must be one for each recording; got {len(each)} for {count}; give as many, "
            "with None for one without"
        )
    return [None if one is None else captions.read(one) for one in each]


def transcription(
    engine: Engine, hearing: WhisperModel, given: Any, settings: TranscribeSettings
) -> Transcription:
    """One recording or several, looked at and checked.

    Raises AudioError for what is missing or empty, ConfigurationError for settings that the model
    cannot honour, before any work is done.
    """
    recordings, several = audio.look_at_all(given, settings.sampling_rate, hearing.rate)
    return Transcription(engine, hearing, recordings, settings, several)
