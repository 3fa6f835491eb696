"""Arguments as FunctionGemma writes them: `{city:<escape>Paris<escape>,days:3,tags:[...]}`.

Keys have no quotes, strings stand between two marks and escape nothing. A schema becomes rules of
a grammar, what was written becomes JSON.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from outrider.server.messages import Function

ESCAPE = "<escape>"
_INTEGER, _NUMBER = r"/-?(0|[1-9][0-9]{0,17})/", r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/"
#: Words of a schema that change nothing of what may be written.
_ABOUT = {"title", "description", "default", "examples", "$schema", "$defs", "definitions"}
_KNOWN = {"type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "$ref"}
_DEEP = 16  #: levels of a schema


def rules(name: str, function: Function, literal: Callable[[str], str]) -> list[str]:
    """Rules of a grammar, of which the one called `name` is the arguments of a function.

    literal  writes a text of the grammar, marks in it as tokens

    Raises ValueError for a schema with words that this format has no grammar for.
    """
    return _Rules(function.schema_, literal, name).lines


class _Rules:
    def __init__(self, schema: dict[str, Any], literal: Callable[[str], str], name: str) -> None:
        self._root, self._literal, self._name = schema, literal, name
        self.lines: list[str] = []
        self._count = 0
        self.lines.append(f"{name}: {self._value({'type': 'object'} | schema, 0)}")

    def _value(self, schema: dict[str, Any], depth: int) -> str:
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

    def _kind(self, kind: str, schema: dict[str, Any], depth: int) -> str:
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

    def _object(self, schema: dict[str, Any], depth: int) -> str:
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

    def _found(self, path: object) -> dict[str, Any]:
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


def as_json(written: str) -> str:
    """The arguments as JSON. What broke off ends where it is whole; "" if nothing is.

    >>> as_json("{city:<escape>Paris<escape>,days:3,tags:[<escape>a<escape>]}")
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
