"""What benches print is the papers' quantity, by the papers' laws, and readable."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from test_experiments import _Letters, _Notes, _tiny_pair
from typer.testing import CliRunner

from outrider import DraftModel, Engine, SamplingParams, Speculator, Stop
from outrider.cli import console
from outrider.engine.outputs import StepOutput, Trace
from outrider_lab import drawing, timeline
from outrider_lab.papers import (
    alpha,
    alpha_measure,
    alpha_tasks,
    app,
    k_sweep,
    score,
    theory,
    toy,
    tree_runs,
    tree_tables,
)
from outrider_lab.papers.alpha_drafters import AlphaSource
from outrider_lab.quiet import quiet_profiler
from tiny import pair

ROWS = [{"prompt": f"def f{i}(x):"} for i in range(3)]


def nothing(*_):
    pass


def test_the_panel_of_chens_figure_begins_at_one_and_falls(tmp_path):
    tables = k_sweep.run(
        _tiny_pair(), ROWS[:2], tmp_path, nothing, new_tokens=16, repeats=1, pictures=False
    )
    panel = [row[k_sweep.PANEL] for row in tables["k"]]
    assert panel[0] == 1
    assert len(panel) == 8
    assert all(after < before for before, after in pairwise(panel))
    assert all(row["sign"] == "fewer than 20 prompts" for row in tables["k"][1:])


def test_a_nucleus_reaches_the_texts(tmp_path):
    """Another top-p, other runs; the same one, the same: in sweeps, trees and alpha."""
    speculator = _tiny_pair()

    def swept(top_p):
        how = {"new_tokens": 16, "repeats": 1, "most": 1, "pictures": False, "top_p": top_p}
        k_sweep.run(speculator, ROWS, tmp_path / str(top_p), nothing, **how)
        lines = (tmp_path / str(top_p) / "k-sweep.jsonl").read_text().splitlines()
        return [(row["key"], row["steps"], row["accepted"]) for row in map(json.loads, lines)]

    assert swept(0.3) != swept(1.0)
    plan = tree_runs.TreePlan(new_tokens=16, temperature=1.0)
    chain = speculator.using(DraftModel(speculator.engine.drafter.model, (1, 1)))
    found = [
        tree_runs.decode(chain, ROWS, replace(plan, top_p=top_p), 0)["accepted"]
        for top_p in (1.0, 0.3, 0.3)
    ]
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize("name", ["k-sweep", "draft-length", "budget", "alpha"])
def test_top_p_is_an_option(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
    assert "--top-p" in shown


def test_jeons_experiments_are_at_the_papers_temperature():
    assert tree_runs.TreePlan().temperature == 0.3
    shown = CliRunner().invoke(app, ["budget", "--help"], env={"COLUMNS": "200"}).output
    assert "0.3" in next(line for line in shown.splitlines() if "--temperature" in line)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha_has_the_tokens_it_claims(temperature):
    """Greedy texts of each prompt go on as long as it takes: no text is read twice."""
    target, small = pair(0.3)
    speculator = Speculator(Engine(target, DraftModel(small, (1,))), _Letters(), (), _Notes())
    tasks = alpha_tasks.tasks(speculator, ROWS)
    how = {"tokens": 400, "new_tokens": 24, "seed": 3}
    found = alpha_measure.alphas(
        speculator, tasks, {"draft": AlphaSource(small)}, temperature, **how
    )
    assert found["tokens"] >= 400
    assert sum(found["tallies"]["draft"]["places"]) == found["tokens"]
    shown = alpha_measure.alpha_of(found["tallies"]["draft"])
    assert 0 <= shown.low <= shown.value <= shown.high <= 1


def test_scores_are_the_libraries_and_have_intervals():
    assert score.ROUGE_1(["The Cat sat."], ["the cat sat"]) == 1
    assert score.ROUGE_2(["a b c"], ["a b d"]) == 0.5
    assert score.BLEU(["a b c d e"], ["a b c d e"]) == pytest.approx(100)
    texts = ["a b c d e", "a b c d x", "f g h i"]
    meant = ["a b c d e", "a b c d e", "f g i h"]
    for kind in (score.ROUGE_1, score.BLEU, score.word_errors("en")):
        found = kind.interval(texts, meant)
        assert found.value == pytest.approx(kind(texts, meant))
        assert found.low < found.value < found.high
        assert found.prompts == 3


def test_a_trace_is_a_line_a_step():
    """As in Leviathan's figure 1, whatever line breaks the tokens have."""
    words = {1: "def", 2: "\n", 3: " x", 4: "\n\n"}
    trace = Trace([2, 3], [0, 1], [1], next_is_bonus=False)
    block = StepOutput(0, [2, 4], 1, None, 2, trace)
    shown = console.line(block, words.get, False).plain
    assert "\n" not in shown
    assert shown == "\\n[- x-]{+\\n\\n+}"


def test_a_timeline_has_every_call(tmp_path):
    """gamma calls of the draft ahead of each of the target's; standard decoding: none."""
    speculator = _tiny_pair().using(DraftModel(_tiny_pair().engine.drafter.model, (1,) * 3))

    def run(one):
        return one.generate([3, 1, 4, 1], SamplingParams(1.0, seed=2), Stop(12, token_ids=()))

    drafted, plain = timeline.lines(speculator, run)
    steps = run(speculator).stats.engine_steps
    kinds = [kind for kind, _ in drafted.calls]
    assert kinds.count("target") == steps + 1  # the prompt is a call
    assert kinds.count("draft") >= 3 * steps
    assert {kind for kind, _ in plain.calls} == {"target"}
    assert len(plain.calls) >= plain.tokens == drafted.tokens == 12
    for one, other in pairwise(drafted.calls):
        assert one[1].end <= other[1].start
    timeline.draw([drafted, plain], tmp_path / "figure5.svg")
    assert (tmp_path / "figure5.svg").read_text().count("standard decoding") >= 1


def _figures(tmp_path):
    """The pictures of the lab, from numbers of as many methods as there are."""
    names = ["mean s", "deviation s", "P90 s", "P99 s", k_sweep.PANEL, "ms per loop"]
    ends = dict.fromkeys([f"{k_sweep.PANEL} 95 %", "ms per loop 95 %"], "[0.900, 1.100]")
    k_sweep._draw([{"K": k} | dict.fromkeys(names, 1.0) | ends for k in range(8)], tmp_path)
    ours = [f"target, every {n}. layer" for n in range(7)]
    lenient = [
        {"drafter": n, "T": t} | dict.fromkeys(alpha.LEVELS, 0.5) for n in ours for t in (0.0, 1.0)
    ]
    speed = [{"drafter": n, "expected": 1.0, "measured": 2.0} for n in ours]
    alpha._draw({"speed": speed + alpha.published_speed(), "lenience": lenient}, ours, tmp_path)
    tasks = [{"task": task, "drafter": name, "alpha T = 1": 0.5, "95 %, T = 1": "[0.400, 0.600]"}
             for task in ("chat", "code", "unconditional") for name in ours]  # fmt: skip
    alpha._draw({"tasks": tasks, "lenience": lenient}, ours, tmp_path)
    values = dict.fromkeys(["block efficiency", "MBSU", "rate", "parses"], 1.0)
    methods = ["SD", "block", "RSD-S + traversal", "RSD-C + traversal", "hub + traversal"]
    rows = [{"group": g, "method": m} | values for m in methods for g in (6, 10)]
    tree_tables.draw("budget", {"methods": rows, "published": []}, tmp_path)


def _theory(tmp_path):
    names = ("tokens/call, i.i.d.", "by betas", "by texts", "measured")
    lags = [
        {"T": t, "lag": n, "autocorrelation": 0.1, "95 %": ""} for t in (0.0, 1.0) for n in (1, 2)
    ]
    runs = {"beta": [{"share": 0.1}] * 10, "lags": lags, "calls": [dict.fromkeys(names, 2.0)]}
    theory.draw(theory.curves() | runs, tmp_path)


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (_figures, 4),
        pytest.param(_theory, 1, marks=pytest.mark.slow),
        pytest.param(lambda path: toy.run(path, 5, True), 1, marks=pytest.mark.slow),
    ],
)
def test_titles_and_legends_do_not_overlap(made, count, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(drawing, "save", lambda figure, *_: figures.append(figure))
    made(tmp_path)
    assert len(figures) == count
    for figure in figures:
        figure.canvas.draw()
        boxes = [axis.title.get_window_extent() for axis in figure.axes if axis.get_title()]
        boxes += [axis.get_window_extent() for axis in figure.axes]
        legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
        boxes += [one.get_window_extent() for one in legends if one]
        for one, other in combinations(boxes, 2):
            assert not one.padded(-1).overlaps(other.padded(-1)), figure.axes[0].get_title()
        drawing.pyplot().close(figure)


def test_a_profilers_chatter_stays_inside(capfd):
    with quiet_profiler():
        os.write(2, b"USDT:2026-11-23 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\n")
        os.write(2, b"something went wrong\n")
    assert capfd.readouterr().err == "something went wrong\n"


@pytest.mark.slow
def test_bench_wagners_memory_says_nothing_on_stderr():
    code = (
        "from outrider_lab.papers import wagner; "
        "print(wagner.allocated(wagner.methods()['transformers'][0], 5, 64, 'cpu') > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert "rofiler" not in done.stderr


def test_alpha_by_task_is_that_of_its_prompts():
    tally = {
        "prompts": [0, 1, 3],
        "kept": [[n / 4] * 4 for n in (4, 8, 20)],
        "places": [10, 10, 10],
    }
    found = {t: {"tallies": {"draft": tally}} for t in (0.0, 1.0)}
    rows = [{"prompt": "", "category": name} for name in ("code", "chat", "chat", "chat")]
    code, chat = alpha._tasks(found, rows)
    assert (code["task"], code["alpha T = 1"], code["prompts, T = 1"]) == ("code", 0.1, 1)
    assert chat["alpha T = 0"] == pytest.approx((2 + 5) / 20)
    assert alpha._tasks(found, [{"prompt": ""}]) == []
