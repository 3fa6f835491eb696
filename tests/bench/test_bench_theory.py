"""`outrider bench theory`: formulas beside what is printed, and what runs say about them."""

import json

import numpy as np
import pytest
from test_experiments import _Letters, _Notes

from outrider import DraftModel, Engine, SamplingParams, Speculator
from outrider_lab.papers import alpha_tasks, beta, theory, tree_tables
from outrider_lab.theory import length
from tiny import pair

ROWS = [{"prompt": f"def f{i}(x, y):"} for i in range(24)]


@pytest.fixture(scope="module")
def speculator():
    target, small = pair(0.3)
    return Speculator(Engine(target, DraftModel(small, (1,))), _Letters(), (), _Notes())


def test_table_one_is_the_papers():
    rows = theory.table_one()
    assert len(rows) == 6
    for row in rows:
        assert row["operations"] == pytest.approx(row["published operations"], abs=0.006)
        assert row["speed"] == pytest.approx(row["published speed"], abs=0.006)


def test_figures_are_the_formulas():
    curves = theory.curves()
    row = curves["figure2"][40]
    assert row["alpha"] == 0.8
    assert row["gamma 5"] == pytest.approx(sum(0.8**i for i in range(6)))
    for row in curves["figure3"][::7]:
        best = max(range(60), key=lambda g, a=row["alpha"]: length.speedup(a, g, 0.1))
        assert length.speedup(row["alpha"], row["c 0.1"], 0.1) == pytest.approx(
            length.speedup(row["alpha"], best, 0.1)
        )
    assert all(row["operations, gamma 7"] >= 1 for row in curves["figure4"])


@pytest.mark.parametrize("gamma", [1, 3])
def test_recorded_greedy_texts_foretell_every_call(speculator, gamma):
    """At T = 0 nothing is left to chance: the engine's own calls, text by text."""
    tasks, law = alpha_tasks.tasks(speculator, ROWS[:4]), SamplingParams(0.0)
    size = {"new_tokens": 24, "seed": 0}
    model = speculator.engine.drafter.model
    kept = beta.recorded(speculator, tasks, model, law, **size)["kept"]
    made = theory.counted(speculator, tasks, gamma, law, **size)
    assert [beta.calls(text, gamma) for text in kept] == made["calls"]
    assert made["drafts"] == [gamma * calls for calls in made["calls"]]
    assert made["read"] == [(gamma + 1) * calls for calls in made["calls"]]
    assert min(made["calls"]) < 24  # something is accepted, so that this can fail
    others = kept[1:] + kept[:1]
    assert [beta.calls(text, gamma) for text in others] != made["calls"]


def test_recorded_drawn_texts_foretell_calls_on_average(speculator):
    """Of other texts of the same law, within their interval; betas agree with accepted shares."""
    tasks, law = alpha_tasks.tasks(speculator, ROWS[:12]), SamplingParams(1.0)
    model = speculator.engine.drafter.model
    found = beta.recorded(speculator, tasks, model, law, new_tokens=32, seed=0)
    made = theory.counted(speculator, tasks, 2, law, new_tokens=32, seed=900)
    foretold = beta.tokens_per_call(found["kept"], 2)
    measured = sum(made["tokens"]) / sum(made["calls"])
    assert foretold.low - 0.15 < measured < foretold.high + 0.15
    assert np.mean(found["beta"]) == pytest.approx(np.mean(found["kept"]), abs=0.04)


def test_sequences_that_hang_together_give_another_number_than_independent_ones():
    """Runs of sure places and of hopeless ones, alpha 0.5: gamma cuts what is sure short.

    Eight sure tokens take 1.6 calls of 5, eight hopeless ones 8: 16 tokens in 9, not 2 a call.
    """
    sticky = [([1.0] * 8 + [0.0] * 8) * 4] * 20
    assert beta.tokens_per_call(sticky, 4).value == pytest.approx(16 / 9)
    assert length.expected_tokens(0.5, 4) > 16 / 9 + 0.1
    assert beta.autocorrelation(sticky, 1).value > 0.5
    rng = np.random.default_rng(1)
    loose = [(rng.random(64) < 0.5).astype(float).tolist() for _ in range(40)]
    near = beta.autocorrelation(loose, 1)
    assert near.low < beta.independent(loose) < near.high
    assert beta.autocorrelation([[0.5] * 9] * 3, 2).value == 0
    assert beta.tokens_per_call(loose, 4).value == pytest.approx(
        length.expected_tokens(0.5, 4), abs=0.1
    )
    shares = [row["share"] for row in beta.distribution(loose)]
    assert sum(shares) == pytest.approx(1)
    assert shares[0] + shares[9] == pytest.approx(1)


def test_the_experiment_writes_tables_and_resumes(speculator, tmp_path, monkeypatch):
    monkeypatch.setattr(tree_tables, "size_ratio", lambda pair: 0.1)
    amount = theory.TheoryAmount(3, 16, (2,))
    tables = theory.run(speculator, ROWS, tmp_path, lambda *_: None, amount, False)
    assert json.loads((tmp_path / "theory.json").read_text())["tables"] == tables
    row = next(row for row in tables["calls"] if row["T"] == 0)
    assert row["by texts"] == pytest.approx(row["measured"])
    # every call reads gamma + 1 tokens and the draft one more than it drafts
    assert row["operations"] == pytest.approx((3 + 0.1 * 3) / row["measured"])
    assert row["memory reads"] == pytest.approx((1 + 0.1 * 2) / row["measured"])
    assert theory.run(speculator, ROWS, tmp_path, lambda *_: None, amount, False) == tables
