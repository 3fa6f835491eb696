"""An answer's text taken apart as it comes: what was thought, what is said, what is called.

What may be the beginning of a mark is held back until it is one or is none, and white space at a
border between two parts belongs to neither.
"""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.server.call_formats import CallStart, find, gemma_as_json
from outrider.server.messages import JsonObject
from outrider.server.tool_parsers import ReasoningParser, ToolParser

_LETTERS = string.ascii_letters + string.digits


@dataclass
class CallDelta:
    """What is new of a call: its id and name with the first one, and more of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def delta(self) -> JsonObject:
        """As OpenAI's streams have it."""
        function = {"arguments": self.arguments}
        if self.id is None:
            return {"index": self.index, "function": function}
        about = {"index": self.index, "id": self.id, "type": "function"}
        return about | {"function": {"name": self.name, **function}}


@dataclass
class MessageParts:
    """What is new of a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def delta(self) -> JsonObject:
        """As OpenAI's streams have it."""
        told: JsonObject = {}
        if self.reasoning:
            told["reasoning_content"] = self.reasoning
        if self.content:
            told["content"] = self.content
        if self.calls:
            told["tool_calls"] = [call.delta() for call in self.calls]
        return told

    def message(self) -> JsonObject:
        """A whole message."""
        told: JsonObject = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            told["reasoning_content"] = self.reasoning
        if self.calls:
            told["content"] = self.content or None
            told["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return told


class MessageParser:
    """Takes one answer apart.

    reasoning  the marks of thoughts; None: there are none
    opened     whether the prompt has begun one
    tools      how calls are written; None: none is read
    names      functions that may be called

    >>> from outrider.server.tool_parsers import TOOL_PARSERS
    >>> parser = MessageParser(None, False, TOOL_PARSERS["hermes"], ["f"])
    >>> text = 'Yes. <tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>'
    >>> parts = parser.push(text, last=True)
    >>> parts.content, parts.calls[0].name, parts.calls[0].arguments
    ('Yes.', 'f', '{"a": 1}')
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        opened: bool,
        tools: ToolParser | None,
        names: list[str],
    ) -> None:
        self._reasoning, self._tools, self._names = reasoning, tools, names
        self._rest = ""
        self._fresh = False  #: nothing of this part but white space has come
        self._calls = 0  #: that were begun
        self._said = False  #: there was content
        self._scan = _Scan()
        self._turn: Callable[[MessageParts, bool], bool] = self._content
        if reasoning is not None:
            self._turn = self._thinking if opened else self._beginning
            self._fresh = opened

    @property
    def called(self) -> bool:
        """Whether a function has been called."""
        return self._calls > 0

    @property
    def within_call(self) -> bool:
        """Whether the text, so far, ends within the arguments of a call."""
        return self._turn == self._arguments

    def push(self, text: str, last: bool = False) -> MessageParts:
        """More of the text; with the last of it, what was held back, too."""
        self._rest += text
        parts = MessageParts()
        while self._turn(parts, last):
            pass
        return parts

    # ------------------------------------------------------------------ a turn of each part
    # Each takes what it can from the rest, and says whether there may be more to take.

    def _beginning(self, parts: MessageParts, last: bool) -> bool:
        """A thought, or none."""
        assert self._reasoning is not None
        start, begun = self._reasoning.start, self._rest.lstrip()
        if begun.startswith(start):
            self._rest, self._turn, self._fresh = begun[len(start) :], self._thinking, True
        elif start.startswith(begun) and not last:
            return False
        else:
            self._turn = self._content
        return True

    def _thinking(self, parts: MessageParts, last: bool) -> bool:
        assert self._reasoning is not None
        end = self._reasoning.end
        text, found = self._up_to(end, last)
        parts.reasoning += text
        if found:
            self._turn, self._fresh = self._content, True
        return found

    def _content(self, parts: MessageParts, last: bool) -> bool:
        tools = self._tools
        if tools is None:
            parts.content += self._up_to("", True)[0]
            return False
        if tools.found:
            return self._finding(parts, last)
        if tools.opening:
            text, found = self._up_to(tools.opening, last)
            parts.content += text
            if found:
                self._turn = self._opening
            return found
        return self._unmarked(parts, last)

    def _unmarked(self, parts: MessageParts, last: bool) -> bool:
        """Calls that nothing opens: an answer that begins like one is one."""
        assert self._tools is not None
        begun = self._rest.lstrip() if self._fresh else self._rest
        for name in self._names:
            header = self._tools.header(name)
            if begun.startswith(header):
                self._rest, self._turn = begun, self._header
                return True
            if header.startswith(begun) and not last:
                return False
        self._tools = None
        return True

    def _finding(self, parts: MessageParts, last: bool) -> bool:
        """Text in front of calls that nothing but their first words opens, or what is between."""
        between = self.called
        found = find(self._rest, self._names, not self._said, between)
        if isinstance(found, CallStart):
            told = self._rest[: found.start].rstrip()
            self._take(found.end)
        elif last:
            told = self._take(len(self._rest))
        else:  # white space may be in front of a call, and is nobody's then
            told = self._take(len(self._rest[:found].rstrip()))
        if not between:
            if self._fresh:
                told = told.lstrip()
                self._fresh = not told
            parts.content += told
            self._said = self._said or bool(told)
        if isinstance(found, CallStart):
            self._begin(parts, found.name)
        return isinstance(found, CallStart)

    def _opening(self, parts: MessageParts, last: bool) -> bool:
        """What stands in front of the first call."""
        assert self._tools is not None
        first = self._tools.first
        if first.startswith(" ") and self._rest and not self._rest.startswith(" "):
            first = first[1:]
        return self._literal(first, self._header)

    def _header(self, parts: MessageParts, last: bool) -> bool:
        """The name of a call."""
        assert self._tools is not None
        for name in sorted(self._names, key=len, reverse=True):
            header = self._tools.header(name)
            if self._rest.startswith(header + "{"):
                self._take(len(header))
                self._begin(parts, name)
                return True
        return False

    def _begin(self, parts: MessageParts, name: str) -> None:
        """A call whose arguments come next."""
        parts.calls.append(CallDelta(self._calls, self._id(), name))
        self._calls += 1
        self._scan, self._turn = _Scan(), self._arguments

    def _arguments(self, parts: MessageParts, last: bool) -> bool:
        assert self._tools is not None
        if self._tools.arguments == "gemma":
            return self._other_arguments(parts, last)
        text = self._take(self._scan.whole(self._rest))
        if text:
            self._grow(parts, text)
        if self._scan.over:
            self._turn = self._finding if self._tools.found else self._closing
        return self._scan.over

    def _other_arguments(self, parts: MessageParts, last: bool) -> bool:
        """They become JSON when they are whole, or all that there will be."""
        assert self._tools is not None
        end = self._rest.find(self._tools.closing)
        if end < 0 and not last:
            return False
        self._grow(parts, gemma_as_json(self._take(len(self._rest) if end < 0 else end)))
        self._turn = self._closing
        return True

    def _grow(self, parts: MessageParts, text: str) -> None:
        index = self._calls - 1
        if not parts.calls or parts.calls[-1].index != index:
            parts.calls.append(CallDelta(index))
        parts.calls[-1].arguments += text

    def _closing(self, parts: MessageParts, last: bool) -> bool:
        assert self._tools is not None
        return self._literal(self._tools.closing, self._between)

    def _between(self, parts: MessageParts, last: bool) -> bool:
        assert self._tools is not None
        return self._literal(self._tools.between, self._header)

    # ------------------------------------------------------------------ what they need

    def _literal(self, text: str, then: Callable[[MessageParts, bool], bool]) -> bool:
        """Go on behind a text that comes next. What never comes is waited for in vain."""
        if not self._rest.startswith(text):
            return False
        self._take(len(text))
        self._turn = then
        return True

    def _up_to(self, mark: str, last: bool) -> tuple[str, bool]:
        """The text in front of a mark, and whether the mark has come; both are taken."""
        at = self._rest.find(mark) if mark else -1
        if at >= 0:
            text = self._take(at).rstrip()
            self._take(len(mark))
        else:
            held = 0 if last else _begun(self._rest, mark)
            text = self._rest[: len(self._rest) - held]
            text = text if last else text.rstrip()
            self._take(len(text))
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text, at >= 0

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _id(self) -> str:
        """A name for a call."""
        size = None if self._tools is None else self._tools.id_size
        if size is None:
            return "call_" + secrets.token_hex(12)
        return "".join(secrets.choice(_LETTERS) for _ in range(size))


class _Scan:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self) -> None:
        self.over = False
        self._depth, self._inside, self._escaped = 0, False, False

    def whole(self, text: str) -> int:
        """How much of a text belongs to it."""
        for at, character in enumerate(text):
            if self._inside:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._inside = False
            elif character == '"':
                self._inside = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.over = True
                    return at + 1
        return len(text)


def _begun(text: str, mark: str) -> int:
    """Length of the longest end of a text with which a mark begins.

    >>> _begun("so <tool", "<tool_call>")
    5
    """
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
