"""One text as it grows from blocks of tokens: words, stop strings, log-probabilities."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from outrider import arguments
from outrider.engine.engine_run import EngineRun
from outrider.engine.outputs import StepOutput
from outrider.engine.request import StopConditions
from outrider.errors import ConfigurationError
from outrider.models.token_bytes import spelling_of
from outrider.sampling.sampling_params import SamplingParams
from outrider.stats import RequestStats, Stats
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
    def request_id(self) -> int:
        """The request's id."""
        return self.block.request_id

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
        one = repr(self.strings) if isinstance(self.strings, str) else r'"\n\n"'
        what, do = "a tuple of stop strings", f"write strings=({one},), or () for none"
        strings = arguments.several(
            "strings", self.strings, what, do, lambda text: isinstance(text, str), ordered=False
        )
        if not all(strings):
            raise ConfigurationError(f"a stop string is empty; got strings={strings!r}; remove it")
        object.__setattr__(self, "strings", strings)
        if self.token_ids is not None:
            what, do = "a tuple of token ids", "write token_ids=(2,), or () for no stop token"
            ids = arguments.several(
                "token_ids", self.token_ids, what, do, arguments.is_size, ordered=False
            )
            object.__setattr__(self, "token_ids", ids)


def check_least(settings: Sequence[SamplingParams], stops: Sequence[Stop]) -> None:
    """Refuse `min_new_tokens` where there may not be as many."""
    for one, stop in zip(settings, stops, strict=True):
        if (most := stop.max_new_tokens) is not None and one.min_new_tokens > most:
            what, do = f"max_new_tokens={most} or fewer", "lower it, or raise max_new_tokens"
            arguments.refuse("min_new_tokens", what, one.min_new_tokens, do)


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


def special_stops(tokenizer: Tokenizer | None, strings: Sequence[str]) -> tuple[int, ...]:
    """Ids of the stop strings that are special tokens, which no decoded text contains.

    Raises ConfigurationError for a stop string with a special token inside: it could never match.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):  # others do not tell
        return ()
    ids = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for id_, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            ids[token.content] = id_
    for given in strings:
        inside = next((token for token in ids if token and token in given), None)
        if inside is not None and given not in ids:
            raise ConfigurationError(
                f"a stop string must be text or one special token; got {given!r}, which contains "
                f"the special token {inside!r}; use {inside!r} alone, or token_ids=({ids[inside]},)"
            )
    return tuple(ids[given] for given in strings if given in ids)


# Text of tokens.

_HALF = "\ufffd"  #: how characters end a text that are not complete
_GOES_ON = {bytes([byte]) for byte in range(0x80, 0xC0)}  #: UTF-8 within a character
_HEAD = 3  #: a character has at most so many of these
_TAIL = 4  #: tokens of the prompt that are decoded along
_WINDOW = 8  #: tokens that are decoded again with the next ones


def _from_a_character(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The end of a prompt, from a token on that does not go on with a character."""
    spelling = spelling_of(tokenizer)
    sizes = range(_TAIL, min(_TAIL + 4, len(prompt)))
    first = (size for size in sizes if spelling.bytes_of(prompt[-size])[:1] not in _GOES_ON)
    return list(prompt[-next(first, _TAIL) :])


def _is_utf8(data: bytes) -> bool | None:
    """Whether these bytes are whole characters; None: others may make them so, ahead or behind."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begun = data[:_HEAD].lstrip(b"".join(_GOES_ON))
    try:
        decoder.decode(begun + data[_HEAD:])
    except UnicodeDecodeError:
        return False
    return None if decoder.getstate()[0] or len(begun) < len(data[:_HEAD]) else True


class Detokenizer:
    """Text of a growing token sequence, and the first stop string in it.

    Decoding restarts at a recent token so that its cost does not grow with the text; characters
    that are still incomplete (a multi-byte character split between tokens) are held back. The end
    of the prompt is decoded along, because some tokenizers drop the space of a first token.

    special  whether special tokens are in the text
    behind   where in a text stop strings are looked for; None: not yet
    least    stop strings that so many tokens complete, or fewer, are text
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        prompt: Sequence[int] = (),
        special: bool = False,
        behind: Callable[[str], int | None] | None = None,
        least: int = 0,
    ) -> None:
        if not all(stop_strings):
            raise ConfigurationError("a stop string is empty; got ''; remove it")
        self.stop_strings, self._behind, self._tokenizer = tuple(stop_strings), behind, tokenizer
        self._text = partial(
            tokenizer.decode, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        self.ids: list[int] = list(prompt[-_TAIL:])
        self.text = ""
        self.stopped_at: int | None = None  #: number of tokens that completed a stop string
        self._least, self._from = least, 0  # tokens that are to come, and the text before them
        self._prefix, self._read, self._told = 0, len(self.ids), 0
        whole = self._text(self.ids)
        if whole.startswith(_HALF):
            self.ids = _from_a_character(tokenizer, prompt)
            self._read, whole = len(self.ids), self._text(self.ids)
        #: What is known of the text of the tokens from the prefix on: it begins with one of these.
        self._known: tuple[str, ...] = (whole,)
        if whole.endswith(_HALF):  # to be completed, or as it is
            data = spelling_of(tokenizer).spelled(self.ids)
            complete = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
            self._known = (whole, complete, complete.removeprefix(" "), whole.rstrip(_HALF))
        self._tail = max(map(len, stop_strings), default=0)

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the new text; a stop string cuts it and what follows."""
        for token in ids if self.stop_strings else [None]:
            self.ids.extend(ids if token is None else [token])
            before = len(self.text)
            self._decode()
            if self.stop_strings and self._cut_at_stop_string(before):
                break
        sure = not self.stop_strings or self.stopped_at is not None
        told, self._told = self._told, len(self.text) - (0 if sure else self._begun())
        return self.text[told : self._told]

    def finish(self) -> str:
        """What was held back; nothing the second time."""
        whole = self._text(self.ids[self._prefix :])
        rest = whole[self._had(whole) :]
        self._prefix, self._read, self._known = len(self.ids), len(self.ids), ("",)
        self.text += rest if self.stopped_at is None else ""
        told, self._told = self._told, len(self.text)
        return self.text[told:]

    def _begun(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        sizes = range(min(self._tail - 1, len(self.text)), 0, -1)
        ends = (n for n in sizes if any(s.startswith(self.text[-n:]) for s in self.stop_strings))
        return next(ends, 0)

    def _decode(self) -> None:
        """What is certain of the text now: a character that later tokens complete is not."""
        whole = self._text(self.ids[self._prefix :])
        sure, had = whole.rstrip(_HALF), self._had(whole)
        if len(sure) > had:
            self.text += sure[had:]
            self._known, had = (sure,), len(sure)
            if sure == whole:
                if len(self.ids) - self._prefix > _WINDOW:
                    self._prefix = self._read
                    self._known = (self._text(self.ids[self._prefix :]),)
                self._read = len(self.ids)
        if sure != whole and len(self.ids) - self._prefix > 2 * _WINDOW:
            self._begin_later(whole, had)

    def _begin_later(self, whole: str, had: int) -> None:
        """Decode the last tokens alone from now on, where bytes that are no character go on.

        Some decoders read a run of bytes as one: what is kept is broken without the others, or
        tokens of whole characters.
        """
        kept = self.ids[-_WINDOW:]
        rest, data = self._text(kept), spelling_of(self._tokenizer).spelled(kept)
        utf8, told = _is_utf8(data), len(whole) - len(rest)
        if utf8 and rest != "".join(self._text([token]) for token in kept):
            return
        if utf8 is not None and len(data) > _HEAD and whole.endswith(rest):
            self.text += whole[had:told]
            self._known = (whole[told:had],)
            self._prefix = self._read = len(self.ids) - _WINDOW

    def _had(self, whole: str) -> int:
        """How much of a text is known. Half a character that a prompt ends with, and no token
        completes, is the prompt's."""
        for known in self._known:
            if whole.startswith(known):
                break
        return len(known)

    def _cut_at_stop_string(self, before: int) -> bool:
        """End the text before the first stop string, if one is there now."""
        if self._least > 0:
            self._least, self._from = self._least - 1, len(self.text)
            return False
        since = 0 if self._behind is None else self._behind(self.text)
        if since is None:
            return False
        start = max(since, before - self._tail)
        found = [self.text.find(s, max(start, self._from - len(s) + 1)) for s in self.stop_strings]
        places = [at for at in found if at >= 0]
        if not places:
            return False
        self.text = self.text[: min(places)]
        self.stopped_at = len(self.ids)
        return True


@dataclass
class IncrementalText:
    """What has come of one request. `stop_ids` are the tokens that end it without being text.

    special  whether special tokens are in its text
    behind   where stop strings are looked for in a text: behind some place; None: not yet
    least    stop strings that so many tokens complete, or fewer, are text: vLLM's `min_tokens`

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
    least: int = 0

    def __post_init__(self) -> None:
        self.text = ""  #: what is certain of it: characters that are not complete are held back
        self._worded = 0  # how many of the tokens have become text
        self._words: Detokenizer | None = None
        if self.tokenizer:
            more = (self.special, self.behind, self.least)
            self._words = Detokenizer(self.tokenizer, self.stop.strings, self.prompt, *more)
        #: Whether a stop string may end it.
        self.watched = self._words is not None and bool(self._words.stop_strings)

    def append(self, block: StepOutput) -> TextBlock:
        """A block's words. A stop string cuts the block, which then ends the answer: "stop"."""
        had = len(self.tokens)
        self.keep(block.token_ids, block.logprobs)
        text = self.catch_up(block.finish_reason)
        ids = self.tokens[had:]
        accepted = min(block.accepted, len(ids))
        if not self.stopped:
            told = block if accepted == block.accepted else replace(block, accepted=accepted)
            return TextBlock(text, told)
        logs = None if block.logprobs is None else block.logprobs[: len(ids)]
        told = replace(block, token_ids=ids, accepted=accepted, finish_reason="stop", logprobs=logs)
        return TextBlock(text, told)

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

    def catch_up(self, reason: str | None) -> str:
        """New text of what was kept; all of it if there is a reason why the request is over. Tokens
        behind a stop string are kept no longer."""
        words, fresh = self._words, self.tokens[self._worded :]
        if words is None:
            return ""
        if reason == "stop" and fresh and fresh[-1] in self.stop_ids:
            fresh.pop()  # the stop token that ended the row, special or not, is no text
        had = len(words.ids)
        text = words.push(fresh)
        if words.stopped_at is not None:
            count = self._worded + words.stopped_at - had
            del self.tokens[count:]
            if self.logprobs is not None:
                del self.logprobs[count:]
        elif reason is not None:
            text += words.finish()
        self._worded, self.text = len(self.tokens), words.text
        return text


# Blocks of text as they are decoded.


@dataclass(eq=False)
class Stream(Iterator[TextBlock]):
    """Blocks of text as they are decoded. Stopping to iterate early loses nothing."""

    run: EngineRun
    _answers: Sequence[IncrementalText]

    def drain(self) -> None:
        """Decode to the end. Rows without stop strings become text once, not block by block."""
        try:
            for block in self.run:
                answer = self._answers[block.request_id]
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
        answer = self._answers[block.request_id]
        return self._end_if_stopped(answer, answer.append(block))

    def _end_if_stopped(self, answer: IncrementalText, block: TextBlock) -> TextBlock:
        """End the row of an answer that a stop string has ended."""
        if answer.stopped:
            self.run.end(block.request_id, "stop", keep=len(answer.tokens))
        return block

    def result(self) -> Generation:
        """Completions so far; a request that is still running has finish_reason "running"."""
        done = []
        for answer, state in zip(self._answers, self.run.states, strict=True):
            logprobs = None if answer.logprobs is None else list(answer.logprobs)
            ids, reason = list(answer.tokens), state.reason or "running"  # the stream may go on
            done.append(Completion(answer.text, ids, reason, state.stats, logprobs))
        return Generation(done, self.run.stats)
