"""Calls that models write as plain JSON, in a code fence or not: the parser `json`.

Qwen2.5-Coder and others are told to write `<tool_call>` and write a fenced object, or an object
alone. What begins with the name of a known function where a line or a fence begins is a call; any
other JSON is text.

>>> find('So:\\n```json\\n{\\n  "name": "f",\\n  "arguments": {"a"', ["f"], fresh=True)
CallStart(start=4, end=44, name='f')
>>> find('{"name": "Anna"}', ["f"], fresh=True)
16
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from outrider.server.messages import Function, JsonObject

# Arguments as FunctionGemma writes them: `{city:<escape>Paris<escape>,days:3,tags:[...]}`.
#
# Keys have no quotes, strings stand between two marks and escape nothing. A schema becomes rules of
# a grammar, what was written becomes JSON.

ESCAPE = "<escape>"
_INTEGER, _NUMBER = r"/-?(0|[1-9][0-9]{0,17})/", r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/"
#: Words of a schema that change nothing of what may be written.
_ABOUT = {"title", "description", "default", "examples", "$schema", "$defs", "definitions"}
_KNOWN = {"type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "$ref"}
_DEEP = 16  #: levels of a schema


def gemma_rules(name: str, function: Function, literal: Callable[[str], str]) -> list[str]:
    """Rules of a grammar, of which the one called `name` is the arguments of a function.

    literal  writes a text of the grammar, marks in it as tokens

    Raises ValueError for a schema with words that this format has no grammar for.
    """
    return _Rules(function.schema_, literal, name).lines


class _Rules:
    def __init__(self, schema: JsonObject, literal: Callable[[str], str], name: str) -> None:
        self._root, self._literal, self._name = schema, literal, name
        self.lines: list[str] = []
        self._count = 0
        self.lines.append(f"{name}: {self._value({'type': 'object'} | schema, 0)}")

    def _value(self, schema: JsonObject, depth: int) -> str:
        """What may be written for a value."""
        if depth > _DEEP:
            raise ValueError(f"a schema is nested more than {_DEEP} levels deep, or in itself")
        if "$ref" in schema:
            return self._value(self._found(schema["$ref"]), depth + 1)
        strange = set(schema) - _KNOWN - _ABOUT - {"additionalProperties"}
        if strange or schema.get("additionalProperties") not in (None, False):
            word = min(strange, default="additionalProperties")
            raise ValueError(f"functiongemma has no grammar for {word!r} of a schema; leave it out")
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return "(" + " | ".join(self._constant(value) for value in values) + ")"
        ways = schema.get("anyOf") or schema.get("oneOf")
        if ways:
            return "(" + " | ".join(self._value(way, depth + 1) for way in ways) + ")"
        kinds = schema.get("type", "string")
        if isinstance(kinds, list):
            each = [self._value(schema | {"type": kind}, depth + 1) for kind in kinds]
            return "(" + " | ".join(each) + ")"
        return self._kind(kinds, schema, depth)

    def _kind(self, kind: str, schema: JsonObject, depth: int) -> str:
        plain = {
            "integer": _INTEGER,
            "number": _NUMBER,
            "boolean": '("true" | "false")',
            "null": '"null"',
        }
        if kind in plain:
            return plain[kind]
        if kind == "string":
            escape = self._literal(ESCAPE)
            return f"({escape} {self._rule('text[lazy]', 'TEXT ' + json.dumps(ESCAPE))}" + (
                f" | {escape} TEXT {escape})"
            )
        if kind == "array":
            item = self._value(schema.get("items", {}), depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            return self._object(schema, depth)
        raise ValueError(f"a schema has the type {kind!r}, which JSON does not have")

    def _object(self, schema: JsonObject, depth: int) -> str:
        """Properties in their order; those that are not required may be missing."""
        needed = schema.get("required", [])
        properties = schema.get("properties", {})
        if any(name not in properties for name in needed):
            raise ValueError("a schema requires a property that it does not have")
        parts = [
            (f"{self._literal(name + ':')} {self._value(one, depth + 1)}", name in needed)
            for name, one in properties.items()
        ]
        rest, begun = "", ""  # what may follow when something stands before it, and when nothing
        for text, must in reversed(parts):
            behind, first = f'"," {text} {rest}', f"{text} {rest}"
            rest = self._rule("rest", behind if must else f"({behind}) | {rest or EMPTY}")
            begun = self._rule("first", first if must else f"({first}) | {begun or EMPTY}")
        return f'"{{" {begun} "}}"'

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return self._literal(f"{ESCAPE}{value}{ESCAPE}")
        return json.dumps(json.dumps(value))

    def _found(self, path: object) -> JsonObject:
        """The schema that a reference names."""
        found: Any = self._root
        for step in str(path).removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise ValueError(f"a schema refers to {path!r}, which it does not have")
        return found

    def _rule(self, kind: str, body: str) -> str:
        """The name of a rule of its own."""
        base, _, option = kind.partition("[")
        name = f"{self._name}_{base}_{self._count}"
        self._count += 1
        self.lines.append(f"{name}{'[' + option if option else ''}: {body}")
        return name


EMPTY = '""'


def gemma_as_json(written: str) -> str:
    """The arguments as JSON. What broke off ends where it is whole; "" if nothing is.

    >>> gemma_as_json("{city:<escape>Paris<escape>,days:3,tags:[<escape>a<escape>]}")
    '{"city": "Paris", "days": 3, "tags": ["a"]}'
    """
    return "".join(_told(written))


def _told(written: str) -> Iterator[str]:
    at, key = 0, False
    stack: list[str] = []
    while at < len(written):
        character = written[at]
        if written.startswith(ESCAPE, at):
            end = written.find(ESCAPE, at + len(ESCAPE))
            if end < 0:
                return
            yield json.dumps(written[at + len(ESCAPE) : end], ensure_ascii=False)
            at = end + len(ESCAPE)
            continue
        if key and character not in "}]":
            end = written.find(":", at)
            if end < 0:
                return
            yield json.dumps(written[at:end]) + ": "
            at, key = end + 1, False
            continue
        if character in "{[":
            stack.append(character)
        elif character in "}]":
            stack.pop()
        key = character == "{" or (character == "," and stack[-1:] == ["{"])
        yield ", " if character == "," else character
        at += 1
        if not stack:
            return


#: What may stand in front of an object and behind it.
OPENING, CLOSING = "<tool_call>", "</tool_call>"
_FENCES = ("```json", "```", OPENING, "")
_KEYS = ("arguments", "parameters")
_BLANKS = " \t\r\n"
_GAP = "[ \\t\\r\\n]*"
_SHORT = "[ \\t\\r\\n]{0,40}"  # where something must follow, or the end
_FENCE = "(```(json)?|<tool_call>)"


class CallStart(NamedTuple):
    """Where a call begins in a text, where its arguments do, and its function."""

    start: int
    end: int
    name: str


def first(function: str) -> str:
    """Regular expression of a text up to a call of this function, its arguments not included."""
    line = "((?s:.*)\\n)?[ \\t]*"
    return f"({line}|(?s:.*){_FENCE}){_GAP}{_object(function, _GAP)}"


def next_one(function: str) -> str:
    """Regular expression of what stands behind a call and in front of another's arguments."""
    return f"{_SHORT}[,;]?{_SHORT}({_FENCE}{_SHORT})?{_object(function, _SHORT)}"


def last() -> str:
    """Regular expression of an array's and a fence's end behind the `}` of a call."""
    return f"{_SHORT}(\\]{_SHORT})?(```|<\\/tool_call>)?{_SHORT}"


def end() -> str:
    """Regular expression of the `}` of a call, behind its arguments."""
    return f"{_SHORT}\\}}"


def gap() -> str:
    """Regular expression of the blanks in front of arguments, and between their parts."""
    return _SHORT


def find(text: str, names: Sequence[str], fresh: bool, anywhere: bool = False) -> CallStart | int:
    """The first call of one of these functions in a text that comes in pieces.

    fresh     whether the text begins a line
    anywhere  whether calls may begin within lines, too

    Without one, how much of the text is certainly in front of any.
    """
    forms = [*_forms(names)]
    for at in _places(text, fresh, anywhere):
        ends = [(_behind(text, at, parts), name) for parts, name in forms]
        for end, name in ends:
            if end > 0:
                return CallStart(at, end - 1, name)
        if any(end == _MORE for end, _ in ends):
            return at
    return len(text)


_MORE, _NONE = 0, -1


def _behind(text: str, at: int, parts: Sequence[str]) -> int:
    """Where these parts end in a text, blanks between them; _MORE: it breaks off; or _NONE."""
    for part in parts:
        at = next((n for n in range(at, len(text)) if text[n] not in _BLANKS), len(text))
        piece = text[at : at + len(part)]
        at += len(piece)
        if piece != part:
            return _MORE if at == len(text) and part.startswith(piece) else _NONE
    return at


def _places(text: str, fresh: bool, anywhere: bool) -> Iterator[int]:
    """Where a call may begin: objects and arrays that begin a line, and fences."""
    if anywhere:
        yield from (found.start() for found in re.finditer(r"[\[{<]|`{1,3}", text))
        return
    for found in re.finditer(r"(?:^|\n)[ \t]*(?=[\[{])|`{1,3}|<", text):
        fence = found[0][:1] in ("`", "<")
        if fence or found.start() or fresh or found[0].startswith("\n"):
            yield found.start() if fence else found.end()


def _forms(names: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    """The parts of calls up to the first character of their arguments, and their functions."""
    for name, key, fence in product(names, _KEYS, _FENCES):
        for bracket in ("", "["):
            opening = [part for part in (fence, bracket) if part]
            yield [*opening, "{", '"name"', ":", f'"{name}"', ",", f'"{key}"', ":", "{"], name


def _object(function: str, gap: str) -> str:
    """From the bracket of an array, or the object's own, to the colon in front of arguments."""
    keys = "|".join(_KEYS)
    parts = ("(\\[", ")?\\{", '"name"', ":", f'"{re.escape(function)}"', ",", f'"({keys})"', ":")
    return gap.join(parts)
