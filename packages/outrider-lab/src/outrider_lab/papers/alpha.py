"""Leviathan et al. 2023, tables 2 to 5: alpha by drafter, predicted and measured improvement.

alpha = E[sum min(p, q)] over prefixes that the target wrote (at temperature 0: how often the
argmaxes agree). c = time of a draft step over time of a target step, measured. Expected improvement
(1 - alpha^(gamma + 1)) / ((1 - alpha)(gamma c + 1)); measured: plain over speculative time,
interleaved. Two drafts: what each rule accepts at a node and the most that any exact rule could, on
recorded laws (not of speech: a Whisper's 50,000 tokens take minutes). Lenience as in A.5:
`lenience` above temperature 0, `lenience_argmax` at 0.

Encoder-decoders, the paper's own T5 models among them, write from sources; where a row says what
was meant (`reference`) texts are scored against it as well (BLEU, ROUGE).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider import DraftModel, Engine, Speculator
from outrider.cli.console import Show
from outrider_lab import drawing
from outrider_lab.bench.intervals import Interval
from outrider_lab.papers import (
    alpha_drafters,
    alpha_measure,
    alpha_quality,
    alpha_tasks,
    published,
    record,
)
from outrider_lab.papers.alpha_drafters import DRAFT, AlphaCopies
from outrider_lab.papers.alpha_measure import LENIENCES, rule_at
from outrider_lab.papers.alpha_tasks import Rows
from outrider_lab.papers.record import Tables
from outrider_lab.theory import length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = [f"l = {level:g}" for level in LENIENCES]


@dataclass(frozen=True)
class AlphaAmount:
    """How much is measured."""

    tokens: int = 10_000  #: for alpha
    library: int = 2_000_000  #: tokens that n-grams are counted in
    timed: int = 20  #: prompts under the clock; 0: no times
    repeats: int = 1
    new_tokens: int = 64
    laws: int = 256  #: recorded, for two drafts at a node
    scored: int = 64  #: texts scored against what was meant
    unasked: int = 64  #: texts from nothing but the token of beginnings, at T = 1
    seed: int = 0
    top_p: float = 1.0


def run(
    pair: Speculator,
    prompts: Rows,
    out: Path,
    progress: Show,
    amount: AlphaAmount,
    pictures: bool = True,
) -> Tables:
    """All tables; `prompts` are rows that `alpha_tasks.tasks` can read."""
    settings = asdict(amount) | {"prompts": len(prompts), "of": record.of_prompts(prompts)}
    store = record.Store(out, "alpha", settings | record.of_pair(pair.notes))
    progress("counting n-grams, cutting models", 0, 5)
    tasks = alpha_tasks.tasks(pair, prompts)
    sources = alpha_drafters.sources(pair, prompts, amount.library)
    size: record.Row = {
        "new_tokens": amount.new_tokens,
        "seed": amount.seed,
        "top_p": amount.top_p,
    }
    alphas: dict[float, record.Row] = {}
    for step, t in enumerate((0.0, 1.0), start=1):
        progress(f"alpha at T = {t:g}", step, 5)
        how = {"tokens": amount.tokens, **size}
        alphas[t] = store.get(f"alpha {t}", alpha_measure.alphas, pair, tasks, sources, t, **how)
    begun = _unasked(pair, sources, store, amount, size)
    costs: record.Row = {}
    if amount.timed:
        progress("cost of a draft step", 3, 5)
        costs = store.get("cost", alpha_measure.costs, pair, tasks, sources)

    def improvement(name: str, temperature: float, lenience: float) -> record.Row:
        """One row of tables 4 and A.5: at the gamma that the formula says is best."""
        progress(f"timing {name}, T = {temperature:g}, l = {lenience:g}", 4, 5)
        tally = alphas[temperature]["tallies"][name]
        alpha = alpha_measure.alpha_of(tally, LENIENCES.index(lenience)).value
        c, capped = costs[name], min(alpha, 0.999)
        gamma = max(length.best_length(capped, c, 12), 1)
        rule = None if isinstance(sources[name], AlphaCopies) else rule_at(temperature, lenience)
        row = store.get(
            f"speed {name} {temperature} {lenience} {gamma}",
            alpha_measure.speed,
            pair,
            Engine(pair.engine.target, sources[name].drafter(gamma), rule),
            tasks[: amount.timed],
            temperature,
            repeats=amount.repeats,
            **size,
        )
        measured = Interval.of_row(row["ratio"])
        return {
            "drafter": name,
            "T": temperature,
            "gamma": gamma,
            "alpha": alpha,
            "c": c,
            "expected": length.speedup(capped, gamma, c),
            "measured": measured.value,
            "95 %": measured.text(2),
            "sign": measured.sign(1.0),
            "tokens a step": row["tokens a step"],
        }

    tables = {
        "alpha": _alphas(alphas, list(sources)),
        "lenience": _lenience(alphas, list(sources)),
    }
    if by_task := _tasks(alphas, prompts) + begun:
        tables["tasks"] = by_task
    if amount.timed:
        pairs = [(name, t) for name in sources for t in (0.0, 1.0)]
        tables["speed"] = [improvement(name, t, 1.0) for name, t in pairs] + published_speed()
    if isinstance(pair.engine.drafter, DraftModel) and pair.hearing is None:
        progress("two drafts at a node", 4, 5)
        tables["two"] = _two_drafts(pair, tasks, amount, store)
    if isinstance(pair.engine.drafter, DraftModel) and amount.timed:
        tables["lenience-speed"] = [
            {"l": level} | improvement(DRAFT, t, level) for t in (0.0, 1.0) for level in LENIENCES
        ] + published_lenience_speed()
    if alpha_tasks.reads_sources(pair):
        progress("texts against what was meant", 4, 5)
        tables |= alpha_quality.tables(
            pair, prompts, tasks, sources, store, scored=amount.scored, **size
        )
    store.write(tables)
    if pictures:
        _draw(tables, list(sources), out)
    return tables


def _unasked(
    pair: Speculator,
    sources: alpha_drafters.Sources,
    store: record.Store,
    amount: AlphaAmount,
    size: record.Row,
) -> list[record.Row]:
    """alpha on unconditional text, drawn: greedily there is one text only."""
    requests = alpha_tasks.unasked(pair, amount.unasked)
    if not requests:
        return []
    how = {"tokens": amount.unasked * amount.new_tokens, **size}
    found = store.get("unasked", alpha_measure.alphas, pair, requests, sources, 1.0, **how)
    return [
        {"task": "unconditional", "drafter": name} | _part({1.0: found["tallies"][name]})
        for name in sources
    ]


def _two_drafts(
    pair: Speculator, tasks: alpha_measure.Tasks, amount: AlphaAmount, store: record.Store
) -> list[record.Row]:
    two = {
        t: store.get(
            f"two {t}",
            alpha_measure.two_drafts,
            pair,
            tasks,
            record.draft_of(pair),
            t,
            laws=amount.laws,
            seed=amount.seed,
            top_p=amount.top_p,
        )
        for t in (1.0, 0.3)
    }
    return [_two(two, name) for name in two[1.0] if name not in ("key", "settings")]


def _alphas(found: dict[float, record.Row], names: Sequence[str]) -> list[record.Row]:
    rows: list[record.Row] = []
    for name in names:
        row: record.Row = {"drafter": name}
        for t, one in found.items():
            alpha = alpha_measure.alpha_of(one["tallies"][name])
            row |= {f"alpha T = {t:g}": alpha.value, f"95 %, T = {t:g}": alpha.text()}
            row |= {f"tokens, T = {t:g}": one["tokens"]}
        rows.append(row)
    return rows + [
        {"drafter": f"{name} ({target}, published)", "alpha T = 0": zero, "alpha T = 1": one}
        for target, models in published.LEVIATHAN_ALPHA.items()
        for name, (zero, one) in models.items()
    ]


def _tasks(found: dict[float, record.Row], prompts: Rows) -> list[record.Row]:
    """alpha by the prompts' `category` (Spec-Bench's word for a task); none if no row has one."""
    names = dict.fromkeys(row["category"] for row in prompts if row.get("category"))
    rows: list[record.Row] = []
    for task in names:
        mine = {n for n, row in enumerate(prompts) if row.get("category") == task}
        for name in found[1.0]["tallies"]:
            parts = {
                t: alpha_measure.part_of(one["tallies"][name], mine) for t, one in found.items()
            }
            rows.append({"task": task, "drafter": name} | _part(parts))
    return rows


def _part(tallies: dict[float, record.Row]) -> record.Row:
    """alpha of one task by temperature; one that there was no text for is left out."""
    row: record.Row = {}
    for t, tally in tallies.items():
        if tally["places"]:
            alpha = alpha_measure.alpha_of(tally)
            row |= {f"alpha T = {t:g}": alpha.value, f"95 %, T = {t:g}": alpha.text()}
            row[f"prompts, T = {t:g}"] = alpha.prompts
    return row


def _two(found: dict[float, record.Row], name: str) -> record.Row:
    row: record.Row = {"drafts and rule": name}
    for temperature, values in found.items():
        mean = Interval.of_row(values[name])
        row |= {f"T = {temperature:g}": mean.value, f"95 %, T = {temperature:g}": mean.text()}
    return row


def _lenience(found: dict[float, record.Row], names: Sequence[str]) -> list[record.Row]:
    rows: list[record.Row] = []
    for t in (0.0, 1.0):
        for name in names:
            row: record.Row = {"drafter": name, "T": t}
            for number, level in enumerate(LEVELS):
                alpha = alpha_measure.alpha_of(found[t]["tallies"][name], number)
                row |= {level: alpha.value, f"95 %, {level}": alpha.text()}
            rows.append(row)
    return rows + [
        {"drafter": f"{name} (published)", "T": t} | dict(zip(LEVELS, values, strict=True))
        for t, models in published.LEVIATHAN_LENIENCE.items()
        for name, values in models.items()
    ]


def published_speed() -> list[record.Row]:
    """Table 4, with what the formula gives for its alpha, gamma and c."""
    return [
        {
            "drafter": f"{name} ({task}, published)",
            "T": float(t),
            "gamma": gamma,
            "alpha": alpha,
            "c": c,
            "expected": expected,
            "measured": measured,
        }
        for task, name, t, gamma, alpha, c, expected, measured in published.LEVIATHAN_SPEED
    ]


def published_lenience_speed() -> list[record.Row]:
    """A.5: T5-small, English to German, c = 0.015."""
    rows: list[record.Row] = []
    for t, gains in published.LEVIATHAN_LENIENCE_SPEED.items():
        for level, alpha, gain in zip(
            LENIENCES, published.LEVIATHAN_LENIENCE[t]["T5-small"], gains, strict=True
        ):
            gamma = 8 if t == 0 else ""  # the paper does not say which at T = 1
            row = {"l": level, "drafter": "T5-small (published)", "T": t, "gamma": gamma}
            rows.append(row | {"alpha": alpha, "c": 0.015, "expected": gain})
    return rows


def _draw(tables: Tables, names: Sequence[str], out: Path) -> None:
    figure, grid = drawing.panels(1, 3, (16, 6))
    axes = grid[0]
    if "speed" in tables:
        _draw_speed(axes[0], tables["speed"], names)
    else:
        _draw_tasks(axes[0], tables.get("tasks", []))
    colours: dict[str, str] = {}
    for axis, temperature in zip(axes[1:], (0.0, 1.0), strict=True):
        for row in tables["lenience"]:
            if row["T"] != temperature:
                continue
            name = row["drafter"]
            mark = "o-" if name in names else "x:"
            colours.setdefault(name, f"C{len(colours)}")
            alphas = [row[level] for level in LEVELS]
            axis.plot(LENIENCES, alphas, mark, color=colours[name], label=name)
        axis.set_xlabel("lenience l")
        axis.set_title(f"alpha, T = {temperature:g}")
    drawing.legend(figure, axes, 4)
    drawing.save(figure, out, "alpha")


def _draw_speed(axis: "Axes", rows: Sequence[record.Row], names: Sequence[str]) -> None:
    ours = [row for row in rows if row["drafter"] in names]
    theirs = [row for row in rows if row["drafter"] not in names]
    for some, mark, label in ((ours, "o", "ours"), (theirs, "x", "Leviathan et al. 2023")):
        expected = [row["expected"] for row in some]
        axis.plot(expected, [row["measured"] for row in some], mark, label=label)
    most = max(max(row["expected"], row["measured"]) for row in rows)
    axis.plot([0, most], [0, most], "k:", linewidth=1)
    axis.set_xlabel("expected improvement")
    axis.set_ylabel("measured improvement")
    axis.set_title("expected and measured")


def _draw_tasks(axis: "Axes", rows: Sequence[record.Row]) -> None:
    """alpha at T = 1 by task, a mark for each drafter."""
    named = [row for row in rows if row.get("alpha T = 1") is not None]
    tasks = list(dict.fromkeys(row["task"] for row in named))
    drafters = list(dict.fromkeys(row["drafter"] for row in named))
    for number, drafter in enumerate(drafters):
        mine = [row for row in named if row["drafter"] == drafter]
        shift = (number - (len(drafters) - 1) / 2) / (2 * len(drafters))
        places = [tasks.index(row["task"]) + shift for row in mine]
        colour = f"C{number}"
        axis.plot(places, [row["alpha T = 1"] for row in mine], "o", color=colour, label=drafter)
        for place, row in zip(places, mine, strict=True):
            drawing.whisker(axis, place, row["95 %, T = 1"], colour)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set_xlim(-0.7, len(tasks) - 0.3)
    axis.set_ylim(0, 1)
    axis.set_title("alpha by task, T = 1, with 95 % intervals")
