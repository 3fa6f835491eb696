"""How models write calls of tools: one format for each family, under vLLM's names.

A format is a few literal texts around the name and the arguments of a call. The grammar is made of
them, so that whatever a model writes can be read back: `answer_grammar` and `message_parser`.

>>> TOOL_PARSERS["hermes"].header("f")
'\\n{"name": "f", "arguments": '
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import UnknownName
from outrider.server.call_formats import CLOSING, OPENING

#: `--tool-call-parser` and `--reasoning-parser` where nothing is to be read.
NONE = "none"


@dataclass(frozen=True)
class ToolParser:
    """The texts around calls: `opening` `first` header arguments `closing` (`between` ...) `last`.

    opening   what calls begin with, wherever in an answer; "": the first call begins the answer
    first     behind the opening, a blank in front of it or not
    before    in front of a function's name
    behind    between its name and its arguments
    arguments how these are written: "json", or "gemma" (`outrider.server.call_formats`)
    token     a special token that may stand in front of all and is not read
    signs     what chat templates have that write calls so: all of these regular expressions
    found     calls that are not demanded are found by their first words (`call_formats`)
    id_size   characters of the ids of calls; None: as OpenAI's
    """

    name: str
    opening: str
    before: str
    behind: str
    closing: str
    between: str
    signs: tuple[str, ...]
    first: str = ""
    last: str = ""
    arguments: str = "json"
    token: str | None = None
    id_size: int | None = None
    found: bool = False

    def header(self, function: str) -> str:
        """What stands in front of the arguments of a call."""
        return self.before + function + self.behind

    @property
    def markers(self) -> tuple[str, ...]:
        """Its texts that a tokenizer may have as tokens of their own."""
        texts = (self.opening, self.behind, self.closing, self.between)
        marks = {"<escape>"} if self.arguments == "gemma" else set[str]()
        marks |= {OPENING, CLOSING} if self.found else set()
        for text in texts:
            marks |= set(_MARK.findall(text))
        return tuple(sorted(marks))


_MARK = re.compile(r"</?[a-z_|]+>|\[[A-Z_]+\]")

_HERMES = ToolParser(
    "hermes",
    opening="<tool_call>",
    before='\n{"name": "',
    behind='", "arguments": ',
    closing="}\n</tool_call>",
    between="\n<tool_call>",
    signs=("<tool_call>", "arguments"),
)
_LLAMA = ToolParser(
    "llama3_json",
    opening="",
    before='{"name": "',
    behind='", "parameters": ',
    closing="}",
    between="; ",
    signs=('"parameters": ', "ipython|python_tag"),
    token="<|python_tag|>",
)
_MISTRAL = ToolParser(
    "mistral",
    opening="[TOOL_CALLS]",
    first=" [",
    before='{"name": "',
    behind='", "arguments": ',
    closing="}",
    between=", ",
    last="]",
    signs=(r"\[TOOL_CALLS\]",),
    id_size=9,
)
#: Mistral's newer tokenizers have a token in front of the arguments.
_MISTRAL_ARGS = ToolParser(
    "mistral",
    opening="[TOOL_CALLS]",
    before="",
    behind="[ARGS]",
    closing="",
    between="[TOOL_CALLS]",
    signs=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    id_size=9,
)
_GEMMA = ToolParser(
    "functiongemma",
    opening="<start_function_call>",
    before="call:",
    behind="",
    closing="<end_function_call>",
    between="<start_function_call>",
    signs=("<start_function_call>",),
    arguments="gemma",
)
#: vLLM has no name for it.
_JSON = ToolParser(
    "json",
    opening="",
    before='{"name": "',
    behind='", "arguments": ',
    closing="}",
    between="\n",
    signs=(),
    found=True,
)

#: By the names of `--tool-call-parser`.
TOOL_PARSERS: Mapping[str, ToolParser] = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": _MISTRAL,
    "functiongemma": _GEMMA,
    "json": _JSON,
}
#: What templates are looked through for, the ones with more signs first.
_KNOWN = (_MISTRAL_ARGS, _MISTRAL, _GEMMA, _HERMES, _LLAMA)
#: Templates that write calls as tags of XML have hermes' marks, too, and other calls.
_OTHERS = re.compile("<function=|<arg_key>|<parameter=")


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat templates, one after the other; "" without any."""
    from transformers import PreTrainedTokenizerBase  # names of formats are known without it

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return ""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def tool_parser(asked: str | None, template: str) -> ToolParser | None:
    """The format of this name, or of a chat template where none was asked for.

    None: tools are refused. Raises UnknownName.

    >>> tool_parser(None, "{{ '<tool_call>' }} {{ call.arguments | tojson }}").name
    'hermes'
    """
    if asked == NONE:
        return None
    if asked is not None and asked not in TOOL_PARSERS:
        raise UnknownName("tool call parser", asked, (*TOOL_PARSERS, NONE))
    found = None
    if not _OTHERS.search(template):
        found = next((p for p in _KNOWN if all(re.search(s, template) for s in p.signs)), None)
    if asked is None or (found is not None and found.name == TOOL_PARSERS[asked].name):
        return found
    return TOOL_PARSERS[asked]


# How models mark what they think before they answer, under vLLM's names.
#
# >>> REASONING_PARSERS["qwen3"].behind("<think>a</think>b", opened=False) 16

_TAIL = 32  #: tokens at a prompt's end in which its template may open or close a thought


@dataclass(frozen=True)
class ReasoningParser:
    """The marks around a thought, which an answer begins with or has none of."""

    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Its texts that a tokenizer may have as tokens of their own."""
        return self.start, self.end

    def behind(self, text: str, opened: bool) -> int | None:
        """Where what is behind the thought begins in an answer; None: it is not yet there.

        opened  whether the prompt has begun a thought

        >>> ReasoningParser("<think>", "</think>").behind("<thi", opened=False)
        >>> ReasoningParser("<think>", "</think>").behind("Yes", opened=False)
        0
        """
        if not opened:
            begun = text.lstrip()
            if not begun.startswith(self.start):
                return None if self.start.startswith(begun) else 0
        at = text.find(self.end)
        return None if at < 0 else at + len(self.end)

    def state(self, tokenizer: Any, prompt: Sequence[int]) -> bool | None:
        """Whether a prompt has opened a thought; None: it has closed one, and none comes."""
        tail = str(tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)).rstrip()
        if tail.endswith(self.end):
            return None
        return tail.endswith(self.start)


_THINK = ReasoningParser("<think>", "</think>")
_BRACKETS = ReasoningParser("[THINK]", "[/THINK]")
_SEED = ReasoningParser("<seed:think>", "</seed:think>")

#: By the names of `--reasoning-parser`.
REASONING_PARSERS: Mapping[str, ReasoningParser] = {
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "olmo3": _THINK,
    "mistral": _BRACKETS,
    "seed_oss": _SEED,
}


def reasoning_parser(asked: str | None, template: str) -> ReasoningParser | None:
    """The marks of this name, or of a chat template where none was asked for. Raises UnknownName.

    >>> reasoning_parser(None, "{{ '<think>' }} ... {{ '</think>' }}").end
    '</think>'
    """
    if asked == NONE:
        return None
    if asked is not None:
        if asked not in REASONING_PARSERS:
            raise UnknownName("reasoning parser", asked, (*REASONING_PARSERS, NONE))
        return REASONING_PARSERS[asked]
    marked = (one for one in (_THINK, _BRACKETS, _SEED) if re.search(re.escape(one.end), template))
    return next(marked, None)
