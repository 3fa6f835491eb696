"""Chen's table 1: rows, equivalence tests with their power, the memory's ceiling."""

import random
import statistics
from dataclasses import replace

import pytest
import tiny_gguf
from transformers import LlamaConfig
from typer.testing import CliRunner

from outrider.cli import app
from outrider_lab import bandwidth
from outrider_lab.equivalence import equivalence
from outrider_lab.papers import chen


def short(tasks):
    """The same tasks behind the last tokens of their prompts."""
    return [
        replace(task, prompts=[replace(one, ids=one.ids[-8:]) for one in task.prompts])
        for task in tasks
    ]


@pytest.fixture
def briefly(monkeypatch):
    """Memory is read for a moment: what is looked at is what is made of its speed."""
    monkeypatch.setattr(bandwidth, "_LEAST_S", 0.01)


@pytest.mark.exhaustive
def test_every_cell_of_the_table(shipped, briefly, tmp_path):
    pytest.importorskip("matplotlib")
    tasks = short(chen.code_tasks(shipped, 2))
    amount = chen.ChenAmount(2, 2, 6)
    said = []
    tables = chen.run(shipped, tasks, tmp_path, lambda *a: said.append(a), amount)
    assert (tmp_path / "chen.png").stat().st_size > 10_000
    rows = {(r["task"], r["law"], r["method"]): r for r in tables["table-1"]}
    assert len(rows) == 8
    for (task, law, method), row in rows.items():
        assert row["ms/token"] > 0
        assert row["prompts"] == 2
        assert row["of"] == ("parses" if task == "code" else "likeness")
        if method == "ArS":
            assert row["speed-up"] == 1
            assert row["tokens a call"] <= 1
        else:
            plain = rows[task, law, "ArS"]["ms/token"]
            assert row["speed-up"] == pytest.approx(plain / row["ms/token"])
            assert 1 <= row["tokens a call"] <= chen.K + 1
    greedy = [row for row in tables["scores"] if row["law"] == "greedy"]
    assert all(row["SpS - ArS"] == 0 for row in greedy)  # the same texts
    assert all(row["equal within 0.1"] == "fewer than 20 prompts" for row in tables["scores"])
    published = {(r["task"], r["law"]): r["published"] for r in tables["scores"]}
    assert published["continuation", "greedy"] == -0.001
    assert published["code", "nucleus"] == 0.019
    assert published["code", "greedy"] is None
    again = len((tmp_path / "chen.jsonl").read_text())
    chen.run(shipped, tasks, tmp_path, lambda *a: None, amount, False)
    assert len((tmp_path / "chen.jsonl").read_text()) == again


@pytest.mark.slow
def test_the_command_draws_and_names_the_paper(tmp_path):
    pytest.importorskip("matplotlib")
    words = ["bench", "chen", "--quick", "--count", "1", "--threads", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "Chinchilla 70B" in done.output
    assert "7.52" in done.output
    assert (tmp_path / "chen.png").stat().st_size > 10_000


def _decisions(shift: float, runs: int = 800, prompts: int = 25) -> list[str]:
    draw = random.Random(5)
    spread = 0.12
    return [
        equivalence([draw.gauss(shift, spread) for _ in range(prompts)], 0.05).verdict
        for _ in range(runs)
    ]


def test_what_differs_by_the_margin_is_called_equal_one_time_in_twenty():
    share = _decisions(0.05).count("equal") / 800
    assert 0.025 < share < 0.075
    assert _decisions(0.0).count("equal") / 800 > share + 0.2


def test_the_power_is_how_often_equal_arms_are_shown_to_be():
    draw = random.Random(9)
    tests = [equivalence([draw.gauss(0, 0.12) for _ in range(25)], 0.05) for _ in range(500)]
    seen = statistics.fmean(test.verdict == "equal" for test in tests)
    assert statistics.fmean(test.power for test in tests) == pytest.approx(seen, abs=0.06)
    assert seen < 0.7


def test_verdicts_at_the_edges():
    assert equivalence([0.5 + 0.01 * (i % 2) for i in range(30)], 0.1).verdict == "different"
    assert equivalence([0.1 * (-1) ** i + 0.05 for i in range(30)], 0.05).verdict == "open"
    same = equivalence([0.0] * 30, 0.01)
    assert (same.verdict, same.p, same.power) == ("equal", 0, 1)
    assert equivalence([0.2] * 30, 0.1).verdict == "different"
    for wrong in (lambda: equivalence([], 0.1), lambda: equivalence([1.0], 0.0)):
        with pytest.raises(ValueError, match=r"needs|positive"):
            wrong()


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_reads_every_weight_once(briefly, tmp_path, tied):
    """The embedding table is a look-up: of a tied pair it counts as the output layer alone."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    layers = 4 * 8 * 8 + 3 * 8 * 16 + 3 * 8
    found = bandwidth.ceiling(str(tmp_path), "bfloat16")
    assert found.bytes_a_token == 2 * (layers + 50 * 8)
    assert found.ms_per_token == 1e3 * found.bytes_a_token / found.bytes_a_second
    assert 1e8 < bandwidth.bandwidth(1 << 22) < 1e13


def test_a_token_reads_the_blocks_of_a_file(briefly, tmp_path):
    """Q8_0: 34 bytes for 32 weights; norms and biases in float32."""
    made = tiny_gguf.model(hidden_size=64, intermediate_size=96)
    model = tiny_gguf.write(tmp_path / "m.gguf", made, "Q8_0")
    weights = list(model.parameters())
    in_file = sum(w.numel() * (34 / 32 if w.dim() > 1 else 4) for w in weights)
    read = sum(w.numel() for w in weights) - model.get_input_embeddings().weight.numel()
    found = bandwidth.ceiling(str(tmp_path / "m.gguf"), "stored").bytes_a_token
    assert found == pytest.approx(in_file * read / sum(w.numel() for w in weights), abs=1)
