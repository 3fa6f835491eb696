"""What users hold: a model pair with its tokenizer. Text in, text and statistics out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from outrider import verifiers
from outrider.blocks import HostBlock
from outrider.drafters import Root
from outrider.engine import Engine, Run
from outrider.errors import ConfigurationError, PromptError
from outrider.request import Limits, spread
from outrider.sampling import Sampling
from outrider.stats import RequestStats, Stats
from outrider.text import Detokenizer, encode
from outrider.types import Drafter, Verifier

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Stop:
    """When a request ends, besides the model's context.

    max_new_tokens  token budget (None: to the end of the context; the caches grow with the text)
    strings         stop strings; the text ends before the first one
    token_ids       stop tokens; None means the model's own end-of-sequence tokens
    """

    max_new_tokens: int | None = 128
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.strings, str):
            raise ConfigurationError(
                f"strings must be a tuple of stop strings; got the string {self.strings!r}; "
                f"write strings=({self.strings!r},)"
            )
        if not all(self.strings):
            raise ConfigurationError(
                f"a stop string is empty; got strings={self.strings!r}; remove it"
            )
        Limits(self.max_new_tokens)  # refuses a budget below 1


@dataclass(frozen=True)
class Completion:
    """One finished request. `token_ids` include the stop token, `text` does not.

    `logprobs` are of the law each token was emitted from: penalties, temperature and filters are
    in. Greedy requests report the law at temperature 1.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: RequestStats
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class Generation:
    """All completions of a call, in the order of the prompts, and the totals."""

    completions: list[Completion]
    stats: Stats

    @property
    def texts(self) -> list[str]:
        """The completions' texts."""
        return [c.text for c in self.completions]


@dataclass(frozen=True)
class TextBlock:
    """What one step emitted for one request."""

    row: int
    text: str
    token_ids: list[int]
    accepted: int
    finish_reason: str | None
    block: HostBlock  #: the tokens as they left the engine, with the trace if one was asked for


class Speculator:
    """A target, a drafter, a rule and a tokenizer. Made by `outrider.load`.

    >>> import outrider
    >>> speculator = outrider.load()                                        # doctest: +SKIP
    >>> speculator.generate("def add(a, b):", stop=outrider.Stop(16)).texts  # doctest: +SKIP
    """

    def __init__(
        self, engine: Engine, tokenizer: Any = None, eos_ids: Sequence[int] = (), notes: Any = None
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.eos_ids = tuple(eos_ids)
        self.notes = notes  #: how it was loaded: dtype, threads, packing, cost curve

    def using(self, drafter: Drafter, rule: Verifier | None = None) -> "Speculator":
        """The same target and tokenizer with another drafter and rule: nothing is loaded again."""
        engine = Engine(self.engine.target, drafter, rule)
        return Speculator(engine, self.tokenizer, self.eos_ids, self.notes)

    def plain(self, coupled: bool = False) -> "Speculator":
        """Ordinary decoding with the same target; `coupled` uses the noise of coupled mode."""
        return self.using(Root(), verifiers.get("match") if coupled else None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Stop | Sequence[Stop] | None = None,
        *,
        num_return_sequences: int = 1,
        logprobs: bool = False,
        capacity: int | None = None,
    ) -> Generation:
        """Complete one prompt or a batch; every row has its own sampling and stop settings.

        A prompt is text, token ids, or a list of messages for the chat template. With
        `num_return_sequences` each prompt's completions stand together; copy i of a seeded request
        has seed + i.
        """
        stream = self.stream(
            prompts,
            sampling,
            stop,
            num_return_sequences=num_return_sequences,
            logprobs=logprobs,
            capacity=capacity,
        )
        stream.drain()
        return stream.result()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Stop | Sequence[Stop] | None = None,
        *,
        num_return_sequences: int = 1,
        logprobs: bool = False,
        capacity: int | None = None,
        trace: bool = False,
    ) -> "Stream":
        """An iterator of TextBlocks; `result()` gives what has been generated so far."""
        if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
            raise PromptError(
                f"a prompt is text, token ids or messages; got {type(prompts).__name__}; decode "
                "bytes first, and pass several prompts as a list"
            )
        if hasattr(prompts, "tolist"):  # a tensor or an array of token ids
            prompts = prompts.tolist()
        batch: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        ids = [encode(self.tokenizer, p, i) for i, p in enumerate(batch)]
        stops = spread("stop", stop, Stop(), len(ids))
        copies = num_return_sequences
        if copies < 1:
            raise ConfigurationError(
                f"num_return_sequences must be at least 1; got {copies}; use 1 for one completion"
            )
        if copies > 1:
            each = spread("sampling", sampling, Sampling(), len(ids))
            sampling = [
                s if s.seed is None else replace(s, seed=s.seed + copy)
                for s in each
                for copy in range(copies)
            ]
            ids = [p for p in ids for _ in range(copies)]
            stops = [s for s in stops for _ in range(copies)]
        limits = [
            Limits(s.max_new_tokens, self.eos_ids if s.token_ids is None else s.token_ids)
            for s in stops
        ]
        if any(s.strings for s in stops) and self.tokenizer is None:
            raise ConfigurationError("stop strings need a tokenizer; pass tokenizer=... to load")
        run = self.engine.run(
            ids, sampling, limits, capacity=capacity, trace=trace, logprobs=logprobs
        )
        return Stream(run, self.tokenizer, stops, ids)


class Stream(Iterator[TextBlock]):
    """Blocks of text as they are decoded. Stopping to iterate early loses nothing."""

    def __init__(
        self, run: Run, tokenizer: Any, stops: Sequence[Stop], prompts: Sequence[Sequence[int]]
    ) -> None:
        self.run = run
        self._tokens: list[list[int]] = [[] for _ in stops]
        self._logprobs: list[list[float] | None] = [None for _ in stops]
        self._text = [
            Detokenizer(tokenizer, stop.strings, prompt) if tokenizer else None
            for stop, prompt in zip(stops, prompts, strict=True)
        ]

    def __iter__(self) -> "Stream":
        return self

    def drain(self) -> None:
        """Decode to the end. Rows without stop strings become text once, not block by block."""
        for block in self.run:
            words = self._text[block.row]
            if words is not None and words.stop_strings:
                self._absorb(block)
            else:
                self._keep(block.row, block.token_ids, block.logprobs)
        for row, words in enumerate(self._text):
            if words is not None and not words.stop_strings:
                words.push(self._tokens[row])
                words.finish()

    def _keep(self, row: int, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        self._tokens[row].extend(ids)
        if logprobs is not None:
            self._logprobs[row] = [*(self._logprobs[row] or []), *logprobs[: len(ids)]]

    def __next__(self) -> TextBlock:
        return self._absorb(next(self.run))

    def _absorb(self, block: HostBlock) -> TextBlock:
        ids, reason, row = block.token_ids, block.finish_reason, block.row
        text, words = "", self._text[row]
        if words is not None:
            had = len(words.ids)
            text = words.push(ids)
            if words.stopped_at is not None:
                extra = len(ids) - (words.stopped_at - had)
                ids, reason = ids[: words.stopped_at - had], "stop"
                self.run.halt(row)
                self.run.reasons[row] = "stop"
                for record in (self.run.requests[row], self.run.stats):
                    record.new_tokens -= extra
            elif reason is not None:
                text += words.finish()
        self._keep(row, ids, block.logprobs)
        kept = min(block.accepted, len(ids))
        shown = replace(block, token_ids=ids, accepted=kept, finish_reason=reason)
        return TextBlock(row, text, ids, kept, reason, shown)

    def result(self) -> Generation:
        """Completions so far; a request that is still running has finish_reason "running"."""
        run = self.run
        done = [
            Completion(
                words.text if words is not None else "",
                self._tokens[row],
                run.reasons[row] or "running",
                run.requests[row],
                self._logprobs[row],
            )
            for row, words in enumerate(self._text)
        ]
        return Generation(done, run.stats)


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    return isinstance(prompts[0], (Integral, Mapping))
