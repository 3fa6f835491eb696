"""What `POST /v1/responses` may say, and the chat that it asks for."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, field_validator, model_validator

from outrider import arguments
from outrider.server.messages import (
    MOST_TOOLS,
    AudioPart,
    Body,
    FunctionName,
    ImageURL,
    JsonObject,
    NamedFunction,
)
from outrider.server.protocol import ChatCompletionRequest, Count, StreamOptions, goes_with_type

Status = Literal["in_progress", "completed", "incomplete"]


class ContentPart(Body):
    """A part of a message: what was read, or what was answered."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None

    @property
    def plain_text(self) -> str:
        """Its words."""
        return self.text or self.refusal or ""


class InputImage(Body):
    """An image in a user's message: a data URL, or one that the server may fetch."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


InputPart = Annotated[ContentPart | InputImage | AudioPart, Field(discriminator="type")]


class InputMessage(Body):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCallItem(Body):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None


class FunctionOutputItem(Body):
    """What the called function has answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Body):
    """What the model has thought."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[JsonObject] | None = None
    content: list[JsonObject] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


Item = InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem


class FunctionTool(Body):
    """A function among the tools, as this route writes it."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: StrictBool | None = None


class ChosenTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Body):
    """What an answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: StrictBool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        goes_with_type("schema", self.type, self.schema_)
        return self


class TextSettings(Body):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(Body):
    """How long is thought."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    model: str = ""  #: "": the target
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: StrictBool | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=1e6)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64, strict=True)] | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    store: StrictBool = True
    timeout: float | None = Field(None, gt=0)
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    @field_validator("include", mode="before")
    @classmethod
    def _nothing_hidden(cls, given: object) -> object:
        """Thoughts are told as they are: nothing is encrypted here, and nobody misses it."""
        hidden = ("reasoning.encrypted_content",)
        return [one for one in given if one not in hidden] if isinstance(given, list) else given

    def chat(self, before: Sequence[JsonObject]) -> ChatCompletionRequest:
        """The chat that is asked for, behind these turns. Raises pydantic's ValidationError."""
        turns = [*before, *self.turns()]
        if self.instructions is not None:
            turns.insert(0, {"role": "system", "content": self.instructions})
        asked: JsonObject = {
            "model": self.model,
            "messages": turns,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        asked |= arguments.fields_of(self, ("temperature", "top_p", "seed", "timeout"))
        if self.tools:
            functions = [tool.model_dump(exclude={"type"}) for tool in self.tools]
            asked["tools"] = [{"type": "function", "function": one} for one in functions]
        asked["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, ChosenTool):
            function = NamedFunction(name=self.tool_choice.name).model_dump()
            asked["tool_choice"] = {"type": "function", "function": function}
        form = None if self.text is None else self.text.format
        if form is not None:
            asked["response_format"] = {"type": form.type}
            if form.schema_ is not None:
                schema = {"name": form.name or "answer", "schema": form.schema_}
                asked["response_format"]["json_schema"] = schema
        return ChatCompletionRequest.model_validate(asked)

    def turns(self) -> list[JsonObject]:
        """What is said with this request, as turns of a chat."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return list(_turns(self.input))


def _turns(items: Sequence[Item]) -> Iterator[JsonObject]:
    """Calls and thoughts that stand in a row belong to one turn of the assistant."""
    own: JsonObject = {}
    for item in items:
        fresh = isinstance(item, InputMessage | FunctionOutputItem)
        if own and (fresh and ("tool_calls" in own or not _is_answer(item))):
            yield from _whole(own)
            own = {}
        if isinstance(item, ReasoningItem):
            texts = [str(part.get("text", "")) for part in item.content or item.summary or []]
            own = {"role": "assistant", "reasoning_content": "\n".join(texts)} | own
        elif isinstance(item, FunctionCallItem):
            own = {"role": "assistant", **own}
            function = {"name": item.name, "arguments": item.arguments}
            calls = own.setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, FunctionOutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _said(item.output)}
        elif _is_answer(item):
            yield from _whole(own) if "content" in own else ()
            thought = {} if "content" in own else own
            own = {**thought, "role": "assistant", "content": _read(item.content)}
        else:
            yield {"role": item.role, "content": _read(item.content)}
    yield from _whole(own) if own else ()


def _whole(turn: JsonObject) -> Iterator[JsonObject]:
    """A turn of the assistant; a thought alone is none."""
    if "content" in turn or "tool_calls" in turn:
        yield turn


def _is_answer(item: Item) -> bool:
    return isinstance(item, InputMessage) and item.role == "assistant"


def _said(content: str | Sequence[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.plain_text for part in content)


def _read(content: str | list[InputPart]) -> str | list[JsonObject]:
    """A message's text; where images or sound stand beside it, the parts of a chat's message."""
    words = [part for part in content if isinstance(part, ContentPart)]
    if isinstance(content, str) or len(words) == len(content):
        return _said(words if isinstance(content, list) else content)
    return [_part(part) for part in content]


def _part(part: InputPart) -> JsonObject:
    if isinstance(part, ContentPart):
        return {"type": "text", "text": part.plain_text}
    if isinstance(part, AudioPart):
        return part.model_dump()
    return {"type": "image_url", "image_url": ImageURL(url=part.image_url).model_dump()}


def turn_of(output: Sequence[JsonObject]) -> list[JsonObject]:
    """The output of a response as turns of a chat.

    >>> turn_of([{"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}])
    [{'role': 'assistant', 'content': 'Hi'}]
    """
    items: list[Item] = []
    for one in output:
        given = json.loads(json.dumps(one))
        if one["type"] == "function_call":
            items.append(FunctionCallItem.model_validate(given))
        elif one["type"] == "reasoning":
            items.append(ReasoningItem.model_validate(given))
        else:
            items.append(InputMessage.model_validate({"role": "assistant"} | given))
    return list(_turns(items))
