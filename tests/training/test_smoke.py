"""The rehearsal of the whole recipe: its sizes fit, and (slow) it runs to the end."""

import re
from pathlib import Path

import pytest
from training.evaluate import CONTINUATION, PROMPT
from training.smoke import commands, main


def test_the_rehearsal_gives_every_step_the_context_it_needs():
    steps = {command.split()[0]: command for command in commands(Path("work"))}
    for name in ("train", "distill"):
        context = int(re.search(r"--context (\d+)", steps[name])[1])
        assert context >= PROMPT + CONTINUATION, name
    order = ["corpus", "tokenizer", "tokens", "train", "distill", "ngram", "export", "evaluate"]
    corrector = ["corrector", *(f"corrector.{name}" for name in ("export", "held_out", "evaluate"))]
    assert list(steps) == order + corrector


@pytest.mark.slow
def test_the_rehearsal_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["training.smoke", "--keep", str(tmp_path)])
    main()
    assert "the whole recipe ran in" in capfd.readouterr().out
    for name in ("draft", "corrector"):
        assert (tmp_path / "export" / name / "model.safetensors").exists()
