"""The first page of a report says of a table what it shows, and no more."""

from pathlib import Path

import pytest

from outrider_lab.book import findings, report
from outrider_lab.book.pages import Page
from outrider_lab.papers import theory, toy
from outrider_lab.papers.k_sweep import PANEL
from outrider_lab.papers.record import Store


def page(experiment, tables, **settings):
    document = {"experiment": experiment, "tables": tables, "settings": settings}
    return Page(experiment, document, [])


def verdicts(experiment, tables):
    return [one.verdict for one in findings.findings(page(experiment, tables))]


def swept(panel, ends="[1.20, 1.40]", runs=20):
    return {
        "k": [
            {"K": k, PANEL: value, "speed-up": 1 + k / 9, "speed-up 95 %": ends, "runs": runs}
            for k, value in enumerate(panel)
        ]
    }


@pytest.mark.parametrize(
    ("tables", "found"),
    [
        (swept([1, 0.9, 0.8]), ["shown", "shown"]),
        (swept([1, 0.8, 0.9]), ["missed", "shown"]),
        (swept([1, 0.9, 0.8], runs=19), ["shown", "open"]),
        (swept([1, 0.9, 0.8], "[0.90, 1.40]"), ["shown", "open"]),
        (swept([1, 0.9, 0.8], "[0.70, 0.90]"), ["shown", "missed"]),
        (swept([1, 0.9, 0.8], ""), ["shown", "open"]),
    ],
)
def test_what_a_sweep_shows(tables, found):
    assert verdicts("k-sweep", tables) == found


def test_equal_scores_are_shown_by_two_tests_alone():
    """Four prompts with no difference at all show nothing."""
    fast = {"task": "code", "law": "greedy", "method": "SpS", "speed-up": 1.3, "prompts": 24}
    score = {"task": "code", "law": "greedy", "score": "passes", "SpS - ArS": 0.0, "power": 1.0}
    for said, verdict in (
        ("equal", "shown"),
        ("different", "missed"),
        ("open", "open"),
        ("fewer than 20 prompts", "open"),
    ):
        tables = {
            "table-1": [fast | {"speed-up 95 %": "[1.10, 1.50]"}],
            "scores": [score | {"90 %": "[+0.000, +0.000]", "equal within 0.1": said}],
        }
        assert verdicts("chen", tables) == ["shown", verdict]


def test_a_sign_is_the_papers_or_missed():
    row = {"group": 6, "difference": "a - b", "block efficiency": 0.2, "95 %": "[+0.1, +0.3]"}
    best = {"group": 6, "method": "SD", "tree": "6", "block efficiency": 2.0, "tau 95 %": ""}
    for sign, published, verdict in (
        ("+", 0.3, "shown"),
        ("+", -0.3, "missed"),
        ("-", -0.3, "shown"),
        ("open", 0.3, "open"),
        ("fewer than 20 prompts", 0.3, "open"),
    ):
        differences = [row | {"sign": sign, "published": published}]
        found = verdicts("budget", {"methods": [best], "differences": differences})
        assert found == ["told", verdict]
    silent = [row | {"sign": "+", "published": None}]
    assert verdicts("budget", {"methods": [best], "differences": silent}) == ["told"]


def test_formulas_are_no_models_and_others_are(tmp_path):
    calls = [{"T": 1, "gamma": 4, "tokens/call, i.i.d.": 3.1, "by texts": 2.9, "measured": 2.8}]
    tables = {"table1": theory.table_one(), "calls": [calls[0] | {"95 %": "[2.60, 3.00]"}]}
    first, second = findings.findings(page("theory", tables, target="/a/small"))
    assert (first.verdict, first.text[-7:]) == ("told", "(small)")
    assert (second.verdict, second.text[-7:]) == ("shown", "printed")
    tables["table1"][0]["speed"] += 0.01
    tables["calls"][0]["by texts"] = 3.1
    assert verdicts("theory", tables) == ["missed", "missed"]
    means = toy.run(tmp_path, 11, False)
    assert verdicts("toy", {"means": means}) == ["shown"]


def test_tables_of_another_version_say_so():
    tables = swept([1, 0.9])
    del tables["k"][1]["runs"]
    (only,) = findings.findings(page("k-sweep", tables))
    assert (only.verdict, only.text.split(":")[0]) == (
        "open",
        "k-sweep is of another version, without 'runs'",
    )


def test_every_experiment_with_sentences_is_in_a_part():
    known = {name for part in findings.PARTS for name in part.experiments}
    assert set(findings.MAKERS) <= known


def test_the_first_page_says_what_is_missed(tmp_path):
    Store(tmp_path / "k-sweep", "k-sweep", {"target": "shipped"}).write(swept([1, 0.8, 0.9]))
    text = report.render(tmp_path)
    assert text.index("<h2>Missed</h2>") < text.index("Chen et al. 2023")
    assert "1 statement is shown, 1 is missed, 0 stay open" in " ".join(text.split())
    assert text.count("falls from 1") == 3  # missed, the paper's main result, its section
    Store(tmp_path / "k-sweep", "k-sweep", {"target": "shipped"}).write(swept([1, 0.9, 0.8]))
    assert "<h2>Missed</h2>" not in report.render(Path(tmp_path))
