"""Calls that models write as plain JSON, in a code fence or not: the parser `json`.

Qwen2.5-Coder and others are told to write `<tool_call>` and write a fenced object, or an object
alone. What begins with the name of a known function where a line or a fence begins is a call; any
other JSON is text.

>>> find('So:\\n```json\\n{\\n  "name": "f",\\n  "arguments": {"a"', ["f"], fresh=True)
Found(start=4, end=44, name='f')
>>> find('{"name": "Anna"}', ["f"], fresh=True)
16
"""

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

#: What may stand in front of an object and behind it.
OPENING, CLOSING = "<tool_call>", "</tool_call>"
_FENCES = ("```json", "```", OPENING, "")
_KEYS = ("arguments", "parameters")
_BLANKS = " \t\r\n"
_GAP = "[ \\t\\r\\n]*"
_SHORT = "[ \\t\\r\\n]{0,40}"  # where something must follow, or the end
_FENCE = "(```(json)?|<tool_call>)"


class Found(NamedTuple):
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


def find(text: str, names: Sequence[str], fresh: bool, anywhere: bool = False) -> Found | int:
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
                return Found(at, end - 1, name)
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
