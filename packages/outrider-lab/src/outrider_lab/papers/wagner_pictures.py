"""Wagner et al. 2024 in pictures: figures 3, 4 and 5, table 8, tables 1 and 6 as bars."""

from pathlib import Path
from typing import Any

from outrider_lab import drawing
from outrider_lab.papers.record import Row, Tables


def draw(settings: Row, tables: Tables, out: Path) -> None:
    """One picture of four panels, `wagner.png` and `.svg`; what the paper prints is dotted."""
    plt = drawing.pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(13, 9.5), layout="constrained")
    _gains(axes[0, 0], tables)
    _over_gamma(axes[0, 1], tables, "step ms", "ms", "profiled time of a step, ms (figure 3)")
    accepted = "accepted of drafted tokens, % (table 8)"
    _over_gamma(axes[1, 0], tables, "accepted %", "accepted, %", accepted)
    _memory(axes[1, 1], tables)
    for axis in (axes[0, 1], axes[1, 0], axes[1, 1]):
        axis.set_xlabel("initial gamma")
    title = f"{settings['pair']}: {settings['device']}, {settings['dtype']}, T = 1"
    figure.suptitle(title, fontsize=10)
    drawing.save(figure, out, "wagner")
    plt.close(figure)


def _gains(axis: Any, tables: Tables) -> None:
    """How much less than transformers' function each method takes: ours with intervals."""
    rows = tables["profiled"][1:]
    for place, row in enumerate(rows):
        for shift, (what, colour) in enumerate((("sum", "C0"), ("step", "C1"))):
            value, ends = row[f"{what} less %"], row[f"{what} less 95 %"]
            at = place + 0.25 * (shift - 0.5)
            axis.bar(at, value, 0.25, color=colour, label=_once(place == 0, f"{what}, ours"))
            drawing.whisker(axis, at, ends)
    kinds = {"exact": "paper exact", "sigmoid": "paper sigmoid (lossy)"}
    for kind, method in kinds.items():
        place = [row["method"] for row in rows].index(method)
        for shift, (what, mark) in enumerate((("time", "x"), ("a step", "+"))):
            theirs = tables["published-methods"]
            values = [r[k] for r in theirs if (k := f"less {what}, {kind}, %") in r]
            places = [place + 0.25 * (shift - 0.5)] * len(values)
            named = "sum" if what == "time" else "step"
            label = _once(kind == "exact", f"{named}, published (A100)")
            axis.plot(places, values, mark, color="black", alpha=0.6, label=label)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(rows)), [row["method"] for row in rows])
    axis.set_ylim(bottom=max(axis.get_ylim()[0], -250))
    axis.set_title("less profiled time than transformers', % (tables 1, 6)", fontsize=10)
    drawing.below(axis, 4)


def _once(first: bool, label: str) -> str:
    return label if first else "_nolegend_"


def _over_gamma(axis: Any, tables: Tables, ours: str, theirs: str, title: str) -> None:
    methods = list(dict.fromkeys(row["method"] for row in tables["gamma"]))
    for number, method in enumerate(methods):
        rows = [row for row in tables["gamma"] if row["method"] == method]
        x, y = [row["gamma"] for row in rows], [row[ours] for row in rows]
        axis.plot(x, y, "o-", color=f"C{number}", markersize=4, label=method)
        ends = [row[ours.replace(" %", "") + " 95 %"].strip("[]").split(", ") for row in rows]
        if all(len(pair) == 2 for pair in ends):
            low, high = ([float(pair[end]) for pair in ends] for end in (0, 1))
            axis.fill_between(x, low, high, color=f"C{number}", alpha=0.12, linewidth=0)
    papers = {"baseline": "C0", "exact": "C1", "sigmoid": "C2"}
    for target in dict.fromkeys(row["target"] for row in tables["published-gamma"]):
        for method, colour in papers.items():
            key = (target, method)
            rows = [r for r in tables["published-gamma"] if (r["target"], r["method"]) == key]
            x, y = [r["gamma"] for r in rows], [r[theirs] for r in rows]
            label = _once(target == "Gemma 7B", f"{method}, published (A100)")
            axis.plot(x, y, ":x", color=colour, linewidth=1, markersize=4, label=label)
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    drawing.below(axis, 4)


def _memory(axis: Any, tables: Tables) -> None:
    rows = tables["memory"]
    names = [name for name in rows[0] if name.endswith(", MB")]
    known = [name for name in names if all(row[name] is not None for row in rows)]
    if not known:
        axis.text(0.5, 0.5, "not told on this system", ha="center", transform=axis.transAxes)
    for name in known:
        x = [row["gamma"] for row in rows]
        axis.plot(x, [row[name] for row in rows], "o-", markersize=4, label=name[: -len(", MB")])
    axis.set_title("most memory in use, MB (figures 4 and 5)", fontsize=10)
    if known:
        drawing.below(axis)
