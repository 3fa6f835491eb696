"""One text as it grows from blocks of tokens: words, stop strings, log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider import arguments
from outrider.engine.engine_run import EngineRun
from outrider.engine.outputs import StepOutput
from outrider.engine.request import StopConditions
from outrider.errors import ConfigurationError
from outrider.stats import RequestStats, Stats
from outrider.text.tokens import Detokenizer, special_stops
from outrider.types import Tokenizer

# What users get: texts with their statistics, whole or block by block.


@dataclass(frozen=True)
class NearTie:
    """Two beams that were level but for rounding, of which a search kept one and dropped the other.

    Another order of sums (another drafter or batch, in half precision) may keep the other, and end
    with other texts. Token ids are without the prompt.
    """

    margin: float  #: the gap between their log-probabilities
    kept: str
    dropped: str
    kept_ids: list[int]
    dropped_ids: list[int]


@dataclass(frozen=True)
class Completion:
    """One finished request. `token_ids` include the stop token, `text` does not.

    `logprobs` are of the law each token was emitted from: penalties, temperature and filters are
    in. Greedy requests report the law at temperature 1. `score` is a beam's: its log-probability by
    its length. `near_tie` says of a search where it could have gone another way by rounding alone;
    None: nowhere.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: RequestStats
    logprobs: list[float] | None = None
    score: float | None = None
    near_tie: NearTie | None = None


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
    block: StepOutput  #: the tokens up to a stop string, with the trace if one was asked for

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


# When a request ends.


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
        budget = StopConditions(self.max_new_tokens).max_new_tokens  # refuses what is no budget
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


def stop_ids(
    stop: Stop, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...], vocab: int
) -> tuple[int, ...]:
    """Tokens that end a row: those asked for, or the model's own; and special stop strings."""
    ids = eos_ids
    if stop.token_ids is not None:
        ids = stop.token_ids
        wrong = [i for i in ids if i >= vocab and i not in eos_ids]
        if wrong:
            raise ConfigurationError(
                f"token_ids of a Stop names token {wrong[0]}, outside the vocabulary of "
                f"{vocab}; use the target's token ids"
            )
    if not stop.strings:
        return ids
    if tokenizer is None:
        raise ConfigurationError("stop strings need a tokenizer; pass tokenizer=... to load")
    return ids + special_stops(tokenizer, stop.strings)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token(value: Any) -> bool:
    return arguments.is_whole(value) and value >= 0


@dataclass
class IncrementalText:
    """What has come of one request. `stop_ids` are the tokens that end it without being text.

    special  whether special tokens are in its text
    behind   where stop strings are looked for in a text: behind some place; None: not yet

    >>> answer = IncrementalText(None, Stop(), (1, 2))
    >>> answer.append(StepOutput(0, [5, 6], 1, "length")).token_ids, answer.tokens
    ([5, 6], [5, 6])
    """

    tokenizer: Tokenizer | None
    stop: Stop
    prompt: Sequence[int]
    stop_ids: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    special: bool = False
    behind: Callable[[str], int | None] | None = None

    def __post_init__(self) -> None:
        self._worded = 0  # how many of the tokens have become text
        self._words = (
            Detokenizer(self.tokenizer, self.stop.strings, self.prompt, self.special, self.behind)
            if self.tokenizer
            else None
        )

    @property
    def text(self) -> str:
        """What is certain of the text: characters that are not complete are held back."""
        return "" if self._words is None else self._words.text

    @property
    def watched(self) -> bool:
        """Whether a stop string may end it."""
        return self._words is not None and bool(self._words.stop_strings)

    def append(self, block: StepOutput) -> TextBlock:
        """A block's words. A stop string cuts the block, which then ends the answer: "stop"."""
        ids, reason = block.token_ids, block.finish_reason
        text, words = "", self._words
        if words is not None:
            had = len(words.ids)
            text = words.push(self._before_stop(ids, reason))
            if words.stopped_at is not None:
                ids, reason = ids[: words.stopped_at - had], "stop"
            elif reason is not None:
                text += words.finish()
        self.keep(ids, block.logprobs)
        self._worded = len(self.tokens)
        accepted = min(block.accepted, len(ids))
        if ids is block.token_ids and accepted == block.accepted:
            return TextBlock(text, block)
        logs = None if block.logprobs is None else block.logprobs[: len(ids)]
        return TextBlock(
            text,
            replace(block, token_ids=ids, accepted=accepted, finish_reason=reason, logprobs=logs),
        )

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._words is not None and self._words.stopped_at is not None

    def keep(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Tokens that become text later, by `catch_up`."""
        self.tokens.extend(ids)
        if logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(logprobs[: len(ids)])

    def catch_up(self, reason: str | None) -> None:
        """Text of what was kept; all of it if there is a reason why the request is over."""
        if self._words is None:
            return
        self._words.push(self._before_stop(self.tokens[self._worded :], reason))
        self._worded = len(self.tokens)
        if reason is not None:
            self._words.finish()

    def _before_stop(self, ids: list[int], reason: str | None) -> list[int]:
        """What becomes text: all but the stop token that ended the row, special or not."""
        return ids[:-1] if reason == "stop" and ids[-1:] and ids[-1] in self.stop_ids else ids


# Blocks of text as they are decoded.


class Stream(Iterator[TextBlock]):
    """Blocks of text as they are decoded. Stopping to iterate early loses nothing."""

    def __init__(self, run: EngineRun, answers: Sequence[IncrementalText]) -> None:
        self.run, self._answers = run, answers

    def __iter__(self) -> "Stream":
        return self

    def drain(self) -> None:
        """Decode to the end. Rows without stop strings become text once, not block by block."""
        try:
            for block in self.run:
                answer = self._answers[block.row]
                if answer.watched:
                    self._end_if_stopped(answer, answer.append(block))
                else:
                    answer.keep(block.token_ids, block.logprobs)
        finally:  # an interrupted call has the text of its tokens, too
            for answer, state in zip(self._answers, self.run.states, strict=True):
                if not answer.watched:
                    answer.catch_up(state.reason)

    def __next__(self) -> TextBlock:
        block = next(self.run)
        answer = self._answers[block.row]
        return self._end_if_stopped(answer, answer.append(block))

    def _end_if_stopped(self, answer: IncrementalText, block: TextBlock) -> TextBlock:
        """End the row of an answer that a stop string has ended."""
        if answer.stopped:
            self.run.end(block.row, "stop", keep=len(answer.tokens))
        return block

    def result(self) -> Generation:
        """Completions so far; a request that is still running has finish_reason "running"."""
        done = []
        for answer, state in zip(self._answers, self.run.states, strict=True):
            logprobs = None if answer.logprobs is None else list(answer.logprobs)
            ids, reason = list(answer.tokens), state.reason or "running"  # the stream may go on
            done.append(Completion(answer.text, ids, reason, state.stats, logprobs))
        return Generation(done, self.run.stats)
