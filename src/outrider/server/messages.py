"""Messages of a conversation and the tools that it may use, as OpenAI's clients write them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    StrictBool,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from outrider import arguments

#: An object of JSON, as it is read or written.
JsonObject: TypeAlias = dict[str, Any]


class FieldError(ValueError):
    """A body that cannot be, by the fault of one of its fields."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


# What every body and part of one has in common: no field that is not listed, null is left out.


class Body(BaseModel):
    """No field but those that are listed; null is a field that is left out, unless it is needed.

    One that is not listed may be null, too: OpenAI's clients give answers back as they came.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: object) -> object:
        """Clients write null for what they do not set."""
        if not isinstance(given, dict):
            return given
        fields = cls.model_fields
        needed = {field.alias or name for name, field in fields.items() if field.is_required()}
        return {name: one for name, one in given.items() if one is not None or name in needed}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, JsonValue]:
        """The description says so, too."""
        schema = handler(core_schema)
        whole = handler.resolve_ref_schema(schema)
        needed = whole.get("required", [])
        for name, one in whole.get("properties", {}).items():
            if name not in needed and {"type": "null"} not in one.get("anyOf", []):
                about = {key: one.pop(key) for key in ("title", "default") if key in one}
                whole["properties"][name] = {"anyOf": [one, {"type": "null"}]} | about
        return schema


#: Names that OpenAI takes, with the points and colons of MCP's tools.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
MOST_TOOLS = 128


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Refused(Body):
    """A part of an assistant's message that says why there is none."""

    type: Literal["refusal"]
    refusal: str


class ImageURL(Body):
    """Where an image is: a data URL, or one to be fetched where the server allows that.

    `detail` is taken as it comes: the model's own processor says how an image is read.
    """

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Body):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageURL


class InputAudio(Body):
    """A recording: a file in base64."""

    data: str
    format: Annotated[str, Field(pattern=r"^[a-z0-9]{1,8}$")]


class AudioPart(Body):
    """A recording in a message."""

    type: Literal["input_audio"]
    input_audio: InputAudio


#: Parts of a message that are not text.
MediaPart = ImagePart | AudioPart
Part = Annotated[TextPart | Refused | ImagePart | AudioPart, Field(discriminator="type")]


class CalledFunction(Body):
    """Which function was called, with what: JSON in a string."""

    name: FunctionName
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, given: str) -> str:
        """Templates read what is in it."""
        try:
            read = json.loads(given or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments are a JSON object in a string; got {error}") from error
        if not isinstance(read, dict):
            raise ValueError("arguments are a JSON object in a string; got another value")
        return given or "{}"


class ToolCall(Body):
    """A call that an assistant made. `index` is what deltas of a stream have."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """One turn of a conversation.

    Assistants' have `tool_calls`, or what answers have besides text; `tool` answers one of them.
    `annotations`, `audio` and `refusal` are taken as they came in an answer, and tell nothing.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.role != "assistant":
            own = ("tool_calls", "reasoning_content", "refusal", "annotations")
            for field, given in arguments.fields_of(self, own).items():
                if given is not None:
                    raise FieldError(field, f"{field} is an assistant's; got role {self.role!r}")
        if self.media and self.role not in ("user", "tool"):
            raise FieldError(
                "content", f"images and recordings are a user's; got role {self.role!r}"
            )
        if (self.role == "tool") != (self.tool_call_id is not None):
            what = "is missing: the id of the call that this answers"
            if self.role != "tool":
                what = f"goes with role 'tool'; got role {self.role!r}"
            raise FieldError("tool_call_id", f"tool_call_id {what}")
        said = self.content is not None or self.tool_calls or self.refusal is not None
        if not said:
            raise FieldError("content", "content is missing; write text, or parts of it")
        return self

    @property
    def media(self) -> list[MediaPart]:
        """Its images and recordings."""
        parts = self.content if isinstance(self.content, list) else []
        return [part for part in parts if isinstance(part, MediaPart)]

    @property
    def text(self) -> str:
        """What it says."""
        return plain(self.content if self.content is not None else self.refusal or "")

    def turn(self) -> JsonObject:
        """As chat templates read it: arguments of calls are objects there."""
        role = "system" if self.role == "developer" else self.role
        turn: JsonObject = {"role": role, "content": self.text}
        if self.media and isinstance(self.content, list):
            turn["content"] = [part.model_dump() for part in self.content]
        more = arguments.fields_of(self, ("name", "tool_call_id", "reasoning_content"))
        turn |= {field: given for field, given in more.items() if given is not None}
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.loads(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return turn


class Function(Body):
    """A function that a model may call: what it is for, and the schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: StrictBool | None = None  #: arguments follow the schema in any case

    @property
    def schema_(self) -> JsonObject:
        """Of its arguments; those of a function that names none are an empty object."""
        return self.parameters or {"type": "object", "properties": {}}


class Tool(Body):
    """A function among the tools of a request."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: FunctionName


class NamedTool(Body):
    """One function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Some of the tools, for this answer."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Body):
    """A choice among some of the tools; the others stay in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice


@dataclass(frozen=True)
class Allowed:
    """What an answer may call.

    must     whether it has to call one of them
    named    whether the request names the one function
    several  whether there may be more than one call
    """

    functions: tuple[Function, ...]
    must: bool = False
    named: bool = False
    several: bool = True


def allowed(
    tools: list[Tool] | None, choice: ToolChoice | None, several: bool | None
) -> Allowed | None:
    """What may be called; None: nothing. Raises FieldError for a choice without its tool."""
    every = {tool.function.name: tool.function for tool in tools or ()}
    if len(every) < len(tools or ()):
        raise FieldError("tools", "tools: two functions have one name; give each its own")
    if choice not in (None, "none", "auto") and not every:
        raise FieldError("tool_choice", "tool_choice needs tools: give tools, or leave it out")
    if not every or choice == "none":
        return None
    together = True if several is None else several
    if isinstance(choice, NamedTool):
        chosen = [choice.function.name]
    elif isinstance(choice, AllowedChoice):
        chosen = [tool.function.name for tool in choice.allowed_tools.tools]
    else:
        chosen = list(every)
    strange = next((name for name in chosen if name not in every), None)
    if strange is not None:
        raise FieldError(
            "tool_choice", f"tool_choice names {strange!r}, which is not among the tools"
        )
    named = isinstance(choice, NamedTool)
    must = named or choice == "required"
    if isinstance(choice, AllowedChoice):
        must = choice.allowed_tools.mode == "required"
    functions = tuple(every[name] for name in dict.fromkeys(chosen))
    return Allowed(functions, must, named, together and not named)


def plain(content: str | Sequence[TextPart | Refused | MediaPart]) -> str:
    """The text of a message or a prediction."""
    if isinstance(content, str):
        return content
    said = (part for part in content if isinstance(part, TextPart | Refused))
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in said)
