"""`/v1/audio/transcriptions` and `/v1/audio/translations`: OpenAI's forms, and their answers, for
Whisper models; the former for audio language models, too."""

import asyncio
import json
import math
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Request as HttpRequest, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.errors import AudioError, OutriderError
from outrider.server.batch_runners import SPEECH, TranscriptionOutput, TranscriptionRequest
from outrider.server.engine_client import EngineClient
from outrider.server.engine_loop import Broken, EngineRequest, EngineStoppedError, QueueFullError
from outrider.server.errors import APIError, response, to_response, unknown_model
from outrider.server.messages import FieldError, JsonObject
from outrider.server.metrics import ServerMetrics
from outrider.server.model_info import SpeechModelInfo
from outrider.server.serving import unless_gone
from outrider.speech import audio
from outrider.speech.audio import Samples
from outrider.speech.formats import written
from outrider.speech.result import Segment, Transcript
from outrider.speech.settings import TEMPERATURES, TranscribeSettings
from outrider.speech.vocabulary import language_name

MOST_SECONDS = 4 * 3600.0  #: of a recording; a small file may hold much silence

Blocks = AsyncGenerator[TranscriptionOutput, None]


class TranscriptionForm(BaseModel):
    """`POST /v1/audio/transcriptions`, a form of several parts. No field but these.

    That of translations is the same: `language` is the one that is heard.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    file: UploadFile
    model: str = ""  #: "": the one that is served
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: float = Field(0.0, ge=0, le=1)
    timestamp_granularities: list[Literal["word", "segment"]] = Field(
        [], alias="timestamp_granularities[]"
    )
    stream: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    timeout: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> "TranscriptionForm":
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise FieldError(
                "timestamp_granularities",
                "timestamp_granularities need response_format 'verbose_json'",
            )
        if self.stream and self.response_format not in ("json", "text"):
            raise FieldError(
                "response_format",
                "a stream has text alone: response_format must be 'json' or 'text'",
            )
        return self


@dataclass(frozen=True)
class TranscriptionHandler:
    """Transcribes what clients send, or translates it into English, by one engine."""

    known: SpeechModelInfo
    names: tuple[str, ...]
    engine: EngineClient
    counts: ServerMetrics
    timeout: float
    task: str = "transcribe"

    async def answer(self, http: HttpRequest, form: TranscriptionForm) -> Response:
        """The transcript, or a stream of it."""
        try:
            settings = self._settings(form)
            raw = await form.file.read()
            samples = await asyncio.to_thread(self._samples, raw, form.file.filename or "")
        except Exception as error:
            return response(error)
        wait = min(form.timeout or self.timeout, self.timeout)
        blocks = self._blocks(TranscriptionRequest(samples, settings), time.monotonic() + wait)
        try:
            first = await unless_gone(http, anext(blocks))
        except Exception as error:
            if isinstance(error, QueueFullError):
                self.counts.refused.inc()
            return response(error)
        if first is None:
            await blocks.aclose()
            return Response(status_code=499)
        if form.stream:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            events = self._events(first, blocks)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)

        async def rest() -> Transcript | None:
            last = first
            async for heard in blocks:
                last = heard
            return last.transcript

        try:
            transcript = await unless_gone(http, rest())
        except Exception as error:
            return response(error)
        if transcript is None:
            return Response(status_code=499)
        return _whole(transcript, form, self.task)

    def _settings(self, form: TranscriptionForm) -> TranscribeSettings:
        if form.model and form.model not in self.names:
            raise unknown_model(form.model, self.names)
        try:
            if self.known.vocabulary is not None:
                self.known.vocabulary.language(form.language, self.known.name)
        except OutriderError as error:
            raise APIError(str(error), "language") from error
        if self.known.vocabulary is not None:
            self.known.vocabulary.task(self.task, self.known.name)
        return TranscribeSettings(
            language=form.language,
            task=self.task,
            temperature=form.temperature or TEMPERATURES,
            initial_prompt=form.prompt,
            timestamps="word" if "word" in form.timestamp_granularities else "segment",
            seed=form.seed,
        )

    def _samples(self, raw: bytes, name: str) -> Samples:
        """What was sent as samples; the file that it is read from is gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            path = Path(folder) / f"recording{Path(name).suffix[:8]}"
            path.write_bytes(raw)
            try:
                recording = audio.look(path, 0, None, self.known.rate)
                if recording.seconds > MOST_SECONDS:
                    raise APIError(f"the recording has more than {MOST_SECONDS:g} seconds", "file")
                return recording.read(self.known.rate)
            except AudioError as error:
                said = str(error).replace(str(path), "the recording")
                raise APIError(said, "file") from error

    async def _blocks(self, spoken: TranscriptionRequest, deadline: float) -> Blocks:
        """What is heard, as it comes. Raises what went wrong; ends what is left then."""
        asked = EngineRequest(SPEECH, spoken, deadline)
        try:
            async with aclosing(self.engine.stream([asked])) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise output.error
                    heard = output.block
                    assert isinstance(heard, TranscriptionOutput)
                    if heard.transcript is not None and output.scheduled is not None:
                        self.counts.on_transcript(heard.transcript, asked.arrived, output.scheduled)
                    yield heard
        except EngineStoppedError as error:
            fault = self.engine.fault
            raise (error if fault is None else Broken(str(fault))) from error

    async def _events(self, first: TranscriptionOutput, blocks: Blocks) -> AsyncIterator[bytes]:
        """Server-sent events, one for each segment; a fault is the last event."""
        text = ""

        def of(heard: TranscriptionOutput) -> list[JsonObject]:
            nonlocal text
            found: list[JsonObject] = []
            for segment in heard.segments:
                delta = segment.text if text else segment.text.lstrip()
                text += delta
                if delta:
                    found.append({"type": "transcript.text.delta", "delta": delta})
            if heard.transcript is not None:
                usage = _usage(heard.transcript)
                done = {"type": "transcript.text.done", "text": heard.transcript.text}
                found.append(done | {"usage": usage})
            return found

        try:
            for event in of(first):
                yield _event(event)
            async for heard in blocks:
                for event in of(heard):
                    yield _event(event)
        except Exception as error:
            yield _event(to_response(error)[1])
        finally:
            await blocks.aclose()


def _event(told: JsonObject) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def _usage(transcript: Transcript) -> JsonObject:
    """What was heard, in seconds begun."""
    return {"type": "duration", "seconds": math.ceil(transcript.duration)}


def _whole(transcript: Transcript, form: TranscriptionForm, task: str) -> Response:
    kind = form.response_format
    if kind == "json":
        return JSONResponse({"text": transcript.text, "usage": _usage(transcript)})
    if kind == "text":
        return PlainTextResponse(transcript.text + "\n")
    if kind in ("srt", "vtt"):
        return PlainTextResponse(written(transcript, kind))
    return JSONResponse(_verbose(transcript, form.timestamp_granularities or ["segment"], task))


def _verbose(transcript: Transcript, granularities: list[Any], task: str) -> JsonObject:
    heard = language_name(transcript.language or "en")
    whole: JsonObject = {
        "task": task,
        "language": heard if task == "transcribe" else "english",  # that of the text
        "duration": transcript.duration,
        "text": transcript.text,
        "usage": _usage(transcript),
    }
    if "segment" in granularities:
        whole["segments"] = [_segment(at, one) for at, one in enumerate(transcript.segments)]
    if "word" in granularities:
        whole["words"] = [
            {"word": word.word.strip(), "start": word.start, "end": word.end}
            for segment in transcript.segments
            for word in segment.words or ()
        ]
    return whole


def _segment(number: int, segment: Segment) -> JsonObject:
    return {
        "id": number,
        "seek": segment.seek,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
