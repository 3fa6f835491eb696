"""`/v1/responses`: a chat whose turns the server keeps, told as items and events."""

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.server.errors import APIError, to_response
from outrider.server.message_parser import CallDelta, MessageParts
from outrider.server.messages import JsonObject
from outrider.server.request_parsing import ChoiceState
from outrider.server.response_builder import usage
from outrider.server.responses_bodies import ResponsesBody, turn_of
from outrider.server.serving import Blocks
from outrider.text.output_text import TextBlock

#: Of what is kept for `previous_response_id`: responses, and bytes of all of them.
MOST_KEPT, MOST_BYTES = 1024, 64 << 20

#: An event's type and what it tells.
Told = tuple[str, JsonObject]


@dataclass(frozen=True)
class KeptResponse:
    """A response, and the turns up to its end."""

    response: JsonObject
    turns: list[JsonObject]
    size: int


class ResponseStore:
    """The last responses, in this process's memory; the oldest go first."""

    def __init__(self, most: int = MOST_KEPT, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: JsonObject, turns: list[JsonObject]) -> None:
        """Keep a response with its turns; what is too large alone is not kept."""
        size = len(json.dumps(response)) + len(json.dumps(turns))
        if size > self._most_bytes:
            return
        self._kept[response["id"]] = KeptResponse(response, turns, size)
        self._size += size
        while len(self._kept) > self._most or self._size > self._most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._size -= gone.size

    def find(self, name: str, param: str) -> KeptResponse:
        """A response. Raises Refusal."""
        if name not in self._kept:
            raise APIError(
                f"no response {name!r} here; the last {self._most} of this process are kept, "
                "if they were stored",
                param,
                404,
                "response_not_found",
            )
        return self._kept[name]

    def forget(self, name: str) -> None:
        """Keep it no longer. Raises Refusal."""
        self._size -= self.find(name, "response_id").size
        del self._kept[name]


@dataclass
class ResponseDraft:
    """One response as it grows: its items, and the events that tell of them."""

    body: ResponsesBody
    fingerprint: str
    name: str = field(default_factory=lambda: "resp_" + secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))
    output: list[JsonObject] = field(default_factory=list)
    _open: str | None = None  #: the kind of the last item, while it grows

    def object(self, status: str, choice: ChoiceState | None = None) -> JsonObject:
        """The response as it stands."""
        body = self.body
        given = body.model_dump(by_alias=True, exclude_none=True)
        about = {name: given.get(name) for name in _SAID_AGAIN}
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.name,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": body.model,
            "output": list(self.output),
            "error": None,
            "incomplete_details": cut,
            **about,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "text": given.get("text", {"format": {"type": "text"}}),
            "truncation": "disabled",
            "store": body.store,
            "system_fingerprint": self.fingerprint,
            "usage": None if choice is None else _usage(choice, self.output),
        }

    def begin(self) -> Iterator[Told]:
        """What is told before anything is decoded."""
        for kind in ("created", "in_progress"):
            yield f"response.{kind}", {"response": self.object("in_progress")}

    def grow(self, parts: MessageParts) -> Iterator[Told]:
        """More of the answer."""
        if parts.reasoning:
            yield from self._text("reasoning", parts.reasoning)
        if parts.content:
            yield from self._text("message", parts.content)
        for call in parts.calls:
            yield from self._call(call)

    def end(self, choice: ChoiceState) -> Iterator[Told]:
        """Its end, and what is told of it."""
        if not self.output:
            yield from self._item("message", {"role": "assistant", "content": []})
        cut = choice.reason not in ("stop", None)
        yield from self._close("incomplete" if cut else "completed")
        kind = "incomplete" if cut else "completed"
        yield f"response.{kind}", {"response": self.object(kind, choice)}

    # ------------------------------------------------------------------ items

    def _item(self, kind: str, about: JsonObject) -> Iterator[Told]:
        """A new item; the one before is closed."""
        yield from self._close("completed")
        item = {"id": _PREFIX[kind] + secrets.token_hex(16), "type": kind, "status": "in_progress"}
        self.output.append(item | about)
        self._open = kind
        yield "response.output_item.added", {"output_index": self._at, "item": self._copy()}

    @property
    def _at(self) -> int:
        return len(self.output) - 1

    def _copy(self) -> JsonObject:
        copy: JsonObject = json.loads(json.dumps(self.output[-1]))
        return copy

    def _where(self) -> JsonObject:
        return {"item_id": self.output[-1]["id"], "output_index": self._at}

    def _text(self, kind: str, text: str) -> Iterator[Told]:
        """Text of a message, or of a thought."""
        part, event = _TEXTS[kind]
        if self._open != kind:
            about: JsonObject = {"summary": [], "content": []}
            fresh: JsonObject = {"type": part, "text": ""}
            if kind == "message":
                about = {"role": "assistant", "content": []}
                fresh |= {"annotations": [], "logprobs": []}
            yield from self._item(kind, about)
            yield (
                "response.content_part.added",
                {**self._where(), "content_index": 0, "part": dict(fresh)},
            )
            self.output[-1]["content"].append(fresh)
        self.output[-1]["content"][0]["text"] += text
        told = {**self._where(), "content_index": 0, "delta": text}
        if kind == "message":
            told["logprobs"] = []
        yield f"{event}.delta", told

    def _call(self, call: CallDelta) -> Iterator[Told]:
        """A call, or more of its arguments."""
        if call.id is not None:
            about = {"call_id": call.id, "name": call.name, "arguments": ""}
            yield from self._item("function_call", about)
        if call.arguments:
            self.output[-1]["arguments"] += call.arguments
            told = {**self._where(), "delta": call.arguments}
            yield "response.function_call_arguments.delta", told

    def _close(self, status: str) -> Iterator[Told]:
        """The last item is as it will be."""
        if self._open is None:
            return
        item, kind = self.output[-1], self._open
        if kind == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._where(), **told}
        elif item["content"]:
            place = {**self._where(), "content_index": 0}
            part = dict(item["content"][0])
            more: JsonObject = {"logprobs": []} if kind == "message" else {}
            yield f"{_TEXTS[kind][1]}.done", {**place, "text": part["text"], **more}
            yield "response.content_part.done", {**place, "part": part}
        item["status"], self._open = status, None
        yield "response.output_item.done", {"output_index": self._at, "item": self._copy()}


#: Fields of a request that its response says again, null where they were left out.
_SAID_AGAIN = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "reasoning",
    "temperature",
    "top_p",
    "user",
    "service_tier",
)
_PREFIX = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_TEXTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


def _usage(choice: ChoiceState, output: Sequence[JsonObject]) -> JsonObject:
    """As this route counts. Tokens of thoughts are those of their text, its marks left out."""
    told = usage([choice])
    tokenizer: Any = choice.answer.tokenizer
    thoughts = [one["content"][0]["text"] for one in output if one["type"] == "reasoning"]
    counts = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in thoughts]
    thought = sum(counts)
    return {
        "input_tokens": told["prompt_tokens"],
        "input_tokens_details": told["prompt_tokens_details"],
        "output_tokens": told["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": told["total_tokens"],
    }


@dataclass
class ResponsesWriter:
    """Writes one response, whole or as events, and keeps it when it is over."""

    response: ResponseDraft
    store: ResponseStore
    before: list[JsonObject]  #: the turns of the response that it goes on from
    _count: int = 0

    def whole(self, choices: Sequence[ChoiceState], echo: bool = False) -> JsonObject:
        """The response in one piece."""
        (choice,) = choices
        *_, (_, last) = self._all(choice, choice.answer.text, last=True)
        response: JsonObject = last["response"]
        return response

    async def flow(
        self,
        choices: Sequence[ChoiceState],
        first: Sequence[tuple[ChoiceState, TextBlock]],
        blocks: Blocks,
    ) -> AsyncIterator[bytes]:
        """Events; a fault is one, too, and the last one then."""
        (choice,) = choices
        for event in self.response.begin():
            yield self._event(event)
        try:
            for _, said in first:
                for event in self._all(choice, said.text, said.finish_reason is not None):
                    yield self._event(event)
            async for _, said in blocks:
                for event in self._all(choice, said.text, said.finish_reason is not None):
                    yield self._event(event)
        except Exception as error:
            fault = to_response(error)[1]["error"]
            failed = self.response.object("failed")
            failed["error"] = {"code": "server_error", "message": fault["message"]}
            yield self._event(("response.failed", {"response": failed}))

    def _all(self, choice: ChoiceState, text: str, last: bool) -> Iterator[Told]:
        """The events of a text, and of its end."""
        parser = choice.parser
        parts = MessageParts(content=text) if parser is None else parser.push(text, last)
        yield from self.response.grow(parts)
        if last:
            for kind, about in self.response.end(choice):
                if "response" in about and self.response.body.store:
                    self._keep(about["response"])
                yield kind, about

    def _keep(self, response: JsonObject) -> None:
        """For those who go on from it."""
        turns = [*self.before, *self.response.body.turns(), *turn_of(response["output"])]
        self.store.keep(response, turns)

    def _event(self, event: Told) -> bytes:
        kind, about = event
        said = json.dumps({"type": kind, "sequence_number": self._count, **about})
        self._count += 1
        return f"event: {kind}\ndata: {said}\n\n".encode()
