"""The experiment behind `outrider bench tasks`: from options to tables, files and a picture."""

from dataclasses import dataclass
from pathlib import Path

from outrider.cli.console import Show
from outrider.drafters.ngram_table import opened
from outrider.engine.speculation_policy import FixedLength
from outrider.errors import ConfigurationError
from outrider.text.speculator import Speculator
from outrider_lab import drawing
from outrider_lab.bench.machine import load_to_measure
from outrider_lab.certify.report import Row
from outrider_lab.papers import record
from outrider_lab.papers.options import goes_on, layers_of
from outrider_lab.tasks import picture, prompts, scores, spec_bench, tables
from outrider_lab.tasks.arms import DEFAULT, arms, counts, documentation, usual_skip
from outrider_lab.tasks.run import TasksAmount, clock, run as measure, store_of


@dataclass(frozen=True)
class ExperimentRequest:
    """Models and drafters, as they were asked for."""

    target: str
    draft: str | None = None
    drafters: str | None = None
    table: str | None = None
    skip: str | None = None
    dtype: str = "auto"
    threads: int = 1
    human_eval: Path | None = None


def amount(
    quick: bool,
    new_tokens: int | None,
    temperatures: list[float] | None,
    seed: int,
    run_code: bool,
    rows: int = 1,
    rounds: int = 1,
) -> TasksAmount:
    """How much is measured; what was asked for goes before what is quick."""
    usual = TasksAmount(32 if quick else 128)
    temperatures = list(dict.fromkeys(temperatures or usual.temperatures))
    tokens = new_tokens or usual.new_tokens
    return TasksAmount(tokens, tuple(temperatures), seed, run_code, rows=rows, rounds=rounds)


def run(
    asked: ExperimentRequest,
    each: int | None,
    amount: TasksAmount,
    out: Path,
    progress: Show,
    pictures: bool = True,
) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Measure, write, and hand back tables and their titles.

    What is missing is said before anything is read.
    """
    goes_on(asked.target)
    record.folder(out)
    scores.needed(amount.run_code)
    if pictures:
        drawing.pyplot()
    if asked.human_eval is None:
        tasks = prompts.tasks(each)
    else:
        tasks = prompts.human_eval(asked.human_eval, each)
    chosen = None if asked.drafters is None else asked.drafters.split(",")
    base = load_to_measure(asked.target, asked.draft, dtype=asked.dtype, threads=asked.threads)
    target = base.engine.target
    if target.reads != "text" or base.tokenizer is None:
        raise ConfigurationError(
            f"tasks are asked of a model that goes on from text; got {asked.target!r}; give a chat "
            "model with its tokenizer"
        )
    skip = usual_skip(target) if asked.skip is None else layers_of(asked.skip)
    table = None
    if counts(chosen):
        table = opened(asked.table) or documentation(base.tokenizer, target.vocab_size)
    made = arms(base, table, skip, chosen)
    more: Row = {
        "n-grams": asked.table or "Python's documentation",
        "layers left out": list(skip),
        DEFAULT: _default(base),
    }
    if asked.human_eval is not None:
        more["prompts"] = "HumanEval"
    store = store_of(out, base, amount, more)
    answers = measure(base, made.engines, tasks, amount, store, progress)
    found = {
        "arms": tables.arms(answers, clock(base)),
        "speed": tables.speeds(answers, clock(base)),
        "scores": tables.main_scores(answers),
        "all scores": tables.other_scores(answers),
        "left out": [{"drafter": n, "why": why} for n, why in made.left_out.items()],
    }
    store.write(found)
    spec_bench.write(out / "spec-bench", answers, Path(asked.target).name)
    if pictures:
        ratios = tables.ratios(answers, clock(base))
        picture.draw(out, {key: tables.by_kind(answers, one) for key, one in ratios.items()})
    return found, _titles(len(tasks), amount, clock(base))


def _default(base: Speculator) -> str:
    engine = base.engine
    planned = "fixed" if isinstance(engine.planner, FixedLength) else "planned"
    return f"{engine.drafter.name}, {planned}"


def _titles(prompts: int, amount: TasksAmount, clock: str) -> dict[str, str]:
    by = "one thread's CPU time" if clock == "cpu_time" else "by the wall clock"
    size = f"prompts 1 to {prompts}, up to {amount.new_tokens} tokens"
    size += f", {amount.rows} together" if amount.rows > 1 else ""
    size += f", the fastest of {amount.rounds}" if amount.rounds > 1 else ""
    return {
        "arms": f"what arms take and get: {size}, whole calls, {by}",
        "speed": f"times faster than plain decoding, by kind of prompt: {size}, whole calls, {by}",
        "scores": f"what the answers are worth, the main score of each kind: {size}",
        "all scores": "every score, means",
        "left out": "drafters that cannot be made of what is given",
    }
