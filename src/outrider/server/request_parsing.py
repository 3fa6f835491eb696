"""From what a request says to what the engine is asked."""

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.engine.outputs import StepOutput
from outrider.engine.request import Logprobs, Request, StopConditions
from outrider.errors import ConfigurationError, OutriderError, UnknownName
from outrider.sampling.sampling_params import SamplingParams
from outrider.server import speculation_methods as lane
from outrider.server.chat_prompts import (
    ChatPrompt,
    Parsers,
    chat_prompt,
    infill_prompt,
    of_transformers,
    text_ids,
)
from outrider.server.errors import APIError, unknown_model
from outrider.server.grammar import Grammar, grammar_field, grammar_of, uncompiled, vocabulary
from outrider.server.message_parser import MessageParser
from outrider.server.messages import plain
from outrider.server.model_info import TextModelInfo, TextOffsets
from outrider.server.protocol import (
    MOST_STOPS,
    BaseRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ResumeState,
)
from outrider.stats import RequestStats
from outrider.text.decoder_prompt import RULES, ruled
from outrider.text.output_text import IncrementalText, Stop, stop_ids

_COMPLETION = 16  #: tokens of a completion that names no number, as OpenAI has it


class PredictionCounts:
    """How much of a predicted text came: tokens of it that the answer has, or has not.

    Wherever they are: an alignment of two long texts would keep everybody else waiting. Of an
    answer that grows every token is counted once.

    >>> counts = PredictionCounts([5, 6, 6])
    >>> counts.of([6]), counts.of([6, 6, 6, 7])
    ((1, 2), (2, 1))
    """

    def __init__(self, predicted: Sequence[int]) -> None:
        self._left, self._accepted, self._counted = Counter(predicted), 0, 0

    def of(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Predicted tokens that an answer has and has not; it goes on from the last one asked."""
        for token in tokens[self._counted :]:
            if self._left[token]:
                self._left[token] -= 1
                self._accepted += 1
        self._counted = len(tokens)
        return self._accepted, self._left.total()


@dataclass(eq=False)
class ChoiceState:
    """One text that is being written for a request."""

    index: int
    source: int  #: which of the request's prompts it goes on from
    lane: str
    request: Request
    answer: IncrementalText
    tells_ids: bool = False  #: whether chunks have token ids
    parser: MessageParser | None = None  #: takes its text apart, if it is more than text
    named: bool = False  #: whether the request names the function that it calls
    best: int | None = None  #: how many of its prompt's choices are told, the likeliest first
    silent: bool = False  #: whether its log-probabilities are for choosing alone
    priority: int = 0  #: the least has the next free row
    scored: Request | None = None  #: its prompt, if log-probabilities of that are asked for
    scores: StepOutput | None = None  #: log-probabilities of that prompt but its first token
    prompt_top: int | None = None  #: as many are told as `prompt_logprobs`; None: `echo` does
    predicted: PredictionCounts | None = None  #: of the text that it was expected to resemble
    offsets: TextOffsets | None = None  #: where its tokens begin, if that is told
    owed: str = ""  #: text of tokens that the client has, which it has not
    stats: RequestStats = field(default_factory=RequestStats)
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)
    told: int = 0  #: tokens that were told, in chunks
    histogram: list[int] = field(default_factory=list)  #: steps by accepted tokens
    reason: str | None = None  #: why it has ended
    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first: float | None = None  #: when its first tokens came
    last: float | None = None  #: and its last ones
    waits: list[float] = field(default_factory=list)  #: seconds a token of each block behind those


class TokenBudget(NamedTuple):
    """What a route calls a prompt and the most tokens of its answer, and what was asked of these.

    usual  tokens where none are asked for; None: as many as there is room for
    """

    prompt: str
    budget: str
    given: int | None
    usual: int | None = None


@dataclass(frozen=True)
class RequestParser:
    """Reads bodies for one model. Raises Refusal, and the engine's own errors."""

    known: TextModelInfo
    names: tuple[str, ...]
    rows: int
    capacity: int
    parsers: Parsers = field(default_factory=Parsers)
    most: int | None = None  #: choices and scores of one request; None: a choice a row

    @property
    def served(self) -> tuple[str, ...]:
        """All names that a request may give: the target's, and its adapters'."""
        return (*self.names, *self.known.adapters)

    def name(self, given: str | None) -> str:
        """The name of the model that is asked for; the target's where none is. Raises APIError."""
        if given and given not in self.served:
            raise unknown_model(given, self.served)
        return given or self.names[0]

    def completions(self, body: CompletionRequest) -> list[ChoiceState]:
        """Every prompt of a completion, each `n` times."""
        asked = body.prompt
        one = isinstance(asked, str) or isinstance(asked[0], int)
        prompts = [asked] if one else asked
        logs = None if body.logprobs is None else Logprobs(body.logprobs, body.mode)
        tokenizer, ends = self.known.tokenizer, tuple[int, ...]()
        if body.suffix:
            known = of_transformers(tokenizer, "suffix")
            infilled, ends = infill_prompt(known, str(body.prompt), body.suffix)
            prompts = [infilled]
        special = body.add_special_tokens
        ids = [text_ids(tokenizer, prompt, at, special) for at, prompt in enumerate(prompts)]
        budget = TokenBudget("prompt", "max_tokens", body.max_tokens, _COMPLETION)
        return self._choices(body, ids, logs, budget, ends=ends)

    def chat(self, body: ChatCompletionRequest) -> list[ChoiceState]:
        """The next turn of a conversation, `n` times."""
        logs = Logprobs(body.top_logprobs or 0, body.mode) if body.logprobs else None
        prompt = chat_prompt(self.known, self.parsers, body)
        asked = "max_tokens" if body.max_tokens else "max_completion_tokens"
        budget = TokenBudget("messages", asked, body.max_tokens or body.max_completion_tokens)
        return self._choices(body, [prompt.ids], logs, budget, prompt)

    def _choices(
        self,
        body: BaseRequest,
        prompts: Sequence[list[int]],
        logs: Logprobs | None,
        asked: TokenBudget,
        chat: ChatPrompt | None = None,
        ends: tuple[int, ...] = (),
    ) -> list[ChoiceState]:
        name = self.name(body.model)
        adapter = name if name in self.known.adapters else None
        copies, top = _copies(body), _scores(body)
        # scores wait beside texts that are written; a queue without a bound has room for both
        beside = self.most is not None and top is not None and asked.given != 0
        most = self.rows if self.most is None else self.most
        if (copies + beside) * len(prompts) > most:
            what = f"{copies} completions of {len(prompts)} prompts"
            what += f"{' and their scores' if beside else ''}; there is room for {most}"
            raise APIError(f"{what}; ask for fewer", "n" if copies == body.n else "best_of")
        stop = self._stop(body, ends)
        with _blamed("stop_token_ids"):
            ends = stop_ids(stop, self.known.tokenizer, self.known.eos_ids, self.known.vocab_size)
        method, depth = self._method(body)
        if body.truncate_prompt_tokens is not None:
            if chat is not None and chat.inputs is not None:
                what = "a prompt with images or sound is not cut; leave truncate_prompt_tokens out"
                raise APIError(what, "truncate_prompt_tokens")
            prompts = [self._truncated(body, ids, asked, method) for ids in prompts]
        reference = list[int]()
        if body.prediction is not None:
            tokenizer = of_transformers(self.known.tokenizer, "prediction")
            said = plain(body.prediction.content)
            reference = tokenizer(said, add_special_tokens=False)["input_ids"]
        grammar, stands = grammar_of(body), frozenset[int]()
        if chat is not None:
            grammar = chat.grammar(grammar)
            stands = stands if chat.inputs is None else chat.inputs.placeholders
        sent = _sent(body, len(prompts) * copies)
        best, silent = (body.n, logs is None) if copies > body.n else (None, False)
        logs = Logprobs(0, "raw") if silent else logs
        choices: list[ChoiceState] = []
        for source, ids in enumerate(prompts):
            for copy in range(copies):
                index = len(choices)
                had = sent[index].token_ids
                self._within("resume", had)
                most_tokens = self._budget(ids, asked, method, stands)
                if (body.min_tokens or 0) > most_tokens:
                    what = f"min_tokens is at most {asked.budget}={most_tokens}"
                    what += f"; got {body.min_tokens}; lower it, or raise {asked.budget}"
                    raise APIError(what, "min_tokens")
                left = most_tokens - len(had)
                if left < 1 and sent[index].finish_reason is None and asked.given != 0:
                    raise APIError(f"choice {index} has all of its tokens already", "resume")
                request = Request(
                    [*ids, *had],
                    self._sampling(body, copy, ids, grammar),
                    StopConditions(max(left, 1), ends),
                    reference=reference,
                    logprobs=logs,
                    trace=body.stream_options is not None and body.stream_options.include_trace,
                    num_speculative_tokens=depth,
                    written=len(had),
                    lora_name=adapter,
                    inputs=None if chat is None else chat.inputs,
                )
                choice = self._choice(
                    index, source, method, request, stop, chat, body.min_tokens or 0
                )
                choice.tells_ids = body.return_token_ids
                if body.prediction is not None:
                    choice.predicted = PredictionCounts(reference)
                choice.priority = body.priority
                choice.best, choice.silent, choice.prompt_top = best, silent, body.prompt_logprobs
                if top is not None and chat is not None and chat.inputs is not None:
                    what = "log-probabilities of a prompt with images or sound are not told"
                    raise APIError(f"{what}; leave prompt_logprobs out", "prompt_logprobs")
                if top is not None:
                    choice.scored = Request(
                        ids,
                        limits=StopConditions(1),
                        logprobs=Logprobs(top, "raw"),
                        lora_name=adapter,
                    )
                if asked.given == 0:
                    choice.reason = "length"
                choice.stats.prompt_tokens = len(ids)
                if body.resume is not None:
                    _resume(choice, sent[index])
                choices.append(choice)
        return choices

    def _choice(
        self,
        index: int,
        source: int,
        method: str,
        request: Request,
        stop: Stop,
        chat: ChatPrompt | None,
        least: int,
    ) -> ChoiceState:
        """A choice of which nothing is written yet; `least` tokens are before any stop string."""
        answer = IncrementalText(
            self.known.tokenizer,
            stop,
            request.asked,
            request.limits.stop_ids,
            special=chat is not None and chat.special,
            behind=None if chat is None else chat.behind,
            least=least,
        )
        if chat is None:
            return ChoiceState(index, source, method, request, answer)
        named = chat.calls is not None and chat.calls.allowed.named
        return ChoiceState(
            index, source, method, request, answer, parser=chat.parser(), named=named
        )

    def _truncated(
        self, body: BaseRequest, ids: list[int], asked: TokenBudget, method: str
    ) -> list[int]:
        """As much of a prompt as is asked for; -1: what leaves room for the answer."""
        most = body.truncate_prompt_tokens or 0
        if most < 0:
            answer = asked.given or asked.usual or 1
            most = max(self.known.room(self.capacity, method) - answer, 1)
        return ids[-most:] if body.truncation_side == "left" else ids[:most]

    def _stop(self, body: BaseRequest, ends: tuple[int, ...]) -> Stop:
        strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(strings) > MOST_STOPS:
            raise APIError(f"at most {MOST_STOPS} stop strings; got {len(strings)}", "stop")
        if "" in strings:
            raise APIError("a stop string is empty, and would be everywhere; leave it out", "stop")
        own = () if body.ignore_eos else self.known.eos_ids
        ids = tuple(dict.fromkeys((*own, *ends, *(body.stop_token_ids or ()))))
        with _blamed("stop"):
            return Stop(None, tuple(strings), ids)

    def _method(self, body: BaseRequest) -> tuple[str, int | None]:
        """The lane, and how deep its drafts may be."""
        config, predicted = body.speculative_config, body.prediction is not None
        depth = None if config is None else config.num_speculative_tokens
        if config is not None and config.method is not None:
            try:
                method = self.known.methods.named(config.method)
            except UnknownName as error:
                raise APIError(str(error), "speculative_config") from error
        elif depth == 0:
            method = lane.NONE
        elif predicted:
            method = lane.PREDICTION
        else:
            method = lane.DEFAULT if body.seed is None else lane.COUPLED
        if predicted and (depth == 0 or method not in self.known.methods.copying):
            asked = f"{depth} tokens" if depth == 0 else f"method {method!r}"
            what = f"a prediction is drafted from by method {lane.PREDICTION!r}; got {asked}"
            raise APIError(f"{what}; leave speculative_config or prediction out", "prediction")
        return method, None if method == lane.NONE else depth

    def _budget(
        self, ids: Sequence[int], asked: TokenBudget, method: str, stands: frozenset[int]
    ) -> int:
        """Tokens that are asked for; or what is usual, if a row has room for it.

        A placeholder may be a token that the output layer does not know (Llama 3.2 Vision).
        """
        if not ids:
            raise APIError("the prompt has no tokens; write at least one", asked.prompt)
        self._within(asked.prompt, (token for token in ids if token not in stands))
        most, context = self.capacity - self.known.methods.nodes[method], self.known.context
        row = self.known.room(self.capacity, method)
        room = row - len(ids)
        if room < 1:
            raise APIError(
                f"the prompt's {len(ids)} tokens leave no room for an answer; a row has "
                f"{row} here; shorten it, or say truncate_prompt_tokens",
                asked.prompt,
                code="context_length_exceeded",
            )
        if asked.given is None:
            return room if asked.usual is None else min(room, asked.usual)
        if min(len(ids) + asked.given, context) > most:  # the context's own end is no error
            raise APIError(
                f"a prompt of {len(ids)} tokens and {asked.given} more need a row of "
                f"{len(ids) + asked.given}; it has {most} here; ask for at most {room}",
                asked.budget,
                code="context_length_exceeded",
            )
        return asked.given

    def _within(self, param: str, ids: Iterable[int]) -> None:
        """Refuse tokens that the model does not have."""
        size = self.known.vocab_size
        strange = next((token for token in ids if token >= size), None)
        if strange is not None:
            raise APIError(f"token {strange} is outside the vocabulary of {size}", param)

    def _sampling(
        self, body: BaseRequest, copy: int, ids: Sequence[int], grammar: str | None
    ) -> SamplingParams:
        """How a row is sampled; a request without a seed gets one that nobody can guess."""
        seed = secrets.randbits(63) if body.seed is None else (body.seed + copy) % 2**64
        processors: tuple[Grammar, ...] = ()
        if grammar is not None:
            tokenizer = of_transformers(self.known.tokenizer, grammar_field(body))
            words = vocabulary(tokenizer, self.known.vocab_size, self.known.eos_ids)
            try:
                processors = (Grammar(words, grammar, len(ids)),)
            except ConfigurationError as error:
                raise uncompiled(body, error) from error
        given = {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": None if body.top_k is None else max(body.top_k, 0),
            "min_p": body.min_p,
            "frequency_penalty": body.frequency_penalty,
            "presence_penalty": body.presence_penalty,
            "repetition_penalty": body.repetition_penalty,
            "min_new_tokens": body.min_tokens,
            "logit_bias": self._biases(body.logit_bias),
        }
        said = {name: value for name, value in given.items() if value is not None}
        try:
            own = {**self.known.defaults.sampling, **said}
            sampling = SamplingParams(**own, seed=seed, processors=processors)
            rules = self.known.defaults.rules_without(len(ids), set(said).intersection(RULES))
            return ruled(sampling, rules)
        except OutriderError as error:
            raise APIError(str(error)) from error

    def _biases(self, given: dict[str, float] | None) -> dict[int, float] | None:
        if given is None:
            return None
        wrong = next(
            (token for token in given if not (token.isascii() and token.isdecimal())), None
        )
        if wrong is not None:
            raise APIError(f"logit_bias names tokens by their ids; got {wrong!r}", "logit_bias")
        long = next((token for token in given if len(token) > 9), None)  # int() has a limit
        if long is not None:
            what = f"token {long[:20]} is outside the vocabulary of {self.known.vocab_size}"
            raise APIError(what, "logit_bias")
        biases = {int(token): bias for token, bias in given.items()}
        self._within("logit_bias", biases)
        return biases


@contextmanager
def _blamed(param: str) -> Iterator[None]:
    """What is refused here is this field's fault."""
    try:
        yield
    except OutriderError as error:
        raise APIError(str(error), param) from error


def _copies(body: BaseRequest) -> int:
    """How many answers are written to each prompt."""
    best = body.best_of if isinstance(body, CompletionRequest) else None
    return body.n if best is None else best


def _scores(body: BaseRequest) -> int | None:
    """How many of the likeliest tokens are told at each place of a prompt; None: nothing is."""
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    asked = [one for one in (echoed, body.prompt_logprobs) if one is not None]
    return max(asked, default=None)


def _sent(body: BaseRequest, count: int) -> list[ResumeState]:
    """What the client has of each choice."""
    sent = [ResumeState()] * count if body.resume is None else body.resume
    if len(sent) != count:
        raise APIError(f"resume says of {len(sent)} choices what is there; got {count}", "resume")
    return sent


def _resume(choice: ChoiceState, sent: ResumeState) -> None:
    """The choice as it was when these tokens had been told."""
    answer, ids, logs = choice.answer, sent.token_ids, choice.request.logprobs
    text = ""
    for at, token in enumerate(ids, start=1):  # one by one: what is certain of a text is told
        ended = sent.finish_reason if at == len(ids) else None
        block = StepOutput(0, [token], 0, ended, logprobs=None if logs is None else [0.0])
        text += answer.append(block).text
    if logs is not None:
        choice.likeliest = [[] for _ in ids]
    choice.told, choice.reason = len(ids), sent.finish_reason
    if choice.parser is not None:  # what these tokens say was told, part by part
        choice.parser.push(text, last=choice.reason is not None)
    elif sent.characters is not None:
        choice.owed = text[sent.characters :]
