"""When a request ends."""

from dataclasses import dataclass
from typing import Any

from outrider import arguments
from outrider.engine.request import StopConditions
from outrider.errors import ConfigurationError
from outrider.text.tokens import special_stops
from outrider.types import Tokenizer


@dataclass(frozen=True)
class Stop:
    """When a request ends, besides the model's context.

    max_new_tokens  token budget, 128 by default. None: to the end of the context; the caches grow
                    with the text
    strings         stop strings; the text ends before the first one. One that is a special token of
                    the tokenizer, such as "</s>", stops as that token
    token_ids       stop tokens in place of the model's own end-of-sequence tokens, which None, the
                    default, means; () for none at all

    Raises ConfigurationError for values of another kind.

    >>> Stop(64, strings=("\\n\\n",)).token_ids is None
    True
    """

    max_new_tokens: int | None = 128
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        budget = StopConditions(self.max_new_tokens).max_new_tokens  # refuses what is no budget
        object.__setattr__(self, "max_new_tokens", budget)
        if isinstance(self.strings, str):
            what, do = "a tuple of stop strings", f"write strings=({self.strings!r},)"
        else:
            what, do = "a tuple of stop strings", 'write strings=("\\n\\n",), or () for none'
        strings = arguments.several("strings", self.strings, what, do, _is_text, ordered=False)
        if not all(strings):
            raise ConfigurationError(f"a stop string is empty; got strings={strings!r}; remove it")
        object.__setattr__(self, "strings", strings)
        if self.token_ids is not None:
            what, do = "a tuple of token ids", "write token_ids=(2,), or () for no stop token"
            ids = arguments.several("token_ids", self.token_ids, what, do, _is_token, ordered=False)
            object.__setattr__(self, "token_ids", ids)


def stop_ids(
    stop: Stop, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...], vocab: int
) -> tuple[int, ...]:
    """Tokens that end a row: those asked for, or the model's own; and special stop strings."""
    ids = eos_ids
    if stop.token_ids is not None:
        ids = stop.token_ids
        wrong = [i for i in ids if i >= vocab and i not in eos_ids]
        if wrong:
            raise ConfigurationError(
                f"token_ids of a Stop names token {wrong[0]}, outside the vocabulary of "
                f"{vocab}; use the target's token ids"
            )
    if not stop.strings:
        return ids
    if tokenizer is None:
        raise ConfigurationError("stop strings need a tokenizer; pass tokenizer=... to load")
    return ids + special_stops(tokenizer, stop.strings)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token(value: Any) -> bool:
    return arguments.is_whole(value) and value >= 0
