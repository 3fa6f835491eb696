"""The shipped prompts: six kinds, twenty each, in the form of Spec-Bench's `question.jsonl`.

question   asked in everyday words; some words must stand in a right answer
summary    of a given text, with a short reference
rewrite    a given text with a small change: the answer copies most of it
code       a function with a signature and tests
list       JSON with a schema, or a list of so many lines
story      free text

A line has Spec-Bench's `question_id`, `category` and `turns`, and what a score needs besides. Of
Spec-Bench's categories (Xia et al. 2024) these are qa, summarization, writing, coding, extraction.
"""

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigurationError, PromptError
from outrider.text.prompts import encode
from outrider_lab.certify.report import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: In the order of the file, which has one prompt of each kind in turn: a cut keeps all kinds.
KINDS = ("question", "summary", "rewrite", "code", "list", "story")


@dataclass(frozen=True)
class PromptTask:
    """A prompt, and what tells a good answer."""

    question_id: int
    category: str  #: Spec-Bench's
    kind: str  #: ours
    turns: list[str]
    text: str = ""  #: the text that is given, for summaries and rewritings
    reference: str = ""
    answers: list[list[str]] = field(default_factory=list)  #: one word of each group must be there
    name: str = ""  #: of the function that is asked for
    header: str = ""  #: Python ahead of the answer's: what the function's signature needs
    tests: list[str] = field(default_factory=list)  #: Python expressions that must be true
    format: str = ""  #: json or list
    schema: Row = field(default_factory=dict)  #: JSON schema of the answer, or of a list's lines


def tasks(each: int | None = None) -> list[PromptTask]:
    """The shipped prompts, of every kind the first `each`; all of them if None.

    >>> [task.kind for task in tasks(1)] == list(KINDS)
    True
    """
    text = Path(str(files("outrider_lab") / "tasks" / "prompts.jsonl")).read_text("utf-8")
    every = [PromptTask(**json.loads(line)) for line in text.splitlines()]
    most = len(every) // len(KINDS)
    if each is not None and not 1 <= each <= most:
        raise ConfigurationError(f"there are 1 to {most} prompts of every kind; got {each}")
    return every[: None if each is None else each * len(KINDS)]


def human_eval(path: Path, count: int | None = None) -> list[PromptTask]:
    """The first problems of a file of HumanEval (Chen et al. 2021), JSON lines, gzip or not.

    The model is asked to complete the function; what it writes stands behind the imports of the
    problem, and the problem's own `check` is run on it.

    Raises PromptError for a file that is none.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [_problem(number, row) for number, row in enumerate(rows[:count])]
    except (OSError, ValueError, KeyError, EOFError, zlib.error) as error:
        raise PromptError(
            f"no file of HumanEval; got {str(path)!r}: {error}; give HumanEval.jsonl.gz of the "
            "package human-eval"
        ) from error


def _problem(number: int, row: Row) -> PromptTask:
    name, asked = row["entry_point"], row["prompt"]
    # definitions that come first are used by the function, and models seldom repeat them
    header = asked[: asked.rindex(f"def {name}(")]
    check = f"exec({row['test']!r}, globals()) is None and check({name}) is None"
    words = f"Complete this function. Answer with the whole function.\n\n```python\n{asked}```"
    return PromptTask(number, "coding", "code", [words], name=name, header=header, tests=[check])


def token_ids(tokenizer: "PreTrainedTokenizerBase", turns: Sequence[str]) -> list[int]:
    """The first turn as a model reads it: in its chat template, or as it is if there is none."""
    if tokenizer.chat_template is None:
        return encode(tokenizer, turns[0])
    said = [{"role": "user", "content": turns[0]}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
