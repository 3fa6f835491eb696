"""Leviathan et al. 2023, section 3: figures 2 to 4, table 1, and the same from runs of a pair.

The figures and the table are formulas; table 1 stands beside what the paper prints. Runs of the
pair give what the formulas assume away: how beta is distributed along texts and how it hangs
together, tokens per call as predicted (independent betas; recorded ones) and as measured, and
operations and memory reads as theorem 3.11 and section 3.4 count them and as models were called.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider import DraftModel, Engine, SamplingParams, Speculator, verifiers
from outrider.cli.console import Show
from outrider_lab import drawing, timeline
from outrider_lab.bench import intervals
from outrider_lab.papers import alpha_measure, alpha_tasks, beta, published, record, tree_tables
from outrider_lab.papers.alpha_tasks import asked
from outrider_lab.papers.record import Tables
from outrider_lab.theory import length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  #: c of figure 3
LENGTHS = (1, 3, 5, 7, 10)  #: gamma of figures 2 and 4


@dataclass(frozen=True)
class TheoryAmount:
    """How much is decoded."""

    prompts: int = 48
    new_tokens: int = 128
    gammas: tuple[int, ...] = (2, 4, 7)
    seed: int = 0
    top_p: float = 1.0


def table_one() -> list[record.Row]:
    """Operations and speed for c = 0, with what the paper prints."""
    return [
        {
            "alpha": row["alpha"],
            "gamma": row["gamma"],
            "operations": length.operations(row["alpha"], row["gamma"]),
            "published operations": row["operations"],
            "speed": length.speedup(row["alpha"], row["gamma"], 0.0),
            "published speed": row["speed"],
        }
        for row in published.flat("leviathan", "1")
    ]


def curves() -> Tables:
    """Figures 2 to 4 as rows by alpha."""
    alphas = [n / 50 for n in range(50)]
    return {
        "figure2": [
            {"alpha": a} | {f"gamma {g}": length.expected_tokens(a, g) for g in LENGTHS}
            for a in alphas
        ],
        "figure3": [
            {"alpha": a} | {f"c {c:g}": length.best_length(a, c) for c in COSTS} for a in alphas
        ],
        "figure4": [
            {"alpha": a}
            | {f"speed, gamma {g}": length.speedup(a, g, 0.0) for g in LENGTHS}
            | {f"operations, gamma {g}": length.operations(a, g) for g in LENGTHS}
            for a in alphas
        ],
    }


def run(
    pair: Speculator,
    prompts: alpha_tasks.Rows,
    out: Path,
    progress: Show,
    amount: TheoryAmount,
    pictures: bool = True,
) -> Tables:
    """All tables; texts are at T = 0 and T = 1."""
    rows = prompts[: amount.prompts]
    settings = asdict(amount) | {"of": record.of_prompts(rows)} | record.of_pair(pair.notes)
    store = record.Store(out, "theory", settings)
    tasks = alpha_tasks.tasks(pair, rows)
    ratio = tree_tables.size_ratio(pair)
    model = record.draft_of(pair)
    tables: Tables = {"table1": table_one()} | curves() | {"beta": [], "lags": [], "calls": []}
    total = 2 * (1 + len(amount.gammas))
    for number, t in enumerate((0.0, 1.0)):
        at = number * (1 + len(amount.gammas))
        progress(f"beta at T = {t:g}", at, total)
        law = SamplingParams(t, top_p=amount.top_p)
        size = {"new_tokens": amount.new_tokens, "seed": amount.seed}
        found = store.get(f"beta {t}", beta.recorded, pair, tasks, model, law, **size)
        if t:  # at T = 0 beta is 0 or 1
            tables["beta"] += beta.distribution(found["beta"])
        tables["lags"] += [
            {
                "T": t,
                "lag": lag,
                "autocorrelation": one.value,
                "95 %": one.text(signed=True),
                "independent": beta.independent(found["beta"]),
            }
            for lag in beta.LAGS
            for one in [beta.autocorrelation(found["beta"], lag)]
        ]
        for step, gamma in enumerate(amount.gammas, start=1):
            progress(f"gamma = {gamma}, T = {t:g}", at + step, total)
            made = store.get(f"run {t} {gamma}", counted, pair, tasks, gamma, law, **size)
            tables["calls"].append({"T": t, "gamma": gamma} | _row(found, made, gamma, ratio))
    store.write(tables)
    if pictures:
        draw(tables, out)
    return tables


def counted(
    pair: Speculator,
    tasks: alpha_measure.Tasks,
    gamma: int,
    law: SamplingParams,
    *,
    new_tokens: int,
    seed: int,
) -> record.Row:
    """For each task: tokens, calls of both models and tokens that they read, prompts left out."""
    target, draft = timeline.Timed(pair.engine.target), timeline.Timed(record.draft_of(pair))
    rule = verifiers.get("rejection" if law.temperature else "match")
    engine = Engine(target, DraftModel(draft, (1,) * gamma), rule)
    found: record.Row = {name: [] for name in ("tokens", "calls", "read", "drafts", "draft read")}
    for number, task in enumerate(tasks):
        request = asked(task, replace(law, seed=seed + number), pair, new_tokens)
        target.spans.clear()
        draft.spans.clear()
        stats = alpha_measure.decoded(engine, [request])[1].stats
        steps = [span for span in target.spans if not span.encodes][-stats.engine_steps :]
        drafted = draft.spans[-gamma * len(steps) :]
        found["tokens"].append(stats.new_tokens)
        found["calls"].append(len(steps))
        found["read"].append(sum(span.tokens for span in steps))
        found["drafts"].append(len(drafted))
        found["draft read"].append(sum(span.tokens for span in drafted))
    return found


def _row(found: record.Row, made: record.Row, gamma: int, ratio: float) -> record.Row:
    """Predicted and measured, side by side; both models' sizes stand for operations and reads."""
    lengths = [float(len(text)) for text in found["beta"]]
    alpha = intervals.quotient([sum(t) for t in found["beta"]], lengths, intervals.SHARE).value
    by_beta, exact = (beta.tokens_per_call(found[name], gamma) for name in ("beta", "kept"))
    tokens = intervals.quotient(made["tokens"], made["calls"], intervals.LOG)
    both = [t + ratio * d for t, d in zip(made["read"], made["draft read"], strict=True)]
    reads = [t + ratio * d for t, d in zip(made["calls"], made["drafts"], strict=True)]
    work = intervals.quotient(both, made["tokens"], intervals.LOG)
    memory = intervals.quotient(reads, made["tokens"], intervals.LOG)
    expected = length.expected_tokens(alpha, gamma)
    return {
        "alpha": alpha,
        "tokens/call, i.i.d.": expected,
        "by betas": by_beta.value,
        "by texts": exact.value,
        "by texts 95 %": exact.text(),
        "measured": tokens.value,
        "95 %": tokens.text(),
        "operations, theorem 3.11": length.operations(alpha, gamma, ratio),
        "operations": work.value,
        "operations 95 %": work.text(),
        "memory reads, section 3.4": (1 + gamma * ratio) / expected,
        "memory reads": memory.value,
        "memory reads 95 %": memory.text(),
    }


def draw(tables: Tables, out: Path) -> None:
    """Figures 2 to 4, and beta's distribution, autocorrelation and predictions beside them."""
    figure, grid = drawing.panels(2, 3, (16, 9))
    for axis, (name, title) in zip(
        grid[0],
        (
            ("figure2", "expected tokens per call (figure 2)"),
            ("figure3", "best gamma (figure 3)"),
            ("figure4", "speed (solid) and operations (dotted), c = 0 (figure 4)"),
        ),
        strict=True,
    ):
        rows = tables[name]
        x = [row["alpha"] for row in rows]
        for number, column in enumerate(key for key in rows[0] if key != "alpha"):
            mark = ":" if column.startswith("operations") else "-"
            colour = f"C{number % len(LENGTHS if name == 'figure4' else rows[0])}"
            label = None if mark == ":" else column.removeprefix("speed, ")
            axis.plot(x, [row[column] for row in rows], mark, color=colour, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("alpha")
        drawing.below(axis)
    _draw_runs(grid[1], tables)
    drawing.save(figure, out, "theory")


def _draw_runs(axes: Sequence["Axes"], tables: Tables) -> None:
    bars, lags, calls = axes
    bars.bar(np.arange(10) / 10 + 0.05, [row["share"] for row in tables["beta"]], 0.09)
    bars.set_title("beta along texts, T = 1", fontsize=10)
    bars.set_xlabel("beta")
    for t in (0.0, 1.0):
        mine = [row for row in tables["lags"] if row["T"] == t]
        values = [row["autocorrelation"] for row in mine]
        colour = f"C{int(t)}"
        lags.plot([row["lag"] for row in mine], values, "o-", color=colour, label=f"T = {t:g}")
        for row in mine:
            drawing.whisker(lags, row["lag"] + 0.06 * t, row["95 %"], colour)
    lags.axhline(0, color="grey", linewidth=0.8)
    lags.set_title("autocorrelation of beta", fontsize=10)
    lags.set_xlabel("tokens apart")
    drawing.below(lags)
    for name, mark in (("tokens/call, i.i.d.", "x"), ("by betas", "+"), ("by texts", "o")):
        measured = [row["measured"] for row in tables["calls"]]
        calls.plot(measured, [row[name] for row in tables["calls"]], mark, label=name)
    most = max(row["measured"] for row in tables["calls"])
    calls.plot([1, most], [1, most], "k:", linewidth=1)
    calls.set_title("tokens per call: predicted", fontsize=10)
    calls.set_xlabel("measured")
    drawing.below(calls)
