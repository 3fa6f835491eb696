"""The published values: how many there are, what they must obey, and that a slip is seen."""

import copy
import sys
from collections import Counter
from pathlib import Path

import pytest

from outrider_lab.papers import published

FOLDER = Path(__file__).parents[2] / "tools" / "papers"


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import check
    import jeon

    yield check, jeon
    for name in ("check", "jeon", "chen", "wagner", "leviathan", "printed"):
        del sys.modules[name]


def test_every_table_is_there():
    """Counted in the papers: rows a table, less what the texts at hand have lost."""
    found = Counter((one["paper"], one["table"]) for one in published.rows())
    counts = {"1": 6, "2": 12, "3": 32, "4": 12, "5": 16, "A.5": 8}
    assert {t: found["leviathan", t] for t in counts} == counts
    counts = {"1": 12, "2": 7, "3": 6, "4": 9, "5": 16, "6": 16, "7": 30, "8": 36}
    assert {t: found["wagner", t] for t in counts} == counts
    assert found["chen", "1"] == 6
    trees = [found["jeon", str(table)] for table in range(1, 55)]
    assert all(31 <= rows <= 33 for rows in trees[:27])
    assert all(40 <= rows <= 41 for rows in trees[27:])
    assert sum(trees) == 27 * 33 + 27 * 41 - 29


def test_values_stand_in_their_rows():
    """One of each paper, looked up by hand."""
    assert published.flat("leviathan", "4")[8]["measured"] == 2.2
    assert published.flat("chen", "1")[-1]["score"] == 47.0
    eight = published.rows("wagner", "8")
    what = {"target": "Llama 2-7B", "method": "exact", "gamma": 10}
    (row,) = (one for one in eight if one["row"] == what)
    assert row["values"] == {"accepted, %": 56.2, "ms": 3.49}
    last = published.best_trees("budget", ("OPT 66B", "350M", "WMT"))[30]["RSD-S"]
    assert (last.tree, last.efficiency) == ("6x5", 1.489)


def test_jeons_rows_obey_their_law_and_agree_between_experiments(tools):
    _, jeon = tools
    assert jeon.sizes_fit(published.rows()) == []
    assert jeon.trees_agree(published.rows()) == []


def test_a_value_in_the_wrong_row_is_seen(tools):
    check, jeon = tools
    rows = copy.deepcopy(published.rows())
    table = [one for one in rows if (one["paper"], one["table"]) == ("jeon", "28")]
    table[2]["values"], table[3]["values"] = table[3]["values"], table[2]["values"]
    assert jeon.sizes_fit(rows)
    assert jeon.trees_agree(rows)
    assert len(check.differences(rows, published.rows())) == 2


def test_a_changed_or_missing_value_is_seen(tools):
    check, _ = tools
    rows = copy.deepcopy(published.rows())
    assert check.differences(rows, published.rows()) == []
    rows[0]["values"]["ms/token"] += 0.1
    del rows[1]
    assert len(check.differences(rows, published.rows())) == 2


def test_the_file_is_what_the_script_writes(tools):
    check, _ = tools
    assert check.written(published.rows()) == check.DATA.read_text(encoding="utf-8")
