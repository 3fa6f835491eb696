"""Outputs as OpenAI's objects: choices, chunks, usage, log-probabilities, metrics."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, TypeAlias

from pydantic_core import to_json

from outrider.engine.outputs import StepOutput
from outrider.server.message_parser import MessageParts
from outrider.server.messages import JsonObject
from outrider.server.model_info import TextOffsets, TokenFormatter
from outrider.server.request_parsing import ChoiceState
from outrider.stats import RequestStats
from outrider.text.output_text import TextBlock

#: A token with its log-probability, as a client reads it.
Entry: TypeAlias = JsonObject

_REASONS = {"stop": "stop", "length": "length", "context": "length"}
_PADDED = 64  #: bytes of an event are a multiple of this, so that packets tell no block sizes
_FILLING = secrets.token_hex(_PADDED).encode()


def append_output(choice: ChoiceState, block: StepOutput) -> TextBlock:
    """A block's words, counted."""
    said = choice.answer.append(block)
    if choice.owed:
        said, choice.owed = replace(said, text=choice.owed + said.text), ""
    stats, now = choice.stats, time.monotonic()
    stats.steps += 1
    stats.new_tokens += len(said.token_ids)
    stats.drafted += block.drafted
    stats.accept(said.accepted)
    choice.histogram.extend([0] * (said.accepted + 1 - len(choice.histogram)))
    choice.histogram[said.accepted] += 1
    choice.likeliest += (block.likeliest or [])[: len(said.token_ids)]
    if choice.last is not None and said.token_ids:
        choice.waits.append((now - choice.last) / len(said.token_ids))
    choice.first = choice.first or now
    choice.last, choice.reason = now, said.finish_reason
    return said


def prompts(choices: Sequence[ChoiceState]) -> tuple[int, int]:
    """Tokens of all prompts, and those that were copied. What several choices share counts once."""
    each: dict[int, RequestStats] = {}
    for choice in choices:
        each.setdefault(choice.source, choice.stats)
    stats = each.values()
    return sum(one.prompt_tokens for one in stats), sum(one.cached_tokens for one in stats)


def usage(choices: Sequence[ChoiceState]) -> JsonObject:
    """Tokens read and written. A prompt that several choices share counts once."""
    read, copied = prompts(choices)
    written = sum(len(choice.answer.tokens) for choice in choices)
    told: JsonObject = {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": copied},
    }
    each = [one.predicted.of(one.answer.tokens) for one in choices if one.predicted is not None]
    if not each:
        return told
    details = {
        "accepted_prediction_tokens": sum(accepted for accepted, _ in each),
        "rejected_prediction_tokens": sum(rejected for _, rejected in each),
    }
    return told | {"completion_tokens_details": details}


def metrics(choices: Sequence[ChoiceState]) -> JsonObject:
    """How the answer was decoded, under vLLM's names."""
    accepted = sum(choice.stats.accepted for choice in choices)
    drafted = sum(choice.stats.drafted for choice in choices)
    steps = sum(choice.stats.steps for choice in choices)
    histogram = [0] * max((len(choice.histogram) for choice in choices), default=0)
    for choice in choices:
        for at, count in enumerate(choice.histogram):
            histogram[at] += count
    told: JsonObject = {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
        }
    }
    firsts = [one.first for one in choices if one.first is not None]
    lasts = [one.last for one in choices if one.last is not None]
    if firsts and lasts:  # of whichever choice came first, or last
        arrived = choices[0].arrived
        started = min((t for one in choices if (t := one.scheduled) is not None), default=arrived)
        first, spent = min(firsts), max(lasts) - started
        written = sum(choice.stats.new_tokens for choice in choices)
        told |= {
            "time_to_first_token_ms": 1e3 * (first - arrived),
            "queue_time_ms": 1e3 * (started - arrived),
            "generation_time_ms": 1e3 * spent,
            "mean_itl_ms": 1e3 * (max(lasts) - first) / max(written - 1, 1),
            "tokens_per_second": written / spent if spent else 0.0,
        }
    return told


class CompletionFormat:
    """`/v1/completions`."""

    prefix: ClassVar[str] = "cmpl-"
    whole: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"

    def message(self, text: str, choice: ChoiceState) -> JsonObject:
        return {"text": text}

    def delta(self, text: str, choice: ChoiceState, last: bool) -> JsonObject:
        """What is new of a text."""
        return {"text": text}

    def logs(self, entries: list[Entry], offsets: Callable[[], list[int]], top: int) -> JsonObject:
        """Columns, one value a token."""
        keyed = [_keyed(entry) for entry in entries]
        return {
            "tokens": [key for key, _ in keyed],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [tops for _, tops in keyed] if top else None,
            "text_offset": offsets(),
        }


def _keyed(entry: Entry) -> tuple[str, dict[str, float]]:
    """A token's name, and the log-probabilities of the likeliest, and its own, by theirs: each has
    its own.

    A token is named by its text. One that is no text alone (half a character), or is written as one
    that is more probable, is named as vLLM names tokens by their ids.
    """
    names: dict[int, str] = {}
    for one in sorted((*entry["top_logprobs"], entry), key=lambda one: -one["logprob"]):
        if one["id"] not in names:
            whole = one["token"].encode() == bytes(one["bytes"])
            free = whole and one["token"] not in names.values()
            names[one["id"]] = one["token"] if free else f"token_id:{one['id']}"
    tops = {names[one["id"]]: one["logprob"] for one in (*entry["top_logprobs"], entry)}
    return names[entry["id"]], tops


class ChatFormat:
    """`/v1/chat/completions`."""

    prefix: ClassVar[str] = "chatcmpl-"
    whole: ClassVar[str] = "chat.completion"
    chunk: ClassVar[str] = "chat.completion.chunk"

    def message(self, text: str, choice: ChoiceState) -> JsonObject:
        """A message."""
        if choice.parser is None:
            return {"message": MessageParts(content=text).message()}
        return {"message": choice.parser.push(text, last=True).message()}

    def delta(self, text: str, choice: ChoiceState, last: bool) -> JsonObject:
        """What is new of a message."""
        if choice.parser is None:
            return {"delta": {"content": text}}
        return {"delta": choice.parser.push(text, last).delta()}

    def logs(self, entries: list[Entry], offsets: Callable[[], list[int]], top: int) -> JsonObject:
        """An entry a token."""
        return {"content": [_plain(entry) for entry in entries], "refusal": None}


def _plain(entry: Entry) -> Entry:
    """An entry as OpenAI has it: tokens have no ids."""
    told = {name: value for name, value in entry.items() if name != "id"}
    if "top_logprobs" in told:
        told["top_logprobs"] = [_plain(one) for one in told["top_logprobs"]]
    return told


#: How one of the routes writes its answers: what ids begin with, kinds of objects, texts, parts of
#: texts, and log-probabilities.
RouteFormat: TypeAlias = CompletionFormat | ChatFormat


@dataclass
class ResponseBuilder:
    """Writes the objects of one answer. `told` is whether metrics are in it."""

    form: RouteFormat
    model: str
    fingerprint: str
    words: TokenFormatter
    told: bool = True
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: bytes = field(init=False, default=b"")

    def head(self, kind: str) -> JsonObject:
        """What every object begins with."""
        return {
            "id": self.form.prefix + self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def whole(self, choices: Sequence[ChoiceState], echo: bool = False) -> JsonObject:
        written = [
            self._piece(
                choice, self.form.message(self._text(choice, echo), choice), 0, choice.reason
            )
            | self._prompt(choice, echo)
            for choice in chosen(choices)
        ]
        told = self.head(self.form.whole) | {"choices": written} | self.more(choices[0])
        return told | self.tail(choices)

    def _prompt(self, choice: ChoiceState, echo: bool) -> JsonObject:
        """What is told of a prompt's tokens."""
        told: JsonObject = {}
        if choice.scored is None or choice.scores is None:
            return told
        ids, logs = list(choice.scored.prompt), choice.scores.logprobs or []
        likeliest = choice.scores.likeliest or []
        if choice.prompt_top is not None:  # in vLLM's form
            places = zip(ids[1:], logs, likeliest, strict=True)
            told["prompt_logprobs"] = [
                None,
                *(self._place(*place, choice.prompt_top) for place in places),
            ]
        if echo and choice.request.logprobs is not None and not choice.silent:
            first = self._entry(ids[0], 0.0, [])
            top = choice.request.logprobs.top
            entries = [
                self._entry(token, log, others[:top])
                for token, log, others in zip(ids[1:], logs, likeliest, strict=True)
            ]
            entries = [first, *entries, *self._entries(choice, 0)]
            tokens = ids + choice.answer.tokens
            offsets = partial(TextOffsets(self.words).since, tokens, 0, len(entries))
            columns = self.form.logs(entries, offsets, top)
            columns["token_logprobs"][0] = None  # nothing is in front of it
            if columns["top_logprobs"]:
                columns["top_logprobs"][0] = None
            told["logprobs"] = columns
        return told

    def _place(
        self, token: int, log: float, likeliest: list[tuple[int, float]], top: int
    ) -> JsonObject:
        """What vLLM tells of one token of a prompt; the rank of what is not among these is null."""
        ranks = {other: (value, rank) for rank, (other, value) in enumerate(likeliest[:top], 1)}
        ranks.setdefault(token, (log, 0))
        return {
            str(one): {
                "logprob": max(value, -9999.0),
                "rank": rank or None,
                "decoded_token": self.words.entry(one, value)["token"],
            }
            for one, (value, rank) in ranks.items()
        }

    def tail(self, choices: Sequence[ChoiceState]) -> JsonObject:
        """What an answer ends with."""
        told = {"metrics": metrics(choices)} if self.told else {}
        return {"usage": usage(choices)} | told

    def event(self, pieces: Sequence[JsonObject], **more: object) -> bytes:
        """Choices' pieces as a chunk of a stream, in JSON; what every chunk begins with is written
        once."""
        if not self._begun:
            self._begun = to_json(self.head(self.form.chunk))[:-1] + b',"choices":'
        rest = b"," + to_json(more)[1:] if more else b"}"
        return self._begun + to_json(pieces) + rest

    def _prompt_ids(self, choice: ChoiceState) -> JsonObject:
        """Told once, as vLLM does: a chunk costs nothing that grows with the prompt."""
        return {"prompt_token_ids": list(choice.request.asked)} if choice.tells_ids else {}

    def more(self, choice: ChoiceState) -> JsonObject:
        """What an answer, or the chunk that opens a choice, has beside its choices: a chat's
        tokens, where vLLM tells them."""
        return self._prompt_ids(choice) if isinstance(self.form, ChatFormat) else {}

    def opening(self, choice: ChoiceState, echo: bool) -> JsonObject | None:
        """The piece that a stream tells of a choice before anything is decoded, if any."""
        piece: JsonObject = {"index": choice.index, "logprobs": None, "finish_reason": None}
        if isinstance(self.form, ChatFormat):
            piece["delta"] = {"role": "assistant", "content": ""}
        elif echo:
            piece |= self.form.delta(self.words.text(choice.request.asked), choice, False)
        else:
            return None
        return piece

    def delta(
        self, choice: ChoiceState, text: str, since: int, reason: str | None, **more: object
    ) -> JsonObject:
        """A part of an answer: the text since a number of tokens."""
        said = self.form.delta(text, choice, reason is not None)
        return self._piece(choice, said, since, reason) | more

    def _text(self, choice: ChoiceState, echo: bool) -> str:
        before = self.words.text(choice.request.asked) if echo else ""
        return before + choice.answer.text

    def _piece(
        self, choice: ChoiceState, said: JsonObject, since: int, reason: str | None
    ) -> JsonObject:
        ids: JsonObject = {}
        if choice.tells_ids:
            ids["token_ids"] = choice.answer.tokens[since:]
            if not since and not isinstance(self.form, ChatFormat):
                ids |= self._prompt_ids(choice)
        return {
            "index": choice.index,
            **said,
            "logprobs": self.logs(choice, since),
            "finish_reason": None if reason is None else _finish(choice, reason),
            **ids,
        }

    def logs(self, choice: ChoiceState, since: int) -> JsonObject | None:
        """Log-probabilities since a number of tokens, if they were asked for."""
        asked = choice.request.logprobs
        if asked is None or choice.silent:
            return None
        entries = self._entries(choice, since)
        choice.offsets = choice.offsets or TextOffsets(self.words)
        offsets = partial(choice.offsets.since, choice.answer.tokens, since, len(entries))
        return self.form.logs(entries, offsets, asked.top)

    def _entries(self, choice: ChoiceState, since: int) -> list[Entry]:
        """One entry for each token of the text; the token that ended it is none."""
        answer = choice.answer
        ids, logs = answer.tokens[since:], (answer.logprobs or [])[since:]
        if choice.reason == "stop" and ids and ids[-1] in answer.stop_ids:
            ids = ids[:-1]
        tops = choice.likeliest[since:] or [[] for _ in ids]
        return [
            self._entry(token, log, top) for token, log, top in zip(ids, logs, tops, strict=False)
        ]

    def _entry(self, token: int, log: float, likeliest: list[tuple[int, float]]) -> Entry:
        tops = [self.words.entry(other, value) for other, value in likeliest]
        return self.words.entry(token, log) | {"top_logprobs": tops}


def chosen(choices: Sequence[ChoiceState]) -> Sequence[ChoiceState]:
    """The choices that are told: all, or the likeliest by token of each prompt (`best_of`)."""
    best = choices[0].best
    if best is None:
        return choices
    kept: list[ChoiceState] = []
    for source in dict.fromkeys(choice.source for choice in choices):
        own = [choice for choice in choices if choice.source == source]
        own.sort(key=_likelihood, reverse=True)
        kept += own[:best]
    for index, choice in enumerate(kept):
        choice.index = index
    return kept


def _likelihood(choice: ChoiceState) -> float:
    """Mean log-probability of a choice's tokens."""
    logs = choice.answer.logprobs or [0.0]
    return sum(logs) / len(logs)


def _finish(choice: ChoiceState, reason: str) -> str:
    """Why an answer has ended. One that calls what its request names has simply stopped, and so has
    one that a stop string ends within a call: its arguments are no JSON."""
    parser = choice.parser
    called = parser is not None and parser.called and not parser.within_call
    if reason == "stop" and called and not choice.named:
        return "tool_calls"
    return _REASONS[reason]


def padding(size: int) -> bytes:
    """Characters that fill an event of so many bytes up. Their number matters, not which."""
    return _FILLING[: -size % _PADDED]
