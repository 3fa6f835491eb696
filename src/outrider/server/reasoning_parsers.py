"""How models mark what they think before they answer, under vLLM's names.

>>> REASONING_PARSERS["qwen3"].behind("<think>a</think>b", opened=False)
16
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import UnknownName
from outrider.server.tool_parsers import NONE

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
