"""Jeon et al. 2024 (RSD), C.5, from a text whose tables are Markdown with broken rows."""

import re
from collections.abc import Iterator, Sequence

from printed import Row, row, stated

LENGTHS: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    2: (("2x2", "3x2"), ("2-1", "2-2", "3-1")),
    3: (("3x3", "4x3"), ("2-2-2", "3-1-1", "4-1-1")),
    4: (("5x4", "7x4"), ("2-2-2-2", "5-1-1-1", "7-1-1-1")),
    5: (("6x5", "12x5"), ("2-2-2-2-2", "6-1-1-1-1", "12-1-1-1-1")),
}
BUDGETS: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    6: (("2x3", "3x2"), ("2-1-1", "2-2", "3-1")),
    10: (("2x5", "5x2"), ("2-1-1-1-1", "2-2-1", "5-1")),
    14: (("2x7", "7x2"), ("2-1-1-1-1-1-1", "2-2-2", "7-1")),
    21: (("3x7", "7x3"), ("3-1-1-1-1-1-1", "3-2-2", "7-1-1")),
    30: (("5x6", "6x5"), ("2-2-2-2", "5-1-1-1-1-1", "6-1-1-1-1")),
}
COLUMNS = {"Eff.": "block efficiency", "MBSU": "MBSU", "TR": "tokens/s", "Acc.": "score"}

#: table -> column -> rows whose cells stand in this order in the copy, not in C.3's. Told by MBSU =
#: efficiency / (L r + 1), by the same tree in the table of the other experiment, or by both; what
#: neither tells ("Acc." of table 5, "TR" and "Acc." of table 13) is as the copy has it.
_LAST = ("RSD-S 6x5", "RSD-S 12x5", "RSD-C 12-1-1-1-1")
_TWOS = ("RSD-C 6-1-1-1-1", "RSD-C 2-2-2-2-2")
ORDER: dict[int, dict[str, tuple[str, ...]]] = {
    3: {"Eff.": _LAST, "MBSU": _LAST, "TR": _LAST, "Acc.": (_LAST[2], _LAST[1], _LAST[0])},
    4: {"Eff.": _LAST, "MBSU": _LAST, "TR": _LAST, "Acc.": _LAST},
    5: {
        "Eff.": _LAST,
        "MBSU": _LAST,
        "TR": (_LAST[2], _LAST[1], _LAST[0]),
        "Acc.": (_LAST[2], _LAST[1], _LAST[0]),
    },
    7: {"MBSU": _TWOS, "TR": _TWOS},
    8: {"MBSU": _TWOS},
    13: {"Eff.": ("RSD-S 12x5", "RSD-S 6x5")},
    54: {"Eff.": ("RSD-C 7-1-1", "RSD-C 3-2-2")},
}
#: table -> rows that are cut off in the copy; without an entry only the last rows can be
CUT = {13: "RSD-C 12-1-1-1-1"}


def jeon(text: str) -> Iterator[Row]:
    """Tables 1 to 54 of C.5: columns are read downwards, since cells of wrapped rows ran together.

    The order of rows is that of C.3; the copy ends some tables early: last rows are missing.
    """
    parts = re.split(r"(?m)^Table (\d+)\. ", text)
    for number, body in zip(map(int, parts[1::2]), parts[2::2], strict=True):
        found = re.search(r"results with (.+?) target and (\w+) draft for the (\w+) task", body)
        assert found is not None, f"table {number} has no caption"
        target, draft, task = found.groups()
        lines = [line.strip().strip("|") for line in body.split("\n") if line.startswith("|")]
        head, _, *body_cells = ([cell.strip() for cell in line.split("|")] for line in lines)
        columns = {
            name: [part for line in body_cells for part in line[head.index(name)].split()]
            for name in COLUMNS
        }
        by_length = number <= 27
        kind = "length" if by_length else "budget"
        keys = list(_frame(LENGTHS if by_length else BUDGETS))
        keys = [key for key in keys if f"{key[1]} {key[2]}" != CUT.get(number)]
        names = [f"{method} {tree}" for _, method, tree in keys]
        moved = {name for order in ORDER.get(number, {}).values() for name in order}
        for column, order in ORDER.get(number, {}).items():
            at = [names.index(name) for name in order]
            cells = [columns[column][i] for i in sorted(at)]
            for i, cell in zip(at, cells, strict=True):
                columns[column][i] = cell
        if len({len(column) for column in columns.values()}) > 1:
            raise ValueError(f"the columns of Jeon's table {number} differ in length")
        for i, (group, method, tree) in enumerate(keys[: len(columns["TR"])]):
            what = {"target": target, "draft": draft, "task": task, kind: group}
            what |= {"method": method, "tree": tree}
            printed = {long: columns[name][i] for name, long in COLUMNS.items()}
            values = {name: None if v == "-" else float(v) for name, v in printed.items()}
            made = row("jeon", str(number), what, values)
            if names[i] in moved:
                made["note"] = "cells of this row stood in another order in the copy read"
            yield made
    yield from stated(
        "jeon",
        text,
        [
            ("figure 1: recursive rejection accepts", "%", r"rejection sampling achieves (\d+)%"),
            ("temperature of XSum and WMT", "T", r"We use temperature ([\d.]+) for both XSum"),
            ("temperature of Dolly", "T", r"for both XSum and WMT and ([\d.]+) for Dolly"),
        ],
    )


def _frame(
    groups: dict[int, tuple[tuple[str, ...], tuple[str, ...]]],
) -> Iterator[tuple[int, str, str]]:
    """(group, method, tree) of every row of a table of C.5."""
    yield (0, "plain", "")
    for group, (paths, trees) in groups.items():
        yield (group, "SD", str(group))
        yield from ((group, "SpecTr", tree) for tree in paths)
        yield from ((group, "RSD-C", tree) for tree in trees)
        yield from ((group, "RSD-S", tree) for tree in paths)


def depth(method: str, tree: str) -> int:
    """Levels of one of Jeon's trees.

    >>> depth("SD", "6"), depth("SpecTr", "3x2"), depth("RSD-C", "2-1-1")
    (6, 2, 3)
    """
    if method == "SD":
        return int(tree)
    return int(tree.split("x")[1]) if "x" in tree else len(tree.split("-"))


def sizes_fit(rows: Sequence[Row]) -> list[str]:
    """Rows whose MBSU is not efficiency / (L r + 1) for the table's own r, to the last digit."""
    wrong = []
    tables: dict[str, list[Row]] = {}
    for one in rows:
        if one["paper"] == "jeon" and one["row"].get("tree"):
            tables.setdefault(one["table"], []).append(one)
    for table, group in tables.items():
        half = 0.00051  # of the last digit, and what float adds
        low, high = 0.0, 1.0  # r that every row allows
        for one in group:
            levels = depth(one["row"]["method"], one["row"]["tree"])
            tau, fast = one["values"]["block efficiency"], one["values"]["MBSU"]
            low = max(low, ((tau - half) / (fast + half) - 1) / levels)
            high = min(high, ((tau + half) / (fast - half) - 1) / levels)
            if low > high:
                wrong.append(f"table {table}: {one['row']} does not fit the rows above it")
                break
    return wrong


def trees_agree(rows: Sequence[Row]) -> list[str]:
    """Trees that stand in both experiments of C.5 with other efficiencies."""
    seen: dict[tuple[str, ...], Row] = {}
    wrong = []
    for one in rows:
        if one["paper"] != "jeon" or one["row"].get("method") in (None, "plain", "SD"):
            continue
        parts = ("target", "draft", "task", "method", "tree")
        key = tuple(one["row"][part] for part in parts)
        other = seen.setdefault(key, one)
        for name in ("block efficiency", "MBSU", "score"):
            if one["values"].get(name) != other["values"].get(name):
                wrong.append(f"{name} of {key} differs: tables {other['table']}, {one['table']}")
    return wrong
