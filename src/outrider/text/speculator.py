"""What users hold: a model pair with its tokenizer. Text in, text and statistics out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, overload

from outrider import arguments, verifiers
from outrider.drafters import ReferenceLookup, Root
from outrider.engine.blocks import HostBlock
from outrider.engine.engine import Engine, Run
from outrider.engine.request import Limits, spread
from outrider.errors import ConfigurationError
from outrider.laws.sampling import Sampling
from outrider.speech.audio import Audio
from outrider.speech.hearing import Hearing
from outrider.speech.result import Transcript
from outrider.speech.settings import Options as SpeechOptions
from outrider.speech.settings import Settings
from outrider.speech.transcriber import Transcription, transcription
from outrider.stats import RequestStats, Stats
from outrider.text.tokens import Detokenizer, encode, separate, special_stops
from outrider.types import Drafter, Verifier

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Stop:
    """When a request ends, besides the model's context.

    max_new_tokens  token budget, 128 by default. None: to the end of the context; the caches grow
                    with the text
    strings         stop strings; the text ends before the first one. One that is a special token of
                    the tokenizer, such as "</s>", stops as that token
    token_ids       stop tokens in place of the model's own end-of-sequence tokens, which None, the
                    default, means; () for none at all

    Raises ConfigurationError for values of another kind.

    >>> Stop(64, strings=("\\n\\n",)).token_ids is None
    True
    """

    max_new_tokens: int | None = 128
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        budget = Limits(self.max_new_tokens).max_new_tokens  # refuses what is no budget
        object.__setattr__(self, "max_new_tokens", budget)
        if isinstance(self.strings, str):
            what, do = "a tuple of stop strings", f"write strings=({self.strings!r},)"
        else:
            what, do = "a tuple of stop strings", 'write strings=("\\n\\n",), or () for none'
        strings = arguments.several("strings", self.strings, what, do, _is_text, ordered=False)
        if not all(strings):
            raise ConfigurationError(f"a stop string is empty; got strings={strings!r}; remove it")
        object.__setattr__(self, "strings", strings)
        if self.token_ids is not None:
            what, do = "a tuple of token ids", "write token_ids=(2,), or () for no stop token"
            ids = arguments.several("token_ids", self.token_ids, what, do, _is_token, ordered=False)
            object.__setattr__(self, "token_ids", ids)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token(value: Any) -> bool:
    return arguments.is_whole(value) and value >= 0


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

    text: str
    block: HostBlock  #: the tokens up to a stop string, with the trace if one was asked for

    @property
    def row(self) -> int:
        """The request's number."""
        return self.block.row

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the text."""
        return self.block.token_ids

    @property
    def accepted(self) -> int:
        """How many of them were drafted."""
        return self.block.accepted

    @property
    def finish_reason(self) -> str | None:
        """Why the request ended here, if it did."""
        return self.block.finish_reason


class Options(TypedDict, total=False):
    """What else may be asked of `generate` and `stream`, by name."""

    num_return_sequences: int  #: completions of each prompt; copy i of a seeded one has seed + i
    logprobs: bool  #: of the law that each token was emitted from
    capacity: int | None  #: slots of a row, if more are wanted than prompt and budget need


class Speculator:
    """A target, a drafter, a rule and a tokenizer. Made by `outrider.load`.

    >>> import outrider
    >>> speculator = outrider.load()                                        # doctest: +SKIP
    >>> speculator.generate("def add(a, b):", stop=outrider.Stop(16)).texts  # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        notes: Any = None,
        hearing: Hearing | None = None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.eos_ids = tuple(eos_ids)
        self.notes = notes  #: how it was loaded: dtype, threads, packing, cost curve
        self.hearing = hearing  #: what transcription needs besides, for speech-to-text models

    def using(self, drafter: Drafter, rule: str | Verifier | None = None) -> "Speculator":
        """The same target and tokenizer with another drafter and rule: nothing is loaded again.

        >>> speculator.using(outrider.PromptLookup(8), "match")  # doctest: +SKIP
        """
        engine = Engine(self.engine.target, drafter, rule, costs=self.engine.costs)
        return Speculator(engine, self.tokenizer, self.eos_ids, self.notes, self.hearing)

    def plain(self, coupled: bool = False) -> "Speculator":
        """Ordinary decoding with the same target; `coupled` uses the noise of coupled mode."""
        return self.using(Root(), verifiers.get("match") if coupled else None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Stop | Sequence[Stop] | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Complete one prompt or a batch; every row has its own sampling and stop settings.

        A prompt is text, token ids, or a list of messages for the chat template. `Options` are
        num_return_sequences, logprobs and capacity.
        """
        stream = self.stream(prompts, sampling, stop, **options)
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
        batch = separate(prompts)
        ids = [encode(self.tokenizer, p, i) for i, p in enumerate(batch)]
        stops = spread("stop", stop, Stop(), len(ids))
        do = "use 1 for one completion"
        copies = arguments.whole("num_return_sequences", num_return_sequences, do, least=1)
        if capacity is not None:
            capacity = arguments.whole("capacity", capacity, "leave it out", least=1)
        if copies > 1:
            each = spread("sampling", sampling, Sampling(), len(ids))
            sampling = [
                s
                if s.seed is None
                else replace(s, seed=(s.seed + copy) % 2**64 if copy else s.seed)
                for s in each
                for copy in range(copies)
            ]
            ids = [p for p in ids for _ in range(copies)]
            stops = [s for s in stops for _ in range(copies)]
        ends = {s: Limits(s.max_new_tokens, self._stop_ids(s)) for s in set(stops)}
        limits = [ends[s] for s in stops]
        run = self.engine.run(
            ids, sampling, limits, capacity=capacity, trace=trace, logprobs=logprobs
        )
        return Stream(run, self.tokenizer, stops, ids, [end.stop_ids for end in limits])

    @overload
    def transcribe(self, audio: Audio, **options: Unpack[SpeechOptions]) -> Transcript: ...

    @overload
    def transcribe(
        self, audio: list[Audio] | tuple[Audio, ...], **options: Unpack[SpeechOptions]
    ) -> list[Transcript]: ...

    def transcribe(
        self, audio: Any, **options: Unpack[SpeechOptions]
    ) -> Transcript | list[Transcript]:
        """Speech to text, by a Whisper model: one recording, or several as one ragged batch.

        A recording is a path (WAV; other formats by soundfile), samples in [-1, 1], or a mapping of
        `array` and `sampling_rate`. The options are those of `outrider.speech.settings.Settings`.

        Raises AudioError for what cannot be read, ConfigurationError for options that the model
        cannot honour. Where one of several fails on its way, the first error comes when the others
        are done; `transcribe_stream` keeps their transcripts.

        >>> speculator.transcribe("talk.wav", language="en").text  # doctest: +SKIP
        'Please enter your password.'
        """
        running = self.transcribe_stream(audio, **options).drain()
        for error in running.errors.values():
            raise error
        done = [transcript for transcript in running.transcripts if transcript is not None]
        return done if running.several else done[0]

    def transcribe_stream(self, audio: Any, **options: Unpack[SpeechOptions]) -> Transcription:
        """The segments of `transcribe` as they are heard; `transcripts` has what is done.

        >>> for segment in speculator.transcribe_stream("talk.wav"):  # doctest: +SKIP
        ...     print(segment.start, segment.text)
        """
        if self.hearing is None:
            name = "this model" if self.notes is None else self.notes.target
            raise ConfigurationError(
                f"{name} does not turn speech into text; got a recording; load a Whisper model: "
                'outrider.load("openai/whisper-base")'
            )
        if self.tokenizer is None:
            raise ConfigurationError("transcripts need a tokenizer; pass tokenizer=... to load")
        settings = Settings(**options)
        engine = self.engine
        if settings.reference is not None and engine.drafter.name != ReferenceLookup.name:
            engine = self.using(ReferenceLookup()).engine
        return transcription(engine, self.hearing, audio, settings)

    def _stop_ids(self, stop: Stop) -> tuple[int, ...]:
        """Tokens that end a row: those asked for, or the model's own; and special stop strings."""
        ids, vocab = self.eos_ids, self.engine.target.vocab_size
        if stop.token_ids is not None:
            ids = stop.token_ids
            wrong = [i for i in ids if i >= vocab and i not in self.eos_ids]
            if wrong:
                raise ConfigurationError(
                    f"token_ids of a Stop names token {wrong[0]}, outside the vocabulary of "
                    f"{vocab}; use the target's token ids"
                )
        if not stop.strings:
            return ids
        if self.tokenizer is None:
            raise ConfigurationError("stop strings need a tokenizer; pass tokenizer=... to load")
        return ids + special_stops(self.tokenizer, stop.strings)


class Stream(Iterator[TextBlock]):
    """Blocks of text as they are decoded. Stopping to iterate early loses nothing."""

    def __init__(
        self,
        run: Run,
        tokenizer: Any,
        stops: Sequence[Stop],
        prompts: Sequence[Sequence[int]],
        stop_ids: Sequence[Sequence[int]],
    ) -> None:
        self.run, self._stop_ids = run, stop_ids
        self._tokens: list[list[int]] = [[] for _ in stops]
        self._logprobs: list[list[float] | None] = [None for _ in stops]
        self._worded = [0 for _ in stops]  # how many of the tokens have become text
        self._text = [
            Detokenizer(tokenizer, stop.strings, prompt) if tokenizer else None
            for stop, prompt in zip(stops, prompts, strict=True)
        ]

    def __iter__(self) -> "Stream":
        return self

    def drain(self) -> None:
        """Decode to the end. Rows without stop strings become text once, not block by block."""
        try:
            for block in self.run:
                words = self._text[block.row]
                if words is not None and words.stop_strings:
                    self._absorb(block)
                else:
                    self._keep(block.row, block.token_ids, block.logprobs)
        finally:  # an interrupted call has the text of its tokens, too
            for row, words in enumerate(self._text):
                if words is not None and not words.stop_strings:
                    reason = self.run.reasons[row]
                    fresh = self._tokens[row][self._worded[row] :]
                    words.push(self._before_stop(row, fresh, reason))
                    self._worded[row] = len(self._tokens[row])
                    if reason is not None:
                        words.finish()

    def _before_stop(self, row: int, ids: list[int], reason: str | None) -> list[int]:
        """What becomes text: all but the stop token that ended the row, special or not."""
        return ids[:-1] if reason == "stop" and ids[-1:] and ids[-1] in self._stop_ids[row] else ids

    def _keep(self, row: int, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        self._tokens[row].extend(ids)
        if logprobs is not None:
            known = self._logprobs[row]
            if known is None:
                known = self._logprobs[row] = []
            known.extend(logprobs[: len(ids)])

    def __next__(self) -> TextBlock:
        return self._absorb(next(self.run))

    def _absorb(self, block: HostBlock) -> TextBlock:
        ids, reason, row = block.token_ids, block.finish_reason, block.row
        text, words = "", self._text[row]
        if words is not None:
            had = len(words.ids)
            text = words.push(self._before_stop(row, ids, reason))
            if words.stopped_at is not None:
                ids, reason = ids[: words.stopped_at - had], "stop"
                self.run.end(row, reason, keep=len(self._tokens[row]) + len(ids))
            elif reason is not None:
                text += words.finish()
        self._keep(row, ids, block.logprobs)
        self._worded[row] = len(self._tokens[row])
        accepted = min(block.accepted, len(ids))
        logs = None if block.logprobs is None else block.logprobs[: len(ids)]
        return TextBlock(
            text,
            replace(block, token_ids=ids, accepted=accepted, finish_reason=reason, logprobs=logs),
        )

    def result(self) -> Generation:
        """Completions so far; a request that is still running has finish_reason "running"."""
        run = self.run
        done = [
            Completion(
                words.text if words is not None else "",
                list(self._tokens[row]),  # the stream may go on
                run.reasons[row] or "running",
                run.requests[row],
                None if logs is None else list(logs),
            )
            for row, (words, logs) in enumerate(zip(self._text, self._logprobs, strict=True))
        ]
        return Generation(done, run.stats)
