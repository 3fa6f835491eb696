"""Values printed in the papers, to stand beside ours. Their models, tasks and machines differ.

All of them are in one file, `published.json`: a table a paragraph, a row a line, in the papers' own
units (percent stay percent). `tools/papers/check.py` holds every value against the papers' texts.
Rows that those texts have lost are missing: four of Wagner's table 1 (XSum) and three of its table
2 (which table 7 repeats), and 29 rows of 23 of Jeon's 54 tables, all but one at a table's end.
"""

import json
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from outrider_lab.certify.report import Row

#: target, draft, task of Jeon's tables that stand in pictures, unless others are asked for
REFERENCE = ("Llama 2-7B", "115M", "XSum")


@cache
def _every() -> tuple[Row, ...]:
    text = resources.files("outrider_lab.papers").joinpath("published.json").read_text("utf-8")
    return tuple(
        {"paper": table["paper"], "table": table["table"]}
        | _row(table["of"], table["by"], table["values"], cells)
        for table in json.loads(text)
        for cells in table["rows"]
    )


def _row(of: Row, by: list[str], values: list[str], cells: list[Any]) -> Row:
    """Cells are what a row stands for, what is printed (null: nothing), and perhaps a note."""
    end = len(by) + len(values)
    printed = zip(values, cells[len(by) : end], strict=True)
    return {
        "row": of | dict(zip(by, cells[: len(by)], strict=True)),
        "values": {name: cell for name, cell in printed if cell is not None},
    } | dict(zip(["note"], cells[end:], strict=False))


def rows(paper: str | None = None, table: str | None = None) -> list[Row]:
    """Rows of a paper's table: what each stands for in "row", what is printed in "values".

    >>> [one["values"] for one in rows("leviathan", "1") if one["row"]["gamma"] == 10]
    [{'operations': 1.6, 'speed': 6.86}]
    """
    return [
        one for one in _every() if one["paper"] == (paper or one["paper"])
        and one["table"] == (table or one["table"])
    ]  # fmt: skip


def flat(paper: str, table: str) -> list[Row]:
    """The same rows as tables show them: what they stand for and what is printed, side by side.

    >>> flat("chen", "1")[1]["ms/token"]
    7.52
    """
    return [one["row"] | one["values"] for one in rows(paper, table)]


def stated(paper: str, what: str) -> float:
    """A number that stands in a paper's text.

    >>> stated("chen", "fastest draft length on XSum, figure 1")
    3.0
    """
    found = [one["values"] for one in rows(paper, "text") if one["row"]["what"] == what]
    return float(found[0]["value"])


class PublishedTree(NamedTuple):
    """A row of Jeon's C.5: lengths or budgets (`group`), and what it reached."""

    of: tuple[str, str, str]  #: target, draft, task
    group: int
    method: str
    tree: str
    values: dict[str, float]  #: block efficiency, MBSU, tokens/s, score

    @property
    def efficiency(self) -> float:
        """Tokens per target call."""
        return self.values["block efficiency"]


@cache
def jeon(experiment: str) -> tuple[PublishedTree, ...]:
    """All rows of "draft-length" (tables 1 to 27) or "budget" (28 to 54), plain decoding's too.

    >>> [round(one.efficiency, 2) for one in jeon("budget") if one.of == REFERENCE][:3]
    [1.0, 3.09, 2.58]
    """
    kind = {"draft-length": "length", "budget": "budget"}[experiment]
    return tuple(
        PublishedTree(
            (what["target"], what["draft"], what["task"]),
            what[kind],
            what["method"],
            what["tree"],
            one["values"],
        )
        for one in rows("jeon")
        if kind in (what := one["row"])
    )


def best_trees(
    experiment: str, of: tuple[str, str, str] = REFERENCE
) -> dict[int, dict[str, PublishedTree]]:
    """group -> method -> the row of the best block efficiency, as figures 4 to 9 show them."""
    found: dict[int, dict[str, PublishedTree]] = {}
    for one in jeon(experiment):
        if one.of == of and one.tree:
            known = found.setdefault(one.group, {}).get(one.method)
            if known is None or one.efficiency > known.efficiency:
                found[one.group][one.method] = one
    return found


def plain_rate(experiment: str, of: tuple[str, str, str] = REFERENCE) -> float:
    """tokens/s of plain decoding beside those rows."""
    return next(one.values["tokens/s"] for one in jeon(experiment) if one.of == of)


def _alphas() -> dict[str, dict[str, tuple[float, float]]]:
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for zero in rows("leviathan", "3"):
        what = zero["row"]
        if what["T"] == 0:
            hot = next(r for r in rows("leviathan", "3") if r["row"] == what | {"T": 1})
            pair = (zero["values"]["alpha"], hot["values"]["alpha"])
            found.setdefault(what["target"], {})[what["draft"]] = pair
    return found


def _leniences() -> dict[float, dict[str, tuple[float, ...]]]:
    found: dict[float, dict[str, tuple[float, ...]]] = {0.0: {}, 1.0: {}}
    for one in (*rows("leviathan", "A.5"), *rows("leviathan", "5")):
        what = one["row"]
        if "alpha" in one["values"]:
            model = found[float(what["T"])]
            model[what["draft"]] = (*model.get(what["draft"], ()), one["values"]["alpha"])
    return found


#: Leviathan et al. 2023, table 3: target -> model -> (T = 0, T = 1).
LEVIATHAN_ALPHA = _alphas()

#: Table 4 (and 2): task, model, T, gamma, alpha, c, expected and measured improvement; T5-XXL.
LEVIATHAN_SPEED = [tuple(one.values()) for one in flat("leviathan", "4")]

#: Table 5 and section A.5: T -> model -> alpha by lenience 1, 0.5, 0.3, 0.1; translation.
LEVIATHAN_LENIENCE = _leniences()

#: Section A.5: T -> improvement of T5-small by lenience, computed by its authors for c = 0.015
#: (T = 0: gamma 8; T = 1: gamma not given, and above the formula at any gamma, docs/theory.md).
LEVIATHAN_LENIENCE_SPEED = {
    heat: tuple(one["speed"] for one in flat("leviathan", "A.5") if one["T"] == heat)
    for heat in (0.0, 1.0)
}

#: Chen et al. 2023, table 1 (K = 4): task -> ms per token without and with speculation.
CHEN = {
    f"{plain['task']} {plain['law']}": (plain["ms/token"], fast["ms/token"])
    for plain in flat("chen", "1")
    for fast in flat("chen", "1")
    if (plain["method"], fast["method"]) == ("ArS", "SpS")
    and (plain["task"], plain["law"]) == (fast["task"], fast["law"])
}

#: Figure 1 prints no numbers.
CHEN_FIGURE = (
    "figure 1: XSum, nucleus: fastest at K = "
    f"{stated('chen', 'fastest draft length on XSum, figure 1'):.0f}; deviation and time of a loop "
    "grow with K, tokens per call / (K + 1) falls"
)
