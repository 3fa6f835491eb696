"""Which drafter pays for which work: every usual one on a reader's own prompts, by category.

Arms and measurement are those of `outrider bench tasks`; nothing is scored. `by_category.jsonl`
beside this file holds 80 prompts of eight categories to try it on.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider import Engine
from outrider.cli.console import Show
from outrider.errors import ConfigurationError
from outrider_lab.bench import intervals
from outrider_lab.bench.machine import load_to_measure
from outrider_lab.bench.prompts import read_rows
from outrider_lab.certify.report import Row
from outrider_lab.papers.options import goes_on
from outrider_lab.papers.record import Tables
from outrider_lab.tasks import tables
from outrider_lab.tasks.arms import DEFAULT, PLAIN, arms
from outrider_lab.tasks.prompts import PromptTask
from outrider_lab.tasks.run import TasksAmount, clock, run as measure, store_of

#: Besides the default: what needs no training, and what goes with a draft model.
ALONE, DRAFTED = ("suffix", "prompt_lookup"), ("recall", "either")
PAYS = 1.03  #: times plain decoding below which it is not worth a setting
EVERYTHING = "all prompts"


@dataclass(frozen=True)
class ChoiceRequest:
    """What is tried: models, a file of prompts, how many of each category, how much is written."""

    model: str
    draft: str | None
    prompts: Path
    limit: int = 3
    new_tokens: int = 64
    temperature: float = 0.0
    dtype: str = "auto"
    threads: int = 1
    trust_remote_code: bool = False


def some(rows: Sequence[Row], each: int) -> list[PromptTask]:
    """The first prompts of each category; those that name none are of one.

    >>> [task.kind for task in some([{"prompt": "a"}, {"prompt": "b", "category": "qa"}], 1)]
    ['prompts', 'qa']
    """
    counts: dict[str, int] = {}
    found = []
    for number, row in enumerate(rows):
        kind = str(row.get("category", "prompts"))
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= each:
            found.append(PromptTask(number, kind, kind, [row["prompt"]]))
    return found


def run(asked: ChoiceRequest, progress: Show) -> tuple[Tables, str]:
    """Measure; a row for each category, one for all, and what to do in a sentence.

    Raises PromptError for a file without prompts, ConfigurationError for a model that
    reads no text.
    """
    goes_on(asked.model)
    tasks = some(read_rows(asked.prompts), asked.limit)
    base = load_to_measure(
        asked.model,
        asked.draft,
        dtype=asked.dtype,
        threads=asked.threads,
        trust_remote_code=asked.trust_remote_code,
    )
    if base.engine.target.reads != "text" or base.tokenizer is None:
        raise ConfigurationError(
            f"prompts are asked of a model that goes on from text; got {asked.model!r}; give one "
            "with its tokenizer"
        )
    names = (*(ALONE if asked.draft is None else DRAFTED), DEFAULT)
    engines = {
        # as `load` would have them: how much they draft is the planner's to say
        name: made
        if name in (PLAIN, DEFAULT)
        else Engine(made.target, made.drafter, None, "adaptive")
        for name, made in arms(base, None, (), names).engines.items()
    }
    amount = TasksAmount(asked.new_tokens, (asked.temperature,), run_code=False, scored=False)
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(Path(folder), base, amount, {"prompts": str(asked.prompts)})
        answers = measure(base, engines, tasks, amount, store, progress)
    ratios = {arm: one for (_, arm), one in tables.ratios(answers, clock(base)).items()}
    usual = base.engine.drafter.name
    shown = {arm: f"default ({usual})" if arm == DEFAULT else arm for arm in ratios}
    kinds = list(dict.fromkeys(task.kind for task in tasks))
    rows = [_row(kind, [task.kind == kind for task in tasks], ratios, shown) for kind in kinds]
    if len(kinds) > 1:
        rows.append(_row(EVERYTHING, [True] * len(tasks), ratios, shown))
    plain = answers.rows[asked.temperature, PLAIN]
    cost = 1e3 * sum(row[clock(base)] for row in plain) / sum(len(row["ids"]) for row in plain)
    return {"drafters": rows}, _advice(rows, cost)


def _row(
    kind: str, picked: Sequence[bool], ratios: dict[str, list[float]], shown: dict[str, str]
) -> Row:
    """Times plain decoding of each arm on the picked prompts, and which is the fastest."""
    found = {
        arm: intervals.typical([one for one, chosen in zip(each, picked, strict=True) if chosen])
        for arm, each in ratios.items()
    }
    best = max(found, key=lambda arm: found[arm].value)
    row: Row = {"category": kind, "prompts": sum(picked)}
    row |= {shown[arm]: tables.shown(one) for arm, one in found.items()}
    return row | {"take": shown[best] if found[best].value >= PAYS else "none"}


def _advice(rows: Sequence[Row], cost: float) -> str:
    """The last row in words, and whether categories differ."""
    last = rows[-1]["take"]
    how = "nothing pays: drafter='none'" if last == "none" else f"take {last}"
    others = sorted({row["take"] for row in rows[:-1]} - {last})
    more = f"; some categories prefer {', '.join(others)}" if others else ""
    few = rows[-1]["prompts"] < intervals.LEAST
    sure = f" (fewer than {intervals.LEAST} prompts: no sign)" if few else ""
    return f"plain decoding takes {cost:.1f} ms a token; {how}{more}{sure}"
