"""What `/metrics` tells: vLLM's names behind a prefix of ours.

Answers are counted when they end, steps as they come.
"""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.server.engine_client import EngineClient
from outrider.server.engine_loop import EngineOutput
from outrider.server.request_parsing import ChoiceState
from outrider.server.response_builder import prompts
from outrider.speech.result import Transcript
from outrider.stats import RequestStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = tuple(2**power for power in range(15))
_NODES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_RATES = tuple(tenth / 10 for tenth in range(1, 11))


class ServerMetrics:
    """Counters, gauges and histograms of one server, in a registry of its own."""

    def __init__(self, prefix: str, model: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix, self._model = prefix, model
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read")
        self.asked = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self.copied = self._counter("prefix_cache_hits", "Prompt tokens copied from other prompts")
        self.generation_tokens = self._counter("generation_tokens", "Tokens written")
        self.seconds = self._counter("audio_seconds", "Seconds of recordings transcribed")
        self.drafts = self._counter("spec_decode_num_drafts", "Steps that drafted")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens kept")
        self.per_position = Counter(
            f"{prefix}spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens kept by their place in the draft",
            ["model_name", "position"],
            registry=self.registry,
        )
        self.ended = Counter(
            f"{prefix}request_success",
            "Requests by why they ended: stop, length, context, cancelled, error",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.refused = self._counter("admission_rejections", "Requests refused for a full queue")
        self.first = self._histogram("time_to_first_token_seconds", "From arrival to first tokens")
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end")
        self.queued = self._histogram("request_queue_time_seconds", "Waiting for a row")
        self.read = self._histogram("request_prefill_time_seconds", "From a row to first tokens")
        self.decoded = self._histogram("request_decode_time_seconds", "From first tokens to last")
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Decoding time by tokens after the first"
        )
        self.between = self._histogram(
            "inter_token_latency_seconds", "Since the tokens before, by those that came together"
        )
        self.rate = self._histogram(
            "request_acceptance_rate", "Share of a request's drafted tokens that were kept", _RATES
        )
        self.step_seconds = self._histogram("step_seconds", "Of a step that wrote something")
        self.step_tokens = self._histogram(
            "iteration_tokens_total",
            "Tokens that a step wrote, and prompts that were read",
            _TOKENS,
        )
        self.nodes = self._histogram(
            "planner_nodes", "Of a step: most drafted tokens of a row, and its pending one", _NODES
        )

    def register(self, engine: EngineClient) -> None:
        """Gauges of the engine's load, read when somebody asks."""
        for name, text, read in (
            ("num_requests_running", "Rows under way", lambda: engine.load.running),
            ("num_requests_waiting", "Requests in the queue", lambda: engine.load.waiting),
            (
                "kv_cache_usage_perc",
                "Rows under way by rows there are: each has a cache of its own; 1 is full",
                lambda: engine.load.running / engine.load.rows,
            ),
        ):
            gauge = Gauge(self._prefix + name, text, ["model_name"], registry=self.registry)
            gauge.labels(self._model).set_function(read)

    def on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Count the steps that brought these."""
        for output in outputs:
            if output.step is not None:
                self.step_seconds.observe(output.step.seconds)
                self.step_tokens.observe(output.step.tokens)
                self.nodes.observe(output.step.nodes)

    def on_finish(self, choices: Sequence[ChoiceState]) -> None:
        """Count an answer, whole or cut off by its client."""
        read, copied = prompts([choice for choice in choices if choice.scheduled is not None])
        self.prompt_tokens.inc(read)
        self.asked.inc(read)
        self.copied.inc(copied)
        for choice in choices:
            self._count(choice)

    def on_transcript(self, transcript: Transcript, arrived: float, scheduled: float) -> None:
        """Count a recording that was transcribed."""
        stats, now = transcript.stats.decoded, time.monotonic()
        self.seconds.inc(transcript.duration)
        self._count_tokens(stats)
        self.ended.labels(self._model, "stop").inc()
        self.queued.observe(scheduled - arrived)
        self.whole.observe(now - arrived)

    def _count_tokens(self, stats: RequestStats) -> None:
        """What was drafted, and kept."""
        self.generation_tokens.inc(stats.new_tokens)
        self.drafts.inc(stats.steps)
        self.drafted.inc(stats.drafted)
        self.accepted.inc(stats.accepted)
        for place, kept in enumerate(stats.accepted_per_position):
            self.per_position.labels(self._model, place).inc(kept)
        if stats.drafted:
            self.rate.observe(stats.draft_acceptance_rate)

    def _count(self, choice: ChoiceState) -> None:
        stats = choice.stats
        self._count_tokens(stats)
        self.ended.labels(self._model, choice.reason or "cancelled").inc()
        if choice.scheduled is not None:
            self.queued.observe(choice.scheduled - choice.arrived)
        if choice.first is None or choice.last is None:
            return
        self.first.observe(choice.first - choice.arrived)
        if choice.scheduled is not None:
            self.read.observe(choice.first - choice.scheduled)
        for wait in choice.waits:
            self.between.observe(wait)
        self.whole.observe(choice.last - choice.arrived)
        self.decoded.observe(choice.last - choice.first)
        if stats.new_tokens > 1:
            self.per_token.observe((choice.last - choice.first) / (stats.new_tokens - 1))

    def render(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(self._prefix + name, text, ["model_name"], registry=self.registry)
        return counter.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        histogram = Histogram(
            self._prefix + name, text, ["model_name"], buckets=buckets, registry=self.registry
        )
        return histogram.labels(self._model)
