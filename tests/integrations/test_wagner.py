"""The paper's protocol runs on any pair, and its tables and pictures hold every method."""

import mmap

import pytest
import torch
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import ConfigurationError
from outrider_lab import profiling
from outrider_lab.baselines import Paper
from outrider_lab.bench.intervals import Interval
from outrider_lab.papers import wagner, wagner_pairs, wagner_pictures, wagner_tables
from outrider_lab.papers.score import ROUGE_1
from outrider_lab.papers.wagner_pairs import tiny_pair

METHODS = ["transformers", "paper exact", "paper sigmoid (lossy)", "outrider"]


@pytest.fixture(scope="module")
def found():
    pair = tiny_pair(40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wagner_tables, "LARGE", 60)
        return wagner_tables.run(pair, quick=True, gammas=(1, 3), prompts=2, tokens=6)


def test_every_table_has_every_method(found):
    settings, tables = found
    assert "constructed agreement" in settings["pair"]
    for name in ("methods", "profiled", "large"):
        assert [row["method"] for row in tables[name]] == METHODS
        assert all(row["calls"] > 0 and row["sum ms"] > 0 for row in tables[name])
    first, *others = tables["methods"]
    assert "sum less %" not in first
    for row in others:
        gain = 100 * (1 - row["sum ms"] / first["sum ms"])
        assert row["sum less %"] == pytest.approx(gain)
        assert all(row[f"{what} less 95 %"] for what in ("sum", "step", "wall"))
    assert {row["gamma"] for row in tables["gamma"]} == {1, 3, 5}
    assert {row["gamma"] for row in tables["memory"]} == {1, 3, 5}


def test_both_halves_of_the_sweep_of_bounds(found):
    """float16 ends at 65,504: at +-1e5 nothing is accepted, in float32 almost everything is."""
    rows = {row["method"]: row for row in found[1]["bounds"]}
    assert rows["sigmoid +-1e5, float16 (lossy)"]["accepted %"] == 0
    assert rows["sigmoid +-1e5, float32 (lossy)"]["accepted %"] > 90
    assert rows["sigmoid +-1e3, float16 (lossy)"]["accepted %"] > 50


def test_the_papers_tables_stand_beside(found):
    tables = found[1]
    assert len(tables["published-gamma"]) == 36
    assert len(tables["published-methods"]) == 8  # ROUGE-1: four pairs, two data sets
    assert all("WER" not in "".join(row) for row in tables["published-bounds"])
    speech = wagner_tables.theirs("WER")
    assert len(speech["published-methods"]) == 8
    assert {row["target"] for row in speech["published-bounds"]} == {"small.en", "large-v2"}


@pytest.mark.exhaustive
def test_a_picture_of_all_panels(found, tmp_path):
    pytest.importorskip("matplotlib")
    wagner_pictures.draw(*found, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"wagner.png", "wagner.svg"}


def test_gamma_is_the_first_steps_and_then_the_heuristics():
    """+2 after all were accepted, else -1; with a constant gamma it stays."""
    pair = tiny_pair(40)
    calls = wagner.WagnerCalls()
    with wagner.measured(Paper(), calls):
        wagner.generate(pair, 0, 40, 3, seed=0, heuristic=True)
    full = [taken == asked for taken, asked in zip(calls.accepted, calls.gammas, strict=True)]
    expected = [3]
    for taken in full[:-2]:  # the text's end cuts the last ones
        expected.append(expected[-1] + 2 if taken else max(1, expected[-1] - 1))
    assert calls.gammas[: len(expected)] == expected
    assert True in full
    assert False in full
    calls = wagner.WagnerCalls()
    with wagner.measured(Paper(), calls):
        wagner.generate(pair, 0, 40, 3, seed=0)
    assert set(calls.gammas[:-2]) == {3}


def test_half_precision_breaks_where_the_bounds_overflow():
    torch.manual_seed(0)
    target, draft = torch.randn(1, 3, 30), torch.randn(1, 2, 30)
    for bound, breaks in ((1e4, False), (1e5, True)):
        tau, rest, mass, _ = Paper(True, -bound, bound, True).tables(draft, target)
        assert tau.isfinite().all()
        assert bool((tau == 0).all()) is breaks
        assert breaks <= bool((mass == 0).all() and (rest == 0).all())
        whole, *_ = Paper(True, -bound, bound).tables(draft, target)
        assert (whole > 0.99).all()
    ids = torch.zeros(1, 2, dtype=torch.int64)
    broken = Paper(True, -1e5, 1e5, True)
    drawn = [int(broken(ids, draft, 2, target)[0][0, 0]) for _ in range(600)]
    counts = torch.tensor(drawn).bincount(minlength=30)
    assert ((counts - 20) ** 2 / 20).sum() < 70  # uniform, whatever the target says


def test_percent_less_than_the_baseline():
    row = wagner.less("step", Interval(0.5, 0.25, 1.5, 9))
    assert row == {"step less %": 50, "step less 95 %": "[-50.0, 75.0]"}


def test_the_profiler_sees_a_call_and_says_nothing(capfd):
    x = torch.randn(64, 4096)
    total, seconds = profiling.profiled(lambda: float(x.softmax(-1).sum()), x.device)
    assert total == pytest.approx(64)
    assert 0 < seconds < 5
    assert profiling.allocated(lambda: x + 1) == pytest.approx(64 * 4096 * 4e-6, rel=0.2)
    assert capfd.readouterr().err == ""


def test_the_peak_forgets_what_was_before_it():
    peak = profiling.Peak(torch.device("cpu"))
    before = peak.megabytes()
    if before is None:
        pytest.skip("this system does not tell")
    with mmap.mmap(-1, 120_000_000) as pages:  # a tensor may lie where one was that has gone
        for at in range(0, len(pages), mmap.PAGESIZE):
            pages[at] = 1
    assert peak.megabytes() > before + 80
    assert profiling.Peak(torch.device("cpu")).megabytes() < peak.megabytes() + 1


def test_the_function_is_put_back_after_an_error():
    from transformers.generation import utils

    before = utils._speculative_sampling
    try:
        with wagner.measured(lambda *a, **named: 1 / 0, wagner.WagnerCalls()):
            utils._speculative_sampling(None, None, 1, torch.zeros(1))
    except ZeroDivisionError:
        pass
    assert utils._speculative_sampling is before


@pytest.mark.parametrize("done", [False, True])
def test_a_version_that_tells_of_a_draft_s_end(monkeypatch, done):
    """Its fifth argument is no weight: the methods are asked for the law they stand for."""
    from transformers.generation import utils

    def earlier(
        candidate_input_ids, candidate_logits, candidate_length, new_logits, is_done_candidate,
        assistant_ensemble_weight=None,
    ):  # fmt: skip
        raise AssertionError

    def verify(ids, draft, length, target, assistant_ensemble_weight):
        assert assistant_ensemble_weight is None
        return torch.ones(1, length + 1, dtype=torch.int64), torch.tensor(length)

    monkeypatch.setattr(utils, "_speculative_sampling", earlier)
    calls = wagner.WagnerCalls()
    with wagner.measured(verify, calls):
        draft, target = torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)
        valid, n = utils._speculative_sampling(
            torch.zeros(1, 2, dtype=torch.int64), draft, 2, target, done,
            assistant_ensemble_weight=None,
        )  # fmt: skip
    assert (valid.shape[1], int(n)) == ((2, 1) if done else (3, 2))
    assert calls.accepted == [int(n)]


def test_a_draft_of_some_of_the_targets_layers():
    """Its law is that of the same weights with the layers taken out; the target keeps them."""
    big = tiny_pair(40).target
    config = type(big.config)(**{**big.config.to_dict(), "num_hidden_layers": 3})
    torch.manual_seed(1)
    big = type(big)(config).eval()
    small = wagner_pairs.without_layers(big, {1})
    ids = torch.tensor([[3, 1, 4]])
    middle = big.model.layers[1]
    with torch.no_grad():
        whole, cut = big(ids).logits, small(ids).logits
        middle.self_attn.o_proj.weight.zero_()
        middle.mlp.down_proj.weight.zero_()  # a layer that adds nothing is a layer left out
        assert torch.allclose(big(ids).logits, cut, atol=1e-5)
    assert not torch.allclose(whole, cut, atol=1e-3)
    for wrong in ({3}, {0, 1, 2}, set()):
        with pytest.raises(ConfigurationError, match="--skip"):
            wagner_pairs.without_layers(big, wrong)


@pytest.mark.exhaustive
def test_the_command_writes_what_a_report_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(wagner_tables, "QUICK_GAMMAS", (1,))
    monkeypatch.setattr(wagner_tables, "LARGE", 60)
    monkeypatch.setattr(wagner_pairs, "shipped_pair", lambda *a: tiny_pair(40))
    words = ["bench", "wagner", "--quick", "--count", "1", "--no-pictures", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "table 8" in done.output
    assert "paper sigmoid (lossy)" in done.output
    assert {"wagner.json", "wagner-methods.csv", "wagner-bounds.csv"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_texts_without_references_have_no_score(found):
    assert not any("ROUGE" in name for name in found[1]["methods"][0])


def test_rouge_counts_shared_words():
    assert ROUGE_1(["The Cat sat."], ["the cat sat"]) == 1  # rouge-score's own words
    assert ROUGE_1(["a a", "x"], ["a b", ""]) == 0.5  # what has no reference does not count
    assert ROUGE_1(["return a + b"], ["return a - b"]) == 1  # signs are no words
