"""What runs in the engine's loop beside text: recordings, and prompts that are only scored."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from outrider.engine.outputs import StepOutput
from outrider.engine.request import Logprobs, Request, assign_adapters, check
from outrider.models.prefill import causal, inference
from outrider.speech.audio import Samples
from outrider.speech.prompted_transcriber import PromptedTranscription
from outrider.speech.result import Segment, Transcript
from outrider.speech.settings import TranscribeSettings
from outrider.speech.transcriber import Transcription
from outrider.types import LanguageModel

# Recordings being transcribed as a run of the engine's loop: one turn each in every step.

SPEECH = "speech"
AnyTranscription = Transcription | PromptedTranscription
W = TypeVar("W")  #: what is under way


@dataclass(frozen=True, eq=False)
class TranscriptionRequest:
    """A recording, at the rate that the model hears, and how it is to be transcribed."""

    samples: Samples
    settings: TranscribeSettings


class TranscriptionOutput(NamedTuple):
    """What one step has brought of a recording; `finish_reason` and the transcript at its end."""

    request_id: int
    segments: list[Segment]
    finish_reason: str | None = None
    transcript: Transcript | None = None


class RunTable(Generic[W]):
    """Requests under way by their ids: what `BatchRunner`s that copy nothing have in common."""

    def __init__(self) -> None:
        self._running: dict[int, W] = {}
        self._count = 0
        self.errors: dict[int, Exception] = {}

    @property
    def done(self) -> bool:
        return not self._running

    def _add(self, work: W) -> int:
        """It is under way; its id."""
        self._running[self._count] = work
        self._count += 1
        return self._count - 1

    def end(self, request_id: int, reason: str) -> None:
        self._running.pop(request_id, None)

    def release(self, request_id: int) -> None:
        self.errors.pop(request_id, None)

    def cached(self, request_id: int) -> int:
        """Nothing is copied."""
        return 0


class TranscriptionRunner(RunTable[AnyTranscription]):
    """Requests of one model that hears. A `BatchRunner`.

    `begin` is `transcription` with the model's engine, or `prompted`.
    """

    def __init__(self, begin: Callable[[TranscriptionRequest], AnyTranscription]) -> None:
        super().__init__()
        self._begin = begin

    def submit(self, request: TranscriptionRequest) -> int:
        """Take a recording; its id. Raises what the model cannot honour."""
        return self._add(self._begin(request))

    def step(self) -> list[TranscriptionOutput]:
        """A turn of each; what it brought, and who is over."""
        return [self._turn(request_id, one) for request_id, one in list(self._running.items())]

    def _turn(self, request_id: int, one: AnyTranscription) -> TranscriptionOutput:
        try:
            segments = one.step()
        except Exception as error:  # this recording's own
            self.errors[request_id] = error
            del self._running[request_id]
            return TranscriptionOutput(request_id, [], "error")
        if not one.done:
            return TranscriptionOutput(request_id, segments)
        del self._running[request_id]
        if one.errors:
            self.errors[request_id] = one.errors[0]
            return TranscriptionOutput(request_id, segments, "error")
        return TranscriptionOutput(request_id, segments, "stop", one.transcripts[0])


SCORES = "prompt_scores"
CHUNK = 128  #: tokens that are read between two steps of those who write


@dataclass
class _PromptRead:
    request: Request
    asked: Logprobs
    cache: Any
    read: int = 0
    logs: list[float] = field(default_factory=list)
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)


class PromptScores(RunTable[_PromptRead]):
    """Prompts being read, a piece of each in every step. A `BatchRunner`.

    The one block of a request has no tokens, and `logprobs` and `likeliest` for every token of its
    prompt but the first one, by the model's own law.
    """

    def __init__(self, target: LanguageModel) -> None:
        super().__init__()
        self._target = target

    def submit(self, request: Request) -> int:
        """Take a prompt; its id. Raises what is wrong with it."""
        check(request, self._count, self._target, False)
        assert request.logprobs is not None
        cache = self._target.open(1, self._target.width(len(request.prompt)))
        assign_adapters(cache, [request])
        return self._add(_PromptRead(request, request.logprobs, cache))

    def step(self) -> list[StepOutput]:
        """Read a piece of each prompt; the blocks of those that are read."""
        over = []
        for request_id, one in list(self._running.items()):
            self._read(one)
            if one.read + 1 >= len(one.request.prompt):
                del self._running[request_id]
                logs = StepOutput(request_id, [], 0, "length", 0, None, one.logs, one.likeliest)
                over.append(logs)
        return over

    @inference
    def _read(self, one: _PromptRead) -> None:
        prompt, start = one.request.prompt, one.read
        stop = min(start + CHUNK, len(prompt) - 1)
        if stop == start:
            return
        device = torch.device(self._target.device)
        tokens_BQ = torch.tensor([prompt[start:stop]], device=device)
        at_BQ = torch.arange(start, stop, device=device)[None]
        wide = min(self._target.width(stop), self._target.width(len(prompt)))
        logits = self._target.forward(one.cache, causal(tokens_BQ, at_BQ, wide)).logits_BQV[0]
        logs_QV = logits.float().log_softmax(-1)
        next_Q1 = torch.tensor(prompt[start + 1 : stop + 1], device=device)[:, None]
        one.logs += logs_QV.gather(1, next_Q1)[:, 0].tolist()
        top = logs_QV.topk(min(one.asked.top, logs_QV.shape[-1]), -1)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        one.likeliest += [list(zip(ids, values, strict=True)) for ids, values in rows]
        one.read = stop
