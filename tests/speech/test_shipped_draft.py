"""The shipped draft of Whisper base: what its folder holds, and that it is found by name."""

import json

import pytest
import torch
import whispers
from safetensors.torch import load_file

import outrider
from outrider.errors import ConfigurationError
from outrider.shipped import shipped

FIRST_TIME, END, VOCABULARY = 50_364, 50_257, 51_865


def test_the_folder_holds_two_layers_and_the_ids():
    folder = shipped("whisper-base-draft")
    described = json.loads((folder / "draft.json").read_text())
    assert described["of"] == "openai/whisper-base"
    assert described["layers"] == [0, 5]
    assert described["draft_dtype"] == "int8"
    parts = load_file(folder / "draft.safetensors")
    ids = parts.pop("ids")
    assert (ids.diff() > 0).all()
    assert {END, *range(FIRST_TIME, VOCABULARY)} <= set(ids.tolist())
    assert sum(part.numel() for part in parts.values()) == 8_407_040
    assert {part.dtype for part in parts.values()} == {torch.bfloat16}
    assert (folder / "draft.safetensors").stat().st_size < 20e6
    assert "OpenAI" in (folder / "LICENSE-MIT.txt").read_text()
    assert "No recording of a person" in (folder / "MODEL_CARD.md").read_text()


def test_it_is_known_by_name_and_refuses_another_target():
    deep = whispers.whisper(layers=6)
    with pytest.raises(ConfigurationError, match=r"made of layer 5 of .*has 2 layers"):
        outrider.load(whispers.whisper(), draft="whisper-base-draft", dtype="float32", threads=1)
    with pytest.raises(ConfigurationError, match="whisper-base-draft proposes tokens"):
        outrider.load(deep, draft="whisper-base-draft", dtype="float32", threads=1)
    with pytest.raises(ConfigurationError, match="no local folder"):
        outrider.load(deep, draft="whisper-base-drafts", dtype="float32", threads=1)
