"""The grammar of a whole answer: a thought, then text, JSON, or calls of tools.

One grammar in llguidance's dialect of Lark, whatever is asked for together. A text that ends a
thought or opens a call may be a token of its own or several: both are read alike. Thoughts and text
in front of calls are free: any token but those that end them, or the answer.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.server import json_calls
from outrider.server.gemma_arguments import rules
from outrider.server.messages import Allowed, Function
from outrider.server.tool_parsers import ToolParser

#: Separators as templates write them, and as compact JSON has them.
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": True,
}
#: As models write it that follow no template.
_SPACED = {"whitespace_pattern": json_calls.gap(), "coerce_one_of": True}
_TEXT = "TEXT: /(?s:.*)/"
_GAP = "GAP: /[ \\n]{0,4}/"  # between a thought and what is no text


@dataclass(frozen=True)
class ToolCalls:
    """What may be called, and how it is written."""

    allowed: Allowed
    parser: ToolParser


@dataclass(frozen=True)
class Thought:
    """A thought in front of the answer, by its marks; `opened`: the prompt has begun it."""

    start: str
    end: str
    opened: bool


def answer_grammar(
    tokenizer: Any,
    eos_ids: Sequence[int],
    content: str | None,
    calls: ToolCalls | None,
    thought: Thought | None,
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

    def answer(self, content: str | None, calls: ToolCalls | None, thought: Thought | None) -> str:
        said = "@content"
        if content is None:
            said = self._free("said", [calls.parser.opening] if calls is not None else [])
        if calls is None:
            ways = [said]
        else:
            ways = list(self._called(calls, content is None, said))
        starts = ways
        if thought is not None:
            self._thought(thought)
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

    def _thought(self, thought: Thought) -> None:
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
        opening, closing = self._token(json_calls.OPENING), self._token(json_calls.CLOSING)
        self._free("found_free", [])
        for at, function in enumerate(calls.allowed.functions):
            schema = {**closed(function.schema_), "x-guidance": _SPACED}
            self.lines += [
                f"first_{at}[lazy]: /{json_calls.first(function.name)}/",
                f"NEXT_{at}: /{json_calls.next_one(function.name)}/",
                f"given_{at}: SPACE %json {json.dumps(schema, allow_nan=False)} END",
            ]
            firsts.append(f"first_{at} given_{at}")
            nexts.append(f"NEXT_{at} given_{at}")
        self.lines += [
            f"SPACE: /{json_calls.gap()}/",
            f"END: /{json_calls.end()}/",
            f"LAST: /{json_calls.last()}/",
            "last: LAST?" + (f" ({closing} LAST?)?" if closing else ""),
            f"next: last {f'{opening}? ' if opening else ''}({' | '.join(nexts)})",
        ]
        return f"found_free_head ({' | '.join(firsts)}) {'next* ' * calls.allowed.several}last"

    def _call(self, at: int, function: Function, parser: ToolParser) -> None:
        """The rule of a call of one function."""
        if parser.arguments == "gemma":
            name = f"arguments_{at}"
            self.lines += rules(name, function, lambda text: self._texts(text))
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


def closed(schema: dict[str, Any]) -> dict[str, Any]:
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
