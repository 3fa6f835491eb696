"""What an answer is worth, in [0, 1], by the field's libraries.

question   the share of the groups of words of which one is in the answer
summary    ROUGE-1, ROUGE-2 and ROUGE-L, F (rouge-score), against the reference
rewrite    ROUGE-L, F, against the whole text as it should be
code       whether it is Python (parses), and whether its tests pass (sandbox)
list       whether it is JSON, and whether it keeps to the schema (jsonschema-rs); of a list of
           lines, whether there are as many as asked
story      whether it does not run in circles (half of its 4-grams distinct)

The first of each kind is its main score.
"""

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Sequence

from outrider.errors import ConfigurationError
from outrider_lab.bench.compare import looping
from outrider_lab.papers import score
from outrider_lab.tasks import sandbox
from outrider_lab.tasks.prompts import PromptTask

#: kind -> names of its scores, the main one first
NAMES = {
    "question": ("answered",),
    "summary": ("ROUGE-1", "ROUGE-2", "ROUGE-L"),
    "rewrite": ("ROUGE-L",),
    "code": ("passes", "parses"),
    "list": ("schema", "valid"),
    "story": ("no loop",),
}
#: By rouge-score, one text at a time.
ROUGE = {one.name: one.each for one in (score.ROUGE_1, score.ROUGE_2, score.ROUGE_L) if one.each}
_FENCE = re.compile(r"```\w*\n(.*?)(?:```|\Z)", re.S)
_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+(\S.*)$", re.M)


def needed(run: bool) -> None:
    """Say what is missing before anything is measured; `run`: to run code of answers."""
    if run and importlib.util.find_spec("resource") is None:
        raise ConfigurationError(
            "code of answers is run within limits that only POSIX systems have; got "
            f"{sys.platform}; give --no-run-code"
        )
    score.ready()
    try:
        import jsonschema_rs  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "scores of JSON need jsonschema-rs, which is not installed; install the extra with "
            "pip install 'outrider[bench]'"
        ) from error


def scores(
    task: PromptTask, answer: str, token_ids: Sequence[int], run: bool = True
) -> dict[str, float]:
    """An answer's scores by name (`NAMES`); without `run` no code of the answer is run.

    >>> from outrider_lab.tasks.prompts import tasks
    >>> scores(tasks(1)[0], "It displaces much water.", [])
    {'answered': 1.0}
    """
    if task.kind == "question":
        lower = answer.lower()
        found = [any(word in lower for word in group) for group in task.answers]
        return {"answered": sum(found) / len(found)}
    if task.kind == "code":
        code = task.header + unfenced(answer)
        parsed = {"parses": float(_parses(code))}
        return ({"passes": float(sandbox.passes(code, task.tests))} if run else {}) | parsed
    if task.kind == "list":
        valid, fits = _structure(task, answer)
        return {"schema": float(fits), "valid": float(valid)}
    if task.kind == "story":
        return {"no loop": float(not looping(token_ids))}
    text = unfenced(answer)
    return {name: ROUGE[name](text, task.reference) for name in NAMES[task.kind]}


def unfenced(answer: str) -> str:
    """What stands in the first fence of an answer; all of it if there is none.

    >>> unfenced("Here: \\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    """
    found = _FENCE.search(answer)
    return found[1] if found else answer


def _parses(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _structure(task: PromptTask, answer: str) -> tuple[bool, bool]:
    """Whether an answer has the form asked for, and whether that keeps to the schema."""
    import jsonschema_rs

    found: object = _ITEM.findall(answer)
    if task.format == "json":
        try:
            found = json.loads(unfenced(answer))
        except ValueError:
            return False, False
    return bool(found), jsonschema_rs.is_valid(task.schema, found)
