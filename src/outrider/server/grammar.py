"""Answers that follow a JSON schema, a regular expression or a grammar, by llguidance.

A grammar is a processor of the row: it masks the laws of target and draft at every node of a draft
tree, each by the text that leads to it, so drafts stay lawful and the law is the target's under the
mask. One matcher walks from text to text by rollback: neighbouring nodes share most of their way.
"""

import json
import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import llguidance.numpy
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider import arguments
from outrider.errors import ConfigurationError
from outrider.server import call_formats, gbnf
from outrider.server.call_formats import gemma_rules
from outrider.server.errors import APIError
from outrider.server.messages import Allowed, Function, JsonObject
from outrider.server.protocol import GUIDED, BaseRequest, ChatCompletionRequest
from outrider.server.tool_parsers import ToolParser

# The grammar of a whole answer: a thought, then text, JSON, or calls of tools.
#
# One grammar in llguidance's dialect of Lark, whatever is asked for together. A text that ends a
# thought or opens a call may be a token of its own or several: both are read alike. Thoughts and
# text in front of calls are free: any token but those that end them, or the answer.

#: Separators as templates write them, and as compact JSON has them.
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": True,
}
#: As models write it that follow no template.
_SPACED = {"whitespace_pattern": call_formats.gap(), "coerce_one_of": True}
_TEXT = "TEXT: /(?s:.*)/"
_GAP = "GAP: /[ \\n]{0,4}/"  # between a thought and what is no text


@dataclass(frozen=True)
class ToolCalls:
    """What may be called, and how it is written."""

    allowed: Allowed
    parser: ToolParser


@dataclass(frozen=True)
class ReasoningMarks:
    """A thought in front of the answer, by its marks; `opened`: the prompt has begun it."""

    start: str
    end: str
    opened: bool


def answer_grammar(
    tokenizer: Any,
    eos_ids: Sequence[int],
    content: str | None,
    calls: ToolCalls | None,
    thought: ReasoningMarks | None,
) -> str | None:
    """The grammar of an answer; None: any text.

    eos_ids  tokens that end an answer
    content  llguidance's grammar of the text, if it has one

    Raises ValueError for schemas of a function that its format cannot write.
    """
    if calls is None and (content is None or thought is None):
        return content
    return _Lark(tokenizer, eos_ids).answer(content, calls, thought)


@dataclass
class _Lark:
    tokenizer: Any
    eos_ids: Sequence[int]
    lines: list[str] = field(default_factory=lambda: ["%llguidance {}", _TEXT, _GAP])

    def answer(
        self, content: str | None, calls: ToolCalls | None, thought: ReasoningMarks | None
    ) -> str:
        said = "@content"
        if content is None:
            said = self._free("said", [calls.parser.opening] if calls is not None else [])
        if calls is None:
            ways = [said]
        else:
            ways = list(self._called(calls, content is None, said))
        starts = ways
        if thought is not None:
            self._reasoning_lines(thought)
            text = content is None and not (calls is not None and calls.allowed.must)
            starts = ["thought answer" if text else "thought GAP answer"]
            starts += [] if thought.opened else ["answer"]
            self.lines.append(f"answer: {' | '.join(ways)}")
        self.lines.append(f"start: {' | '.join(starts)}")
        whole = "\n".join(self.lines)
        if content is None:
            return whole
        if content.lstrip().startswith("{"):
            grammars = json.loads(content)["grammars"]
        else:  # a choice, or a grammar of the request: Lark
            grammars = [{"lark_grammar": content}]
        grammars[0]["name"] = "content"
        return json.dumps({"grammars": [{"name": "answer", "lark_grammar": whole}, *grammars]})

    def _reasoning_lines(self, thought: ReasoningMarks) -> None:
        """`thought`: all up to its end."""
        self._until("thinking", thought.end)
        if not thought.opened:
            self.lines.append(f"begun_text[lazy]: {json.dumps(thought.start)}")
            token = self._token(thought.start)
            self.lines.append("begun: begun_text" + (f" | {token}" if token else ""))
        self.lines.append(f"thought: {'' if thought.opened else 'begun '}thinking")

    def _until(self, name: str, mark: str) -> None:
        """A rule of this name for anything up to a mark, and the mark."""
        self._free(name + "_free", [mark])
        self.lines.append(f"{name}_text[lazy]: TEXT {json.dumps(mark)}")
        token = self._token(mark)
        ways = f"{name}_text" + (f" | TEXT {token}" if token else "")
        self.lines.append(f"{name}: {name}_free_head ({ways})")

    def _free(self, name: str, marks: Sequence[str]) -> str:
        """A rule of this name for text with any tokens but these marks, and what ends answers.

        Tokens that are no text stand between pieces of it; `name`_head is all up to the last one.
        """
        vocabulary = self.tokenizer.get_added_vocab()
        ends = {*self.eos_ids, *(vocabulary.get(mark) for mark in marks)}
        ids = sorted({*vocabulary.values()} - ends)
        head = f"(TEXT <[{','.join(map(str, ids))}]>)*" if ids else '""'
        self.lines += [f"{name}_head: {head}", f"{name}: {name}_head TEXT"]
        return name

    def _called(self, calls: ToolCalls, free: bool, said: str) -> Iterator[str]:
        """The ways of an answer that may call functions."""
        parser, allowed = calls.parser, calls.allowed
        one = " | ".join(f"call_{at}" for at in range(len(allowed.functions)))
        for at, function in enumerate(allowed.functions):
            self._call(at, function, parser)
        more = f" ({self._texts(parser.between)} call)*" if allowed.several else ""
        first = self._texts(parser.first)
        if parser.first.startswith(" "):
            first = f'" "? {self._texts(parser.first[1:])}'
        self.lines.append(f"call: {one}")
        self.lines.append(f"calls: {first} call{more} {self._texts(parser.last)}")
        token = None if parser.token is None else self._token(parser.token)
        opening = self._texts(parser.opening) if parser.opening else f"{token}?" if token else ""
        if allowed.must:
            yield f"{opening} calls"
        elif not free:
            yield from (said, f"{opening} calls")
        elif parser.found:
            yield from (said, self._found(calls))
        elif not parser.opening:  # what begins like a call is one
            self.lines.append("OTHER: /([^{](?s:.*))?/")
            yield from ("OTHER", f"{opening} calls")
        else:
            self._until("opened", parser.opening)
            yield from (said, "opened calls")

    def _found(self, calls: ToolCalls) -> str:
        """Any text up to a call's first words, and calls that are found so."""
        firsts, nexts = [], []
        opening, closing = self._token(call_formats.OPENING), self._token(call_formats.CLOSING)
        self._free("found_free", [])
        for at, function in enumerate(calls.allowed.functions):
            schema = {**closed(function.schema_), "x-guidance": _SPACED}
            self.lines += [
                f"first_{at}[lazy]: /{call_formats.first(function.name)}/",
                f"NEXT_{at}: /{call_formats.next_one(function.name)}/",
                f"given_{at}: SPACE %json {json.dumps(schema, allow_nan=False)} END",
            ]
            firsts.append(f"first_{at} given_{at}")
            nexts.append(f"NEXT_{at} given_{at}")
        self.lines += [
            f"SPACE: /{call_formats.gap()}/",
            f"END: /{call_formats.end()}/",
            f"LAST: /{call_formats.last()}/",
            "last: LAST?" + (f" ({closing} LAST?)?" if closing else ""),
            f"next: last {f'{opening}? ' if opening else ''}({' | '.join(nexts)})",
        ]
        return f"found_free_head ({' | '.join(firsts)}) {'next* ' * calls.allowed.several}last"

    def _call(self, at: int, function: Function, parser: ToolParser) -> None:
        """The rule of a call of one function."""
        if parser.arguments == "gemma":
            name = f"arguments_{at}"
            self.lines += gemma_rules(name, function, lambda text: self._texts(text))
        else:
            schema = closed(function.schema_)
            name = f"%json {json.dumps({**schema, 'x-guidance': _JSON}, allow_nan=False)}"
        header = self._texts(parser.header(function.name))
        self.lines.append(f"call_{at}: {header} {name} {self._texts(parser.closing)}")

    def _texts(self, text: str) -> str:
        """A literal text; marks in it may be tokens of their own."""
        parts = re.split(r"(</?[a-z_|]+>|\[[A-Z_]+\])", text)
        written = []
        for part in filter(None, parts):
            token = self._token(part)
            literal = json.dumps(part)
            written.append(f"({token} | {literal})" if token else literal)
        return " ".join(written)

    def _token(self, mark: str) -> str | None:
        """The token that a mark is, if it is one of those that were added to a vocabulary."""
        token = self.tokenizer.get_added_vocab().get(mark)
        return None if token is None else f"<[{token}]>"


def closed(schema: JsonObject) -> JsonObject:
    """The schema, with no other properties where it lists some and says nothing of others.

    A function cannot be called with arguments that it does not have.

    >>> closed({"type": "object", "properties": {"a": {}}})["additionalProperties"]
    False
    """
    whole = dict(schema)
    if isinstance(properties := whole.get("properties"), dict):
        whole["properties"] = {
            name: closed(one) if isinstance(one, dict) else one for name, one in properties.items()
        }
        apart = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
        if not any(name in whole for name in apart):
            whole["additionalProperties"] = False
    if isinstance(items := whole.get("items"), dict):
        whole["items"] = closed(items)
    return whole


MOST_BYTES = 64 << 10  #: of a schema or a grammar
_PRIVATE = 0x100000  #: the last plane of Unicode, for private use


@lru_cache(maxsize=4)
def vocabulary(
    tokenizer: PreTrainedTokenizerBase, size: int, eos_ids: tuple[int, ...] = ()
) -> LLTokenizer:
    """The tokenizer as llguidance reads it, for logits of `size` tokens.

    eos_ids  tokens that end an answer which is whole; none: the tokenizer's own

    Special tokens are never a way to write text: a constant or a key "<|im_end|>" is spelled in
    ordinary tokens. llguidance cuts text that is forced as the tokenizer does, which makes a
    special token of a special token's name; so it reads a tokenizer whose special tokens are called
    what nobody writes. A Lark grammar names special tokens by their ids, `<[2]>`.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigurationError(
            f"schemas and grammars need a tokenizer of the tokenizers library; got "
            f"{type(tokenizer).__name__}; leave them out"
        )
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    text = json.dumps(unwritten(json.loads(backend.to_str())))
    count = max(size, len(tokenizer))
    return LLTokenizer(text, n_vocab=count, eos_token=list(eos_ids) or tokenizer.eos_token_id)


def unwritten(said: JsonObject) -> JsonObject:
    """A tokenizer.json whose special tokens have names of private characters.

    >>> said = {"added_tokens": [{"id": 2, "content": "</s>", "special": True}], "model": {}}
    >>> unwritten(said)["added_tokens"][0]["content"]
    '\\U00100000'
    """
    special = [one["content"] for one in said["added_tokens"] if one["special"]]
    # by their order: ids are larger than a plane of Unicode
    names = {content: chr(_PRIVATE + at) for at, content in enumerate(special)}
    added = [
        one | {"content": names.get(one["content"], one["content"])} for one in said["added_tokens"]
    ]
    model = dict(said["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return said | {"added_tokens": added, "model": model, "post_processor": None}


class RequestedGrammar(NamedTuple):
    """A grammar that a request asks for: by which field, of what kind, and its text."""

    field: str
    kind: str  #: json, regex, choice or grammar
    given: Any


def requested_grammar(body: BaseRequest) -> RequestedGrammar | None:
    """What a request asks for; None: free text."""
    form, structured = body.response_format, body.structured_outputs
    if form is not None and form.type != "text":
        schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
        return RequestedGrammar("response_format", "json", schema)
    if structured is not None:
        field, kinds = "structured_outputs", structured.model_dump(by_alias=True, exclude_none=True)
        if "json_object" in kinds:
            return RequestedGrammar(field, "json", {"type": "object"})
        return RequestedGrammar(field, *next(iter(kinds.items())))
    for field, given in arguments.fields_of(body, GUIDED).items():
        if given is not None:
            return RequestedGrammar(field, field.removeprefix("guided_"), given)
    return None


def grammar_field(body: BaseRequest) -> str:
    """The field by which a request asks for a grammar, if it does; else its tools do."""
    asked = requested_grammar(body)
    return "tools" if asked is None else asked.field


def uncompiled(body: BaseRequest, error: ConfigurationError) -> APIError:
    """Why a grammar does not compile, by the field: of a tool, what is wrong in its schema and no
    line of the grammar that was made of it."""
    tools = body.tools if isinstance(body, ChatCompletionRequest) else None
    for at, tool in enumerate(tools or ()):
        schema = json.dumps(tool.function.parameters or {})
        wrong = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
        if wrong:
            what = f"the schema of {tool.function.name!r} does not compile: {wrong}"
            return APIError(what, f"tools.{at}.function.parameters")
    return APIError(str(error), grammar_field(body))


def grammar_of(body: BaseRequest) -> str | None:
    """The grammar that a request asks for; None for free text. Raises Refusal."""
    asked = requested_grammar(body)
    if asked is None:
        return None
    name, kind, given = asked
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
    except ValueError as error:
        what = "a number in the schema is infinite or not a number; JSON has no such values"
        raise APIError(what, name) from error
    if len(text.encode()) > MOST_BYTES:
        raise APIError(f"{name} has more than {MOST_BYTES} bytes; shorten it", name)
    try:
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        if kind == "grammar":
            is_gbnf = gbnf.is_gbnf(text)
            return gbnf.convert(text) if is_gbnf else str(LLMatcher.grammar_from_lark(text))
        if kind == "choice":
            ways = " | ".join(json.dumps(one) for one in given)
            return str(LLMatcher.grammar_from_lark(f"start: {ways}"))
        compact = {"whitespace_flexible": False}
        return str(LLMatcher.grammar_from_json_schema(text, overrides=compact))
    except ValueError as error:
        raise APIError(f"{name} cannot be read: {error}", name) from error


class Grammar:
    """A processor for one row whose prompt has `prompt` tokens.

    Raises ConfigurationError for a grammar that does not compile.
    """

    def __init__(self, words: LLTokenizer, text: str, prompt: int) -> None:
        self._matcher = LLMatcher(words, text)
        error = self._matcher.get_error()
        if error:
            raise ConfigurationError(f"the schema or grammar does not compile: {error}")
        self._given = words, text, prompt
        self._prompt, self._read = prompt, np.empty(0, np.int64)  #: and what it has read
        self._mask = llguidance.numpy.allocate_token_bitmask(1, words.vocab_size)
        self._bits = torch.arange(32, dtype=torch.int32, device="cpu")

    def __reduce__(self) -> tuple[type["Grammar"], tuple[LLTokenizer, str, int]]:
        """A matcher that has read nothing, where it is unpickled."""
        return Grammar, self._given

    def __call__(self, texts_NL: Tensor, scores_NV: Tensor) -> Tensor:
        """The scores with -inf for what may not follow each text."""
        allowed = torch.stack([self._allowed(text) for text in texts_NL.cpu().numpy()])
        allowed = allowed[:, : scores_NV.shape[1]].to(scores_NV.device)
        short = scores_NV.shape[1] - allowed.shape[1]
        allowed = torch.nn.functional.pad(allowed, (0, short), value=False)
        return scores_NV.masked_fill(~allowed, -torch.inf)

    def _allowed(self, text: NDArray[np.int64]) -> Tensor:
        """[V]: which tokens may follow. No step in Python is for each token of the text."""
        said, read = text[self._prompt :], self._read
        most = min(len(said), len(read))
        differs = np.flatnonzero(said[:most] != read[:most])
        same = int(differs[0]) if differs.size else most
        if same < len(read):
            self._matcher.rollback(len(read) - same)
        fresh = said[same:].tolist()
        taken = self._matcher.try_consume_tokens(fresh) if fresh else 0
        self._read = said[: same + taken].copy()
        if taken < len(fresh):  # a text that the grammar forbids: nothing of it can be emitted
            error = self._matcher.get_error()
            if error:
                raise ConfigurationError(f"the schema or grammar is too large to follow: {error}")
            return torch.zeros(self._mask.shape[1] * 32, dtype=torch.bool, device="cpu")
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask, 0)
        words = torch.from_numpy(self._mask[0])
        return ((words[:, None] >> self._bits) & 1).bool().flatten()
