"""Recordings heard by audio language models: each window is a question, its answer the text.

Such a model writes no times, so recordings are cut at pauses (or where somebody speaks), windows
are decoded side by side, and a segment is what was said in one of them.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Logprobs, Request, StopConditions
from outrider.errors import ConfigurationError, OutriderError
from outrider.sampling.sampling_params import SamplingParams
from outrider.speech import audio, vad
from outrider.speech.audio import Recording, Samples
from outrider.speech.result import Segment, SegmentStream, TranscriptStats
from outrider.speech.settings import TranscribeSettings, compression_ratio
from outrider.types import Inputs, MultiModalInputs

MOST_TOKENS = 448  #: of a window's text, where nothing else is asked for: as many as a Whisper's


class SoundPrompts(Protocol):
    """An audio language model as transcription sees it."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def rate(self) -> int:
        """Samples per second that it hears."""

    @property
    def longest(self) -> float:
        """Seconds of a window, at most."""

    def asked(
        self, samples: Samples, language: str | None, told: str | None
    ) -> tuple[list[int], Inputs | MultiModalInputs]:
        """The prompt that asks for what is said, and the sound beside it."""

    def sampling(self, temperature: float, seed: int, prompt: Sequence[int]) -> SamplingParams:
        """With the rules that the model's generation configuration has for tokens."""

    def limits(self, most: int) -> StopConditions:
        """Where a text ends."""

    def within(self, limits: StopConditions, sound: Inputs | MultiModalInputs) -> StopConditions:
        """Where the text of this recording ends, at most as `limits` say."""

    def answer_text(self, tokens: Sequence[int]) -> str:
        """The text of an answer."""


@dataclass(eq=False)
class _HeardRecording:
    """One recording, window by window."""

    number: int
    samples: Samples
    spans: deque[tuple[int, tuple[float, float]]]
    stats: TranscriptStats
    running: int = 0
    told: dict[int, Segment | None] = field(default_factory=dict)  #: by window, until their turn
    segments: list[Segment] = field(default_factory=list)
    next: int = 0


@dataclass(eq=False)
class _AskedWindow:
    """A window that is being written down."""

    recording: _HeardRecording
    number: int
    span: tuple[float, float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class PromptedTranscription(SegmentStream):
    """The segments of one recording or several, in the order of each. Made by
    `Speculator.transcribe_stream` for audio language models; as `Transcription` for Whispers.

    `errors` names recordings that failed on the way; the others go on.
    """

    def __init__(
        self,
        engine: Engine,
        model: SoundPrompts,
        recordings: Sequence[Recording],
        settings: TranscribeSettings,
        several: bool = True,
    ) -> None:
        _refuse(settings, model.name)
        super().__init__(recordings, several)
        self.settings, self._model = settings, model
        self._open: list[_HeardRecording] = []
        self._rows: dict[int, _AskedWindow] = {}
        self._limits = model.limits(settings.max_new_tokens or MOST_TOKENS)
        self._run = EngineRun(engine, settings.rows, self._capacity(engine))

    def _capacity(self, engine: Engine) -> int:
        """Slots of a row: a window of the greatest length, its text, and a draft."""
        seconds = min(self._model.longest, max(one.seconds for one in self.recordings))
        silence = np.zeros(max(1, round(seconds * self._model.rate)), np.float32)
        prompt, _ = self._model.asked(silence, self.settings.language, self._told)
        most = engine.drafter.shapes[0].max_nodes
        assert self._limits.max_new_tokens is not None
        return len(prompt) + self._limits.max_new_tokens + most + 1

    @property
    def _told(self) -> str | None:
        told = self.settings.initial_prompt
        assert told is None or isinstance(told, str)
        return told

    def _under_way(self) -> Sequence[_HeardRecording]:
        return self._open

    def _turn(self) -> None:
        """Ask about windows while there is room, one step of the model, tell what is over."""
        while len(self._rows) < self.settings.rows and (one := self._with_window()) is not None:
            self._ask(one)
        if self._rows:
            self._step()
        for one in list(self._open):
            if not one.spans and not one.running:
                self._finish(one)

    def _with_window(self) -> _HeardRecording | None:
        """A recording that has a window left; the next one is read if none has."""
        found = next((one for one in self._open if one.spans), None)
        while found is None and self._waiting:
            number = self._waiting.popleft()
            recording = self.recordings[number]
            try:
                samples = recording.read(self._model.rate)
                spans = self._spans(samples, recording.name)
            except OutriderError as error:
                self._tell_error(number, error)
                continue
            stats = TranscriptStats(audio_seconds=len(samples) / self._model.rate)
            fresh = _HeardRecording(number, samples, deque(enumerate(spans)), stats)
            self._open.append(fresh)
            found = fresh if spans else None
        return found

    def _spans(self, samples: Samples, name: str) -> list[tuple[float, float]]:
        """Its windows, in seconds."""
        rate, longest = self._model.rate, self._model.longest
        if self.settings.vad is None:
            return vad.at_pauses(samples, rate, longest)
        return vad.of_speech(self.settings.vad, samples, rate, longest, name)

    def _ask(self, one: _HeardRecording) -> None:
        """Ask what is said in its next window."""
        number, (start, end) = one.spans.popleft()
        rate, settings, started = self._model.rate, self.settings, time.perf_counter()
        samples = one.samples[int(start * rate) : max(int(end * rate), int(start * rate) + 1)]
        try:
            prompt, inputs = self._model.asked(samples, settings.language, self._told)
            seed = (settings.seed + number) % 2**64
            sampling = self._model.sampling(settings.temperatures[0], seed, prompt)
            told = Logprobs(mode="shaped")
            limits = self._model.within(self._limits, inputs)
            request = Request(prompt, sampling, limits, inputs, logprobs=told)
            row = self._run.submit(request)
        except OutriderError as error:
            self._fail(one, error)
            return
        one.running += 1
        one.stats.windows += 1
        one.stats.attempts += 1
        one.stats.features_ms += 1e3 * (time.perf_counter() - started)
        self._rows[row] = _AskedWindow(one, number, (start, end))

    def _step(self) -> None:
        started, busy = time.perf_counter(), list(self._rows.values())
        for block in self._run.step():
            window = self._rows.get(block.request_id)
            if window is None:
                continue
            window.tokens += block.token_ids
            window.logprobs += block.logprobs or []
            if block.finish_reason is None:
                continue
            del self._rows[block.request_id]
            window.recording.running -= 1
            window.recording.stats.decoded.add(self._run.requests[block.request_id])
            if block.finish_reason == "error":
                self._fail(window.recording, self._run.errors[block.request_id])
            else:
                self._add_segment(window)
        share = 1e3 * (time.perf_counter() - started) / max(len(busy), 1)
        for window in busy:
            window.recording.stats.decoder_ms += share

    def _add_segment(self, window: _AskedWindow) -> None:
        """A window's text; those that were waiting for it are told behind it."""
        one = window.recording
        text = self._model.answer_text(window.tokens).strip()
        segment = None
        if text:
            logs, (start, end) = window.logprobs, window.span
            segment = Segment(
                f" {text}",
                round(start, 3),
                round(end, 3),
                tuple(window.tokens),
                self.settings.temperatures[0],
                sum(logs) / max(len(logs), 1),
                compression_ratio(text),
                0.0,
                window.number,
                round(100 * start),
                one.number,
            )
        else:
            one.stats.silent += 1
        one.told[window.number] = segment
        while one.next in one.told:
            found = one.told.pop(one.next)
            one.next += 1
            if found is not None:
                one.segments.append(found)
                self._ready.append(found)

    def _finish(self, one: _HeardRecording) -> None:
        self._open.remove(one)
        settings = self.settings.told("pauses" if self.settings.vad is None else "vad")
        self._tell_transcript(one, self.settings.language, settings)

    def _fail(self, one: _HeardRecording, error: Exception) -> None:
        """This recording is over."""
        self._tell_error(one.number, error)
        self._open.remove(one)
        for row in [row for row, window in self._rows.items() if window.recording is one]:
            self._run.end(row)
            del self._rows[row]


def _refuse(settings: TranscribeSettings, name: str) -> None:
    """Refuse what an audio language model cannot be asked for: ConfigurationError."""
    prompt = settings.initial_prompt
    asked = {
        "task": settings.task != "transcribe",
        "timestamps='word'": settings.timestamps == "word",
        "beam_size": settings.beams is not None,
        "best_of": settings.best_of is not None,
        "reference": settings.reference is not None,
        "suppress_tokens": settings.suppress_tokens is not None,
        "condition_on_previous_text": bool(settings.condition_on_previous_text),
        "initial_prompt as tokens": prompt is not None and not isinstance(prompt, str),
    }
    named = [what for what, is_asked in asked.items() if is_asked]
    if named:
        raise ConfigurationError(
            f"{name} is asked for each window of a recording in words; got {', '.join(named)}, "
            "which a Whisper model alone has; leave it out, or ask in a chat "
            "(outrider.Speculator.generate)"
        )


def prompted(
    engine: Engine, model: SoundPrompts, given: Any, settings: TranscribeSettings
) -> PromptedTranscription:
    """One recording or several, looked at and checked, before any work is done.

    Raises AudioError for what is missing or empty, ConfigurationError for settings that such a
    model cannot honour.
    """
    recordings, several = audio.look_at_all(given, settings.sampling_rate, model.rate)
    return PromptedTranscription(engine, model, recordings, settings, several)
