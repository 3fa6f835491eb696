"""Forty-eight prompts of six kinds, eight each, from what Python brings: documentation and source.

summarise, correct, edit    the answer copies much of the prompt, or most of it
complete                    the rest of a function of the standard library
question, story             free text, with nothing to copy
"""

import calendar
import colorsys
import fnmatch
import heapq
import inspect
import itertools
import pydoc_data.topics
import random
import shlex
import statistics
import string
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

KINDS = ("summarise", "correct", "edit", "complete", "question", "story")

_TEXTS = (
    "execmodel",
    "context-managers",
    "exceptions",
    "assignment",
    "import",
    "with",
    "raise",
    "class",
)
_SHORT = ("break", "continue", "global", "del", "lists", "truth", "numbers", "booleans")
_CODE: tuple[Callable[..., Any], ...] = (
    textwrap.shorten,
    shlex.join,
    heapq.merge,
    statistics.fmean,
    fnmatch.filter,
    colorsys.rgb_to_hls,
    string.capwords,
    calendar.monthrange,
)
_LONG: tuple[Callable[..., Any], ...] = (
    textwrap.indent,
    heapq.nsmallest,
    statistics.quantiles,
    fnmatch.translate,
    colorsys.rgb_to_hsv,
    statistics.correlation,
    statistics.linear_regression,
    statistics.mode,
)
_QUESTIONS = (
    "Why is the sky blue during the day and red at sunset?",
    "What is the difference between a virus and a bacterium?",
    "How does a bicycle stay upright when it is moving?",
    "What should I look at when I buy a used car?",
    "Explain what a prime number is and why there are infinitely many of them.",
    "How do vaccines protect people against diseases?",
    "Give me five tips for learning a new language as an adult.",
    "What happens to the water of a river when it reaches the sea?",
)
_STORIES = (
    "a lighthouse keeper who finds a letter in a bottle",
    "two children who build a boat out of an old door",
    "a clock that runs backwards on Sundays",
    "a baker who cannot taste sweetness any more",
    "the last train of the night and its only passenger",
    "a gardener who grows a tree with silver leaves",
    "a robot that wants to learn how to whistle",
    "a village where it has rained for a hundred days",
)


class Prompt(NamedTuple):
    """What a model is asked."""

    kind: str
    text: str
    chat: bool  #: to be put into the model's chat template


def prompts(each: int = 8) -> list[Prompt]:
    """`each` prompts of every kind, kind by kind in turn, so that a cut keeps all kinds."""
    makers = (_summaries(), _corrections(), _edits(), _completions(), _questions(), _stories())
    return [next(maker) for _ in range(each) for maker in makers]


def token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The prompt as a model reads it."""
    text = prompt.text
    if prompt.chat:
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=not prompt.chat)["input_ids"]
    return ids


def _paragraphs(topic: str, most: int) -> str:
    """The beginning of a page of documentation, whole paragraphs, without its title."""
    kept: list[str] = []
    for part in pydoc_data.topics.topics[topic].split("\n\n")[1:]:
        if kept and sum(map(len, kept)) + len(part) > most:
            break
        kept.append(part)
    return "\n\n".join(kept)


def _summaries() -> Iterator[Prompt]:
    for topic in _TEXTS:
        text = _paragraphs(topic, 1200)
        yield Prompt("summarise", f"Summarise this text in a few sentences.\n\n{text}", True)


def _damaged(text: str, noise: random.Random) -> str:
    """Some letters swapped with their neighbours."""
    letters = list(text)
    for at in range(1, len(letters) - 1):
        if letters[at].isalpha() and letters[at + 1].isalpha() and noise.random() < 0.02:
            letters[at : at + 2] = letters[at + 1], letters[at]
    return "".join(letters)


def _corrections() -> Iterator[Prompt]:
    noise = random.Random(0)
    for topic in _SHORT:
        text = _damaged(_paragraphs(topic, 600), noise)
        ask = "Correct the spelling mistakes in this text and write it down again."
        yield Prompt("correct", f"{ask} Change nothing else.\n\n{text}", True)


def _edits() -> Iterator[Prompt]:
    for function in _CODE:
        code = inspect.getsource(function)
        first = next(iter(inspect.signature(function).parameters))
        ask = f"Rename the argument `{first}` of this Python function to `value`."
        yield Prompt("edit", f"{ask} Write the whole function.\n\n```python\n{code}```", True)


def _completions() -> Iterator[Prompt]:
    for function in _LONG:
        lines = inspect.getsource(function).splitlines(keepends=True)
        yield Prompt("complete", "".join(itertools.islice(lines, max(len(lines) // 2, 3))), False)


def _questions() -> Iterator[Prompt]:
    for question in _QUESTIONS:
        yield Prompt("question", question, True)


def _stories() -> Iterator[Prompt]:
    for about in _STORIES:
        yield Prompt("story", f"Write a short story about {about}.", True)
