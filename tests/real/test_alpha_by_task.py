"""`bench alpha` by task on real models: chat, code and nothing of SmolLM2, speech of Whisper base.

The folders `smollm2`, `whisper-base` and `speech` of OUTRIDER_MODELS. Two minutes on one core.
"""

import json

import pytest
from typer.testing import CliRunner

from outrider_lab.papers import app

pytestmark = pytest.mark.real
SMALL = ("--quick", "--no-pictures", "--timed", "0", "--threads", "1")


def by_task(out, *words):
    done = CliRunner().invoke(app, ["alpha", *SMALL, "--out", str(out), *map(str, words)])
    assert done.exit_code == 0, done.output
    rows = json.loads((out / "alpha.json").read_text())["tables"]["tasks"]
    return {(row["task"], row["drafter"]): row for row in rows}


def test_smollm2_has_chat_code_and_text_from_nothing(smollm2, tmp_path):
    found = by_task(tmp_path, "--model", smollm2, "--dtype", "bfloat16")
    assert {task for task, _ in found} == {"chat", "code", "unconditional"}
    for task in ("chat", "code", "unconditional"):
        without = found[task, "target without layers 3, 4, 5"]["alpha T = 1"]
        assert without > 0.5 > found[task, "bigram"]["alpha T = 1"]


def test_speech_has_a_draft_that_was_made_for_it(whisper, speech, tmp_path):
    words = ("--model", whisper, "--draft-model", "whisper-base-draft", "--recordings", speech)
    found = by_task(tmp_path, *words, "--dtype", "float32")
    draft = found["speech", "draft model"]
    assert draft["alpha T = 0"] > draft["alpha T = 1"] > 0.4
    assert draft["prompts, T = 1"] >= 20
