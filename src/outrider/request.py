"""What is asked of a batch: prompts, settings and ends, checked before any work is done."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider import arguments, step
from outrider.errors import CapacityError, ConfigurationError, PromptError
from outrider.prefill import ROUND
from outrider.types import LanguageModel


@dataclass(frozen=True)
class Limits:
    """When a row ends: a token budget and stop token ids.

    max_new_tokens  token budget; None, the default, runs to the end of the model's context
    stop_ids        tokens that end the row; none by default
    """

    max_new_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            do = "give a number of tokens (in Python None is the rest of the context)"
            budget = arguments.whole("max_new_tokens", self.max_new_tokens, do, least=1)
            object.__setattr__(self, "max_new_tokens", budget)
        what, do = "a tuple of token ids", "write stop_ids=(2,)"
        ids = arguments.several(
            "stop_ids", self.stop_ids, what, do, arguments.is_whole, ordered=False
        )
        object.__setattr__(self, "stop_ids", ids)


def token_ids(prompt: Any, number: int = 0) -> list[int]:
    """A prompt of token ids as a list of Python's integers: a list, a tuple, an array, a tensor.

    Raises PromptError, which names the first that is none: text, a float, a boolean, None.

    >>> token_ids((5, 6))
    [5, 6]
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)):
        if set(map(type, prompt)) <= {int}:
            return list(prompt)
        ids = [arguments.plain(token) for token in prompt]
        wrong = next((token for token in ids if not arguments.is_whole(token)), None)
        if all(map(arguments.is_whole, ids)):
            return [operator.index(token) for token in ids]
        do = "token ids are whole numbers; encode text with the target's tokenizer"
        if isinstance(wrong, (list, tuple)):
            do = "give each prompt as one flat list of ids"
    else:
        wrong, do = prompt, "encode text with the target's tokenizer; give a list of whole numbers"
    raise PromptError(
        f"prompt {number} must be token ids here; got {arguments.shown(wrong)} "
        f"({type(wrong).__name__}); {do}"
    )


def spread(name: str, given: Any, fallback: Any, rows: int) -> list[Any]:
    """One setting per row from one value, a list, or nothing."""
    if given is None:
        return [fallback] * rows
    for one in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(one, type(fallback)):
            kind = type(fallback).__name__
            raise ConfigurationError(
                f"{name} must be a {kind} or one {kind} per prompt; got {one!r}; write {kind}(...)"
            )
    if not isinstance(given, (list, tuple)):
        return [given] * rows
    if len(given) != rows:
        raise ConfigurationError(
            f"{name} must be one value or one per prompt; got {len(given)} for {rows} prompts; "
            "give one value to use it for all"
        )
    return list(given)


def plan(
    target: LanguageModel,
    max_nodes: int,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[Limits],
    capacity: int | None,
) -> tuple[list[int], list[int], int]:
    """Committed lengths at which rows end, why, and the cache capacity they need."""
    if not prompts:
        raise PromptError("no prompt; got an empty batch; give at least one prompt")
    context, vocab = target.context, target.vocab_size
    limits, reasons = [], []
    for number, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        if not len(prompt):
            raise PromptError(
                f"prompt {number} has no tokens; got an empty prompt; give at least one token "
                "(the BOS token starts from nothing)"
            )
        worst = max(prompt)
        if worst >= vocab or min(prompt) < 0:
            raise PromptError(
                f"prompt {number} has token id {worst if worst >= vocab else min(prompt)} outside "
                f"the vocabulary of {vocab}; encode it with the target's tokenizer"
            )
        if len(prompt) >= context:
            raise PromptError(
                f"prompt {number} has {len(prompt)} tokens, but the model's context is {context}; "
                "shorten it so that at least one token fits"
            )
        budget = end.max_new_tokens
        if budget is None and context >= 1 << 30:
            raise CapacityError(
                f"prompt {number} has no token budget and the model names no context to end at; "
                "got max_new_tokens=None; give max_new_tokens"
            )
        wanted = context if budget is None else len(prompt) + budget
        if capacity is not None and wanted + max_nodes > capacity:
            raise CapacityError(
                f"prompt {number} needs {len(prompt)} tokens + budget {wanted - len(prompt)} + "
                f"{max_nodes} tree nodes, but capacity={capacity}; "
                "raise capacity or lower max_new_tokens"
            )
        limits.append(min(wanted, context))
        reasons.append(step.LENGTH if wanted <= context else step.CONTEXT)
        if budget is None:
            reasons[-1] = step.CONTEXT
    need = max(limits) + max_nodes + 2
    return limits, reasons, max(-(-need // ROUND) * ROUND, capacity or 0)
