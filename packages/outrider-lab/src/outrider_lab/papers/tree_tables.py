"""Tables and pictures of RSD's experiments: one row per method, paired differences, the paper's."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from outrider.cli.console import Show
from outrider.models.sources import ModelSource
from outrider.text.speculator import Speculator
from outrider_lab import drawing
from outrider_lab.bench import intervals
from outrider_lab.flops import empty
from outrider_lab.papers import record, tree_published, tree_runs
from outrider_lab.papers.record import Tables
from outrider_lab.papers.tree_runs import Measured, Prompts, TreePlan, efficiency
from outrider_lab.papers.trees import PLAIN, Groups, TreeArm
from outrider_lab.theory.length import memory_bound_speedup

#: whose block efficiency is compared: the first is said to be the better
PAIRS = (
    ("block", "SD"),
    ("RSD-S", "RSD-C"),
    ("RSD-C", "SpecTr"),
    ("hub + traversal", "RSD-S"),
    ("SpecTr", "SpecInfer"),
    ("RSD-C + traversal", "RSD-C"),
    ("RSD-S + traversal", "RSD-S"),
    ("hub + traversal", "RSD-C + traversal"),
    ("hub + traversal", "block"),
)


def run(
    name: str,
    groups: Groups,
    pair: Speculator,
    prompts: Prompts,
    plan: TreePlan,
    out: Path,
    progress: Show,
    pictures: bool = True,
) -> Tables:
    """Measure what is missing, write and return the tables."""
    store, found = tree_runs.measure(name, groups, pair, prompts, plan, out, progress)
    ratio = size_ratio(pair)
    asked = list(groups)
    tables: Tables = {
        "methods": [_row(found, key, arm, ratio) for key, arm in found.arms.items()],
        "differences": [row for group in groups for row in differences(name, found, group)],
        "trees": [
            _tree_row(found, group, arm) | tree_published.beside(name, group, arm.method, arm.tree)
            for group, arms in groups.items()
            for arm in arms
        ],
        "published": tree_published.best(name, asked),
        "published-all": tree_published.every(name, asked),
    }
    store.write(tables)
    if pictures:
        draw(name, tables, out)
    return tables


def size_ratio(pair: Speculator) -> float:
    """Size of the draft over size of the target, both read once a call."""
    draft, target = (
        sum(weight.numel() for weight in empty(ModelSource(source, "draft")).parameters())
        for source in (pair.notes.draft, pair.notes.target)
    )
    return float(draft / target)


def _total(times: Sequence[record.Row], name: str) -> float:
    return float(sum(t[name] for t in times))


def per_second(times: Sequence[record.Row]) -> intervals.Statistic:
    """Steps a second over some of the timed prompts."""
    return intervals.over([t["steps"] for t in times], [t["seconds"] for t in times])


def _row(found: Measured, key: tuple[int, str], arm: TreeArm, ratio: float) -> record.Row:
    """One line.

    Rates take the time of a step from the timed prompts, paired with plain's, and its tokens from
    all judging prompts; their intervals know what both leave open.
    """
    row, times = found.chosen[key[0], arm.method, arm.tree], found.times[key]
    count, samples = len(row["steps"]), row["samples"]
    tokens = intervals.Factor(partial(efficiency, row), count)
    tau = intervals.product(tokens)
    made: record.Row = {
        "group": key[0],
        "method": arm.method,
        "tree": arm.tree,
        "block efficiency": tau.value,
        "tau 95 %": tau.text(),
        "MBSU": memory_bound_speedup(tau.value, arm.depth, ratio),
    }
    if times:
        fast, plain = per_second(times), per_second(found.times[0, PLAIN.method])
        gain = intervals.Factor(lambda units: fast(units) / plain(units), len(times))
        rate = intervals.product(tokens, gain)
        made |= {
            "tokens/s": tau.value * fast(range(len(times))),
            "rate": rate.value,
            "rate 95 %": rate.text(2),
            "sign": rate.sign(1.0) if key[0] else "",
            "timed": len(times),
            "models ms": _total(times, "models ms") / _total(times, "steps"),
            "outside ms": _total(times, "outside ms") / _total(times, "steps"),
        }
    for name, source in (("parses", "parsed"), ("edit similarity", "alike")):
        score = intervals.mean([value / samples for value in row[source]], intervals.SHARE)
        made |= {name: score.value, f"{name} 95 %": score.text(2)}
    return made


def _tree_row(found: Measured, group: int, arm: TreeArm) -> record.Row:
    row = found.every[group, arm.method, arm.tree]
    tau = intervals.interval(partial(efficiency, row), len(row["steps"]), intervals.LOG)
    return {
        "group": group,
        "method": arm.method,
        "tree": arm.tree,
        "block efficiency": tau.value,
        "95 %": tau.text(),
        "chosen": "yes" if found.arms[group, arm.method] is arm else "",
    }


def _gap(better: record.Row, worse: record.Row, units: Sequence[int]) -> float:
    return efficiency(better, units) - efficiency(worse, units)


def differences(name: str, found: Measured, group: int) -> list[record.Row]:
    """Differences of block efficiency on the judging prompts, paired by prompt."""
    made = []
    for better, worse in PAIRS:
        if (group, better) not in found.arms or (group, worse) not in found.arms:
            continue
        one, other = found.arms[group, better], found.arms[group, worse]
        a = found.chosen[group, better, one.tree]
        b = found.chosen[group, worse, other.tree]
        gap = intervals.interval(partial(_gap, a, b), len(a["steps"]))
        made.append(
            {
                "group": group,
                "difference": f"{better} ({one.tree}) - {worse} ({other.tree})",
                "block efficiency": gap.value,
                "95 %": gap.text(signed=True),
                "sign": gap.sign(),
            }
            | tree_published.difference(name, group, better, worse)
        )
    return made


def draw(name: str, tables: Tables, out: Path) -> None:
    """Block efficiency, MBSU, token rate and task score by group, what of these there is; the
    paper's values dotted."""
    label = "draft length" if name == "draft-length" else "tokens scored by the target"
    ours = [r for r in tables["methods"] if r["method"] != PLAIN.method]
    methods = list(dict.fromkeys(r["method"] for r in ours))
    colours = {m: f"C{i}" for i, m in enumerate(methods)}
    every = ("block efficiency", "MBSU", "rate", "parses")
    values = [value for value in every if any(value in row for row in ours)]
    figure, grid = drawing.panels(1, len(values), (4.5 * len(values), 5))
    axes = grid[0]
    for axis, value in zip(axes, values, strict=True):
        for method in methods:
            rows = [r for r in ours if r["method"] == method and value in r]
            x, y = [r["group"] for r in rows], [r[value] for r in rows]
            axis.plot(x, y, "o-", color=colours[method], label=method)
            paper = [r for r in tables["published"] if r["method"] == method and value in r]
            x, y = [r["group"] for r in paper], [r[value] for r in paper]
            axis.plot(x, y, ":", color=colours[method], linewidth=1)
        axis.plot([], [], "k:", linewidth=1, label="the same method, published")
        axis.set_xlabel(label)
        axis.set_title("tokens/s over plain" if value == "rate" else value)
    drawing.legend(figure, axes, 5)
    drawing.save(figure, out, name)
