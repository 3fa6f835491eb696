"""Windows as requests of one run: side by side, again at another temperature, best of several.

The encoder's states of a window are kept until its text will do: no fallback hears it again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.beam_search import Beams
from outrider.engine.beam_search.lookahead import LookaheadDepth
from outrider.engine.beam_search.search import admit, search
from outrider.engine.beam_search.step import State
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Logprobs, Request, StopConditions, check
from outrider.sampling.sampling_params import SamplingParams
from outrider.sampling.timestamps import Timestamps
from outrider.speech.settings import TranscribeSettings, compression_ratio, needs_fallback, silent
from outrider.speech.speech_model import WhisperModel
from outrider.stats import RequestStats
from outrider.types import Inputs

# Windows by beam search, side by side: the best beam of each with its log-probabilities.
#
# A beam's score counts what penalties and bans have left of the law without making it a law again.
# Whether a text will do is judged as for other texts: by the law of what is allowed.


class BestBeam(NamedTuple):
    """A window's best beam."""

    tokens: list[int]
    logprobs: list[float]  #: at temperature 1, of the law of what is allowed
    watched_V: Tensor | None  #: logits behind the watched place of the prompt
    stats: RequestStats


class _AllowedTokens:
    """For every step of every window, how probable all that is allowed was behind each beam."""

    def __init__(self, rows: int) -> None:
        self.steps: list[list[Tensor]] = [[] for _ in range(rows)]

    def __call__(self, row: int, state: State, logs_WV: Tensor) -> None:
        """Log-probabilities [W] of all that is allowed."""
        self.steps[row].append(torch.logsumexp(logs_WV, -1))

    def along(self, row: int, beams: Sequence[int]) -> list[float]:
        """Of the beams that a text went on from."""
        table = torch.stack(self.steps[row][: len(beams)]).tolist()
        return [line[beam] for line, beam in zip(table, beams, strict=True)]


def searched(
    engine: Engine, requests: Sequence[Request], beams: Beams, pace: LookaheadDepth
) -> list[BestBeam]:
    """The best beam of each request. Calls are shared: each is told all of them as its steps.

    `pace` knows how far ahead it pays to score; it learns from one search for the next.
    """
    allowed = _AllowedTokens(len(requests))
    found = search(engine.target, engine.drafter, requests, beams, pace=pace, observe=allowed)
    done = []
    for row, (best, *_) in enumerate(found.hypotheses):
        stats = RequestStats(
            prompt_tokens=len(requests[row].prompt),
            new_tokens=len(best.token_ids),
            steps=found.counts.calls,
        )
        stats.seconds = found.seconds
        given = allowed.along(row, best.beams)
        logprobs = [own - all_ for own, all_ in zip(best.logprobs, given, strict=True)]
        done.append(BestBeam(best.token_ids, logprobs, found.watched[row], stats))
    return done


@dataclass(frozen=True)
class WindowText:
    """What was heard in a window, in the end."""

    tokens: tuple[int, ...]  #: without the end
    logprobs: tuple[float, ...]  #: of the tokens and, if it came, of the end, at temperature 1
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    silent: bool


@dataclass(eq=False)
class WindowRequest:
    """A window to be decoded, and what has become of it."""

    inputs: Inputs  #: encoded
    prompt: list[int]
    start: int  #: place of the start token in the prompt
    seed: int
    reference: list[int] = field(default_factory=list)
    decoded: RequestStats = field(default_factory=RequestStats)
    attempts: int = 0
    milliseconds: float = 0.0  #: its share of the decoder's
    level: int = 0  #: which of the temperatures is tried
    no_speech_prob: float = 0.0
    text: WindowText | None = None
    error: Exception | None = None
    _told: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    _left: set[int] = field(default_factory=set)


class WindowDecoder:
    """A run of the engine in which windows come and go.

    With beams, texts at temperature 0 are searched instead: all windows that wait, side by side.
    """

    def __init__(self, engine: Engine, hearing: WhisperModel, settings: TranscribeSettings) -> None:
        self.hearing, self.settings = hearing, settings
        words = hearing.vocabulary
        copies = settings.best_of or 1
        self.engine, self.beams = engine, settings.beams
        if self.beams is not None:
            admit(engine.drafter)
        self._pace = LookaheadDepth(engine.drafter.shapes[0].max_depth)  # of all windows
        self._searching: list[tuple[WindowRequest, Request]] = []
        self.run = EngineRun(engine, settings.rows * copies)
        budget = settings.max_new_tokens or hearing.context // 2
        self._limits = StopConditions(budget, (words.end_id,))
        self._bans = dict.fromkeys(settings.suppressed(words.suppress), -float("inf"))
        self._stamps = None
        if settings.timed:
            self._stamps = Timestamps(words.no_timestamps_id, words.end_id, words.max_initial)
        self.jobs: list[WindowRequest] = []
        self._of: dict[int, WindowRequest] = {}

    def add(self, job: WindowRequest) -> None:
        """Decode a window beside the others. Raises its error if it cannot be decoded here."""
        self._try(job)
        self.jobs.append(job)

    def drop(self, jobs: Sequence[WindowRequest]) -> None:
        """Nobody wants these any more."""
        for request_id, job in list(self._of.items()):
            if job in jobs and self.run.reasons[request_id] is None:
                self.run.end(request_id)
        self._of = {request_id: job for request_id, job in self._of.items() if job not in jobs}
        self._searching = [one for one in self._searching if one[0] not in jobs]
        self.jobs = [job for job in self.jobs if job not in jobs]

    def step(self) -> list[WindowRequest]:
        """One step of all rows; the jobs that are over, with a text or an error."""
        started = time.perf_counter()
        busy, over = list(self.jobs), self._search()
        for block in self.run.step():
            job = self._of.get(block.request_id)
            if job is None:
                continue
            tokens, logs = job._told[block.request_id]
            tokens += block.token_ids
            logs += block.logprobs or []
            if block.finish_reason is None:
                continue
            job._left.discard(block.request_id)
            job.decoded.add(self.run.requests[block.request_id])
            if block.finish_reason == "error":
                job.error = self.run.errors[block.request_id]
            if job.error is not None or (not job._left and self._ended(job)):
                over.append(job)
        share = 1e3 * (time.perf_counter() - started) / max(len(busy), 1)
        for job in busy:
            job.milliseconds += share
        self.drop(over)
        return over

    def _search(self) -> list[WindowRequest]:
        """The windows that wait for beams; those whose text will do."""
        turn, self._searching = self._searching, []
        if not turn:
            return []
        assert self.beams is not None
        found = searched(self.engine, [request for _, request in turn], self.beams, self._pace)
        over = []
        for (job, _), one in zip(turn, found, strict=True):
            job.decoded.add(one.stats)
            if self._settled(job, [(one.tokens, one.logprobs)], one.watched_V):
                over.append(job)
        return over

    def _try(self, job: WindowRequest) -> None:
        """Ask for the window's text at the job's temperature."""
        temperature = self.settings.temperatures[job.level]
        copies = (self.settings.best_of or 1) if temperature else 1
        requests = [
            Request(
                job.prompt,
                self._sampling(temperature, job.seed + 4096 * job.level + copy),
                self._limits,
                job.inputs,
                job.reference,
                job.start if not job.level and not copy else None,
                Logprobs(mode="shaped"),
            )
            for copy in range(copies)
        ]
        job.attempts += copies
        if self.beams is not None and not temperature:
            target = self.engine.target
            check(requests[0], len(self._searching), target, target.reads != "text")
            self._searching.append((job, requests[0]))
            return
        request_ids = self.run.submit_all(requests)
        job._told = {request_id: ([], []) for request_id in request_ids}
        job._left = set(request_ids)
        self._of |= dict.fromkeys(request_ids, job)

    def _sampling(self, temperature: float, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature,
            seed=seed % 2**64,
            logit_bias=self._bans,
            begin_suppress_tokens=self.hearing.vocabulary.begin_suppress,
            timestamps=self._stamps,
        )

    def _ended(self, job: WindowRequest) -> bool:
        """Whether what its rows wrote will do."""
        watched = self.run.prompt_logits(min(job._told))
        for request_id in job._told:
            self._of.pop(request_id, None)
        return self._settled(job, list(job._told.values()), watched)

    def _settled(
        self,
        job: WindowRequest,
        texts: Sequence[tuple[list[int], list[float]]],
        watched_V: Tensor | None,
    ) -> bool:
        """Whether the best of what was written will do, or there is no temperature left.

        `texts` are tokens with their log-probabilities, `watched_V` logits behind the start token.
        """
        end = self.hearing.vocabulary.end_id
        if watched_V is not None:
            chance = watched_V.float().softmax(-1)[self.hearing.vocabulary.no_speech_id]
            job.no_speech_prob = float(chance)

        def mean(told: tuple[list[int], list[float]]) -> float:
            tokens, logs = told
            return sum(logs) / (len(tokens) + (tokens[-1:] != [end]))

        tokens, logs = max(texts, key=mean)
        logprob = mean((tokens, logs))
        spoken = tuple(tokens[:-1] if tokens[-1:] == [end] else tokens)
        text = self.hearing.text(spoken)
        limits, silence = self.settings.thresholds, job.no_speech_prob
        ratio = compression_ratio(text) if text else 0.0
        more = job.level + 1 < len(self.settings.temperatures)
        if more and needs_fallback(limits, ratio, logprob, silence):
            job.level += 1
            self._try(job)
            return False
        job.text = WindowText(
            spoken,
            tuple(logs),
            text,
            self.settings.temperatures[job.level],
            logprob,
            ratio,
            silence,
            silent(limits, silence, logprob),
        )
        return True


def device_of(engine: Engine) -> torch.device:
    """Where inputs of this engine's target lie."""
    return torch.device(engine.target.device)
