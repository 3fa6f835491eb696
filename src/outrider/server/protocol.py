"""What requests may say: OpenAI's fields, vLLM's names for more, and nothing that is not used.

A field that is not listed here is an error that names it. Fields in `Routing` are taken and have no
effect on an answer.
"""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from outrider import arguments
from outrider.engine.request import LogprobsMode
from outrider.server.messages import (
    MOST_TOOLS,
    Body,
    FieldError,
    JsonObject,
    Message,
    TextPart,
    Tool,
    ToolChoice,
    allowed,
)

Count = Annotated[int, Field(ge=1, strict=True)]
Size = Annotated[int, Field(ge=0, strict=True)]
MOST_PROMPTS, MOST_STOPS = 64, 64
Bias = Annotated[float, Field(ge=-100, le=100)]
Ids = Annotated[list[Size], Field(min_length=1)]


class ErrorDetail(Body):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Body):
    """An answer that is none."""

    error: ErrorDetail


class StreamOptions(Body):
    """How a stream is written."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False  #: usage so far in every chunk
    include_obfuscation: StrictBool = True
    include_trace: StrictBool = False  #: what was drafted, kept and emitted in each step
    chunk_tokens: Literal[1] | None = None  #: a chunk for every token, not for every step


def goes_with_type(field: str, kind: str, schema: object) -> None:
    """Refuse a format that wants a schema and has none, or has one that it does not want."""
    if (kind == "json_schema") != (schema is not None):
        what = f"{field} goes with type 'json_schema', and with no other; got type {kind!r}"
        raise FieldError(field, what + (" without it" if schema is None else "; leave it out"))


class JsonSchema(Body):
    """A schema that an answer follows."""

    name: str
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """What an answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        goes_with_type("json_schema", self.type, self.json_schema)
        return self


class StructuredOutputs(Body):
    """vLLM's name for a grammar: one of these."""

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("give one of json, regex, choice, grammar and json_object")
        return self


class PredictedContent(Body):
    """A text that the answer is expected to resemble."""

    type: Literal["content"]
    content: str | list[TextPart]


class ResumeState(Body):
    """What a client has of a choice that another server began."""

    token_ids: list[Size] = Field(default_factory=list)
    characters: Size | None = None  #: of its text; None: all that is certain of these tokens
    finish_reason: Literal["stop", "length"] | None = None


class SpeculativeConfig(Body):
    """How a request is drafted."""

    method: str | None = None
    num_speculative_tokens: Size | None = None


class Routing(Body):
    """Who asks, and through what: accepted, without effect."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # of vLLM's and OpenAI's clients, who write out what is done anyway
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    cache_prompt: Literal[True] | None = None


#: Fields that ask for a grammar, as vLLM's clients did before `structured_outputs`.
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class BaseRequest(Routing):
    """What both routes take."""

    model: str = ""  #: "": the target
    temperature: float | None = Field(None, ge=0, le=1e6)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, lt=2**63, strict=True)] | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, Bias] | None = None
    max_tokens: Count | None = None
    min_tokens: Size | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Size] | None = None
    ignore_eos: StrictBool = False
    n: Count = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64, strict=True)] | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    prompt_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative_config: SpeculativeConfig | None = None
    prediction: PredictedContent | None = None
    timeout: float | None = Field(None, gt=0)
    #: Who gets a free row first, of those who wait: the least, and then who came first.
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)] = 0
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, strict=True)] | None = None
    truncation_side: Literal["left", "right"] = "left"  #: where a prompt is cut
    return_token_ids: StrictBool = False
    resume: list[ResumeState] | None = None  #: one for each choice: the stream goes on behind it

    @model_validator(mode="before")
    @classmethod
    def _whole_characters(cls, given: object) -> object:
        """JSON may escape half a character, which is no text."""
        for name, value in given.items() if isinstance(given, dict) else ():
            if broken(name) or broken(value):
                raise ValueError(f"{name!a} has half a character (a lone surrogate); leave it out")
        return given

    @model_validator(mode="after")
    def _one_grammar(self) -> "BaseRequest":
        names = [*GUIDED, "response_format", "structured_outputs"]
        asked = [n for n, given in arguments.fields_of(self, names).items() if given is not None]
        if self.response_format is not None and self.response_format.type == "text":
            asked.remove("response_format")
        if len(asked) > 1:
            raise FieldError(asked[0], f"{' and '.join(asked)} exclude each other: give one")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError(
                "prompt_logprobs", "prompt_logprobs is for whole answers: leave it or stream out"
            )
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options", "stream_options are for streams: set stream, or leave them out"
            )
        if self.resume is not None and not self.stream:
            raise FieldError("resume", "resume is for streams: set stream, or leave it out")
        if self.truncate_prompt_tokens == 0:
            what = "truncate_prompt_tokens is 0, which leaves nothing of a prompt; give a number "
            raise FieldError("truncate_prompt_tokens", what + "of tokens, or -1: all that fit")
        if "truncation_side" in self.model_fields_set and self.truncate_prompt_tokens is None:
            what = "truncation_side needs truncate_prompt_tokens: set that, or leave it out"
            raise FieldError("truncation_side", what)
        return self

    def _has_logprobs(self, asked: bool) -> None:
        """Their mode goes with log-probabilities."""
        if "logprobs_mode" in self.model_fields_set and not asked:
            raise FieldError(
                "logprobs_mode", "logprobs_mode needs logprobs: set logprobs, or leave it out"
            )

    @property
    def mode(self) -> LogprobsMode:
        """What log-probabilities are told of, by the engine's words."""
        return "raw" if self.logprobs_mode == "raw_logprobs" else "processed"


class CompletionRequest(BaseRequest):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    suffix: str | None = None
    add_special_tokens: StrictBool = True
    max_tokens: Size | None = None
    echo: StrictBool = False
    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    best_of: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, given: object) -> object:
        """Said before a list of prompts is tried as everything else that a prompt may be."""
        prompts = given.get("prompt") if isinstance(given, dict) else None
        several = isinstance(prompts, list) and not isinstance(prompts[0] if prompts else 0, int)
        if isinstance(prompts, list) and several and len(prompts) > MOST_PROMPTS:
            what = f"prompt: at most {MOST_PROMPTS} prompts in one request; got {len(prompts)}"
            raise FieldError("prompt", what)
        return given

    @model_validator(mode="after")
    def _choosing(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.n:
            raise FieldError(
                "best_of", f"best_of is less than n; got {self.best_of} for n={self.n}"
            )
        if self.best_of not in (None, self.n) and self.stream:
            raise FieldError(
                "best_of", "best_of chooses when all are written: leave it or stream out"
            )
        if self.max_tokens == 0 and not self.echo:
            raise FieldError(
                "max_tokens", "max_tokens is 0, which goes with echo alone; give a number"
            )
        if self.suffix and (self.echo or not isinstance(self.prompt, str)):
            what = "suffix stands behind one prompt that is text, without echo"
            raise FieldError("suffix", f"{what}; leave the other out")
        if self.suffix and self.truncate_prompt_tokens is not None:
            what = "truncate_prompt_tokens would cut the marks of a suffix off: leave one out"
            raise FieldError("truncate_prompt_tokens", what)
        if self.echo and self.logprobs is not None and self.stream:
            what = "echo with logprobs is for whole answers: leave one of them out"
            raise FieldError("echo", what)
        self._has_logprobs(self.logprobs is not None)
        return self


class ChatCompletionRequest(BaseRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    modalities: list[Literal["text"]] | None = None
    echo: Literal[False] | None = None
    include_reasoning: Literal[True] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None

    @model_validator(mode="after")
    def _budget_and_logs(self) -> "ChatCompletionRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise FieldError(
                "max_tokens", "max_tokens and max_completion_tokens are one thing: give one"
            )
        if self.continue_final_message and self.add_generation_prompt:
            what = "continue_final_message and add_generation_prompt exclude each other: give one"
            raise FieldError("continue_final_message", what)
        allowed(self.tools, self.tool_choice, self.parallel_tool_calls)  # or says what is wrong
        if self.top_logprobs and not self.logprobs:
            raise FieldError(
                "top_logprobs", "top_logprobs needs logprobs: set logprobs, or leave it out"
            )
        self._has_logprobs(self.logprobs)
        return self


def broken(value: object) -> bool:
    """Whether some text in it cannot be written as UTF-8."""
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return any(broken(key) or broken(one) for key, one in value.items())
    return isinstance(value, list) and any(map(broken, value))
