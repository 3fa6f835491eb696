"""alpha by task: chat, code, nothing, recordings; with and without times."""

import copy
import wave
from pathlib import Path

import pytest
import torch
from test_experiments import _Letters, _Notes

from outrider import DraftModel, Engine, Root, Speculator
from outrider.errors import ConfigurationError
from outrider_lab.papers import alpha, alpha_drafters, alpha_tasks, options
from tiny import VOCAB, pair


class _Begun(_Letters):
    bos_token_id, chat_template = 1, None


def recording(path: Path, seconds: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", ""))
        out.writeframes(bytes(2 * int(8000 * seconds)))
    return path


def test_a_chat_model_is_asked_the_shipped_prompts_in_its_template(shipped):
    rows = alpha_tasks.usual_rows(shipped)
    assert {row["category"] for row in rows} == {"code"}
    chat = copy.copy(shipped)
    chat.tokenizer = copy.copy(shipped.tokenizer)
    chat.tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %} [you]"
    rows = alpha_tasks.usual_rows(chat)
    assert len(rows) == 120
    assert sum(row["category"] == "code" for row in rows) == 20
    asked = alpha_tasks.tasks(chat, rows[:1])[0]
    assert chat.tokenizer.decode(asked.prompt) == f"[{rows[0]['said']}] [you]"
    (begun, other) = alpha_tasks.unasked(chat, 2)
    assert list(begun.prompt) == list(other.prompt) == [shipped.tokenizer.bos_token_id]


def test_unconditional_text_is_a_task_and_times_may_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(alpha_drafters, "library_tokens", lambda *_: torch.arange(600) * 7 % VOCAB)
    monkeypatch.setattr(alpha_drafters, "ORDERS", {"bigram": 2})
    monkeypatch.setattr(alpha_drafters, "_layers", lambda source: None)
    target, small = pair(0.3)
    rows = [{"prompt": f"def f{n}(x):", "category": "code"} for n in range(3)]
    for drafter in (DraftModel(small, (1,)), Root()):
        speculator = Speculator(Engine(target, drafter), _Begun(), (), _Notes())
        amount = alpha.AlphaAmount(40, 600, 0, 1, 4, 16, 3, 5)
        out = tmp_path / drafter.name
        tables = alpha.run(speculator, rows, out, lambda *_: None, amount, False)
        assert not {"speed", "lenience-speed"} & set(tables)
        found = {row["task"]: row for row in tables["tasks"]}
        assert set(found) == {"code", "unconditional"}
        assert found["code"]["prompts, T = 0"] == 3
        assert found["unconditional"]["prompts, T = 1"] == 5
        assert "alpha T = 0" not in found["unconditional"]


def test_the_longest_recordings_that_fit_a_window_are_taken(tmp_path):
    with pytest.raises(ConfigurationError, match="no recording of 30 s or less among 0"):
        alpha_tasks.recorded_rows(tmp_path, "en", 2)
    for name, seconds in {"a": 0.1, "below/b": 0.3, "c": 0.2, "long": 31}.items():
        recording(tmp_path / f"{name}.wav", seconds)
    rows = alpha_tasks.recorded_rows(tmp_path, "en", 2)
    assert [Path(row["recording"]).stem for row in rows] == ["b", "c"]
    assert {row["category"] for row in rows} == {"speech"}


def test_recordings_go_with_a_target_and_without_prompts(tmp_path):
    for asked in (options.PaperRequest(), options.PaperRequest(target="x", prompts=tmp_path)):
        with pytest.raises(ConfigurationError, match="--recordings go with a Whisper --model"):
            options.alpha_rows(asked, tmp_path, "en", 2)
    recording(tmp_path / "a.wav", 0.1)
    asked = options.PaperRequest(target="x")
    assert len(options.alpha_rows(asked, tmp_path, "en", 2)) == 1
    assert options.alpha_rows(asked, None, "en", 2) is None  # the model itself says
