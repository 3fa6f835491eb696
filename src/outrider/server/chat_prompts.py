"""A conversation as a prompt, and how the answer to it is to be read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.errors import ConfigurationError, OutriderError
from outrider.server.errors import APIError
from outrider.server.grammar import ReasoningMarks, ToolCalls, answer_grammar
from outrider.server.media import media_prompt
from outrider.server.message_parser import MessageParser
from outrider.server.messages import JsonObject, allowed
from outrider.server.model_info import TextModelInfo
from outrider.server.protocol import ChatCompletionRequest
from outrider.server.tool_parsers import (
    ReasoningParser,
    ToolParser,
    chat_template,
    reasoning_parser,
    tool_parser,
)
from outrider.text.prompts import chat, encode
from outrider.types import MultiModalInputs, Tokenizer

#: What the server says to a template itself.
_OWN = {"messages", "tools", "tokenize", "chat_template"}
_OWN |= {"add_generation_prompt", "continue_final_message"}


@dataclass(frozen=True)
class Parsers:
    """How a model's answers are read: its calls, and its thoughts."""

    tools: ToolParser | None = None
    reasoning: ReasoningParser | None = None

    @classmethod
    def of(cls, tokenizer: Any, tools: str | None, reasoning: str | None) -> "Parsers":
        """By these names, or as the chat template has it. Raises UnknownName."""
        template = chat_template(tokenizer)
        return cls(tool_parser(tools, template), reasoning_parser(reasoning, template))

    def describe(self) -> str:
        """In words."""
        tools = "no tools" if self.tools is None else f"tools as {self.tools.name}"
        thoughts = (
            "no thoughts" if self.reasoning is None else f"thoughts up to {self.reasoning.end}"
        )
        return f"{tools}, {thoughts}"


@dataclass(frozen=True)
class ChatPrompt:
    """The ids of a conversation, with what its answer may be made of.

    opened   whether the prompt has begun a thought
    special  whether tokens that are no text tell where parts of the answer begin
    """

    ids: list[int]
    tokenizer: Any
    eos_ids: tuple[int, ...]
    calls: ToolCalls | None = None
    reasoning: ReasoningParser | None = None
    opened: bool = False
    inputs: MultiModalInputs | None = None  #: images and sound of its messages

    @property
    def special(self) -> bool:
        """Whether tokens that decoding leaves out tell where parts of the answer begin."""
        marks = set[str]()
        if self.calls is not None:
            marks |= {*self.calls.parser.markers}
        if self.reasoning is not None:
            marks |= {*self.reasoning.markers}
        tokens = self.tokenizer.added_tokens_decoder.values()
        return any(token.special and token.content in marks for token in tokens)

    @property
    def behind(self) -> Callable[[str], int | None] | None:
        """Where in an answer stop strings are looked for, if that is not everywhere."""
        if self.reasoning is None:
            return None
        return partial(self.reasoning.behind, opened=self.opened)

    def grammar(self, content: str | None) -> str | None:
        """The grammar of the whole answer. Raises Refusal."""
        thought = None
        if self.reasoning is not None:
            thought = ReasoningMarks(self.reasoning.start, self.reasoning.end, self.opened)
        try:
            return answer_grammar(self.tokenizer, self.eos_ids, content, self.calls, thought)
        except ValueError as error:
            raise APIError(str(error), "tools") from error

    def parser(self) -> MessageParser | None:
        """What takes an answer apart; None: it is text."""
        if self.calls is None and self.reasoning is None:
            return None
        names = [] if self.calls is None else [f.name for f in self.calls.allowed.functions]
        tools = None if self.calls is None else self.calls.parser
        return MessageParser(self.reasoning, self.opened, tools, names)


def chat_prompt(known: TextModelInfo, parsers: Parsers, body: ChatCompletionRequest) -> ChatPrompt:
    """The next turn of a conversation. Raises Refusal."""
    tokenizer = known.tokenizer
    choice = allowed(body.tools, body.tool_choice, body.parallel_tool_calls)
    calls, more = None, _said_to_template(body)
    if choice is not None:
        if parsers.tools is None or "tools" not in chat_template(tokenizer):
            raise APIError(
                "this model's chat template says nothing of tools, or writes calls in a way that "
                "is not known here; leave tools out, or start the server with --tool-call-parser "
                "or --chat-template",
                "tools",
            )
        calls = ToolCalls(choice, parsers.tools)
        more["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    try:
        turns, inputs = [message.turn() for message in body.messages], None
        if any(message.media for message in body.messages):
            ids, inputs = media_prompt(known.media, turns, more, known.remote_media)
        else:
            ids = chat(tokenizer, turns, template=more)
    except OutriderError as error:
        raise APIError(str(error), "messages") from error
    state = None if parsers.reasoning is None else parsers.reasoning.state(tokenizer, ids)
    reasoning = None if state is None else parsers.reasoning
    opened = bool(state)
    return ChatPrompt(ids, tokenizer, known.eos_ids, calls, reasoning, opened, inputs)


def of_transformers(tokenizer: Tokenizer, param: str) -> PreTrainedTokenizerBase:
    """The tokenizer, for a field that asks what no other kind can. Raises APIError."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise APIError(f"{param} needs a tokenizer of transformers; leave it out", param)
    return tokenizer


def text_ids(tokenizer: Tokenizer, prompt: object, number: int, special: bool) -> list[int]:
    """`encode` of a text or token ids, with the field at fault. Raises APIError."""
    try:
        return encode(tokenizer, prompt, number, special)
    except ConfigurationError as error:
        raise APIError(str(error), "add_special_tokens") from error
    except OutriderError as error:
        raise APIError(str(error), "prompt") from error


#: What stands before, behind and in between the parts of a text with a gap, as models that fill it
#: were trained: Qwen2.5-Coder and CodeGemma, StarCoder 2 and Granite, DeepSeek-Coder.
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
#: Behind what was filled in such a model may go on with the next file.
_NEXT_FILE = ("<|file_separator|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>", "<file_sep>")


def infill_prompt(tokenizer: Any, before: str, behind: str) -> tuple[str, tuple[int, ...]]:
    """A text with a gap as the prompt of what fills it, and the tokens that end that.

    Raises APIError where the model has no such tokens.
    """

    def known(name: str) -> bool:
        token = tokenizer.convert_tokens_to_ids(name)
        return token is not None and tokenizer.convert_ids_to_tokens(token) == name

    marks = next((names for names in _INFILL if all(map(known, names))), None)
    if marks is None:
        what = "this model has no fill-in-the-middle tokens, so that it cannot write what stands "
        raise APIError(what + "between a prompt and a suffix; leave suffix out", "suffix")
    ends = [name for name in (*marks, *_NEXT_FILE) if known(name)]
    first, second, third = marks
    text = f"{first}{before}{second}{behind}{third}"
    return text, tuple(map(tokenizer.convert_tokens_to_ids, ends))


def _said_to_template(body: ChatCompletionRequest) -> JsonObject:
    """What a template is told besides the messages."""
    more = dict(body.chat_template_kwargs or {})
    own = next((name for name in more if name in _OWN), None)
    if own is not None:
        what = f"{own!r} is not for chat_template_kwargs to say; leave it out"
        raise APIError(what, "chat_template_kwargs")
    if body.reasoning_effort is not None:
        more.setdefault("reasoning_effort", body.reasoning_effort)
        more.setdefault("enable_thinking", body.reasoning_effort != "none")
    if body.continue_final_message:
        more |= {"continue_final_message": True, "add_generation_prompt": False}
    elif body.add_generation_prompt is False:
        more["add_generation_prompt"] = False
    return more
