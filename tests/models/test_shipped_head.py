"""The shipped head of SmolLM2-135M-Instruct: what its folder holds, and that it has a name."""

import json

import pytest
import torch
from safetensors.torch import load_file

import outrider
from outrider.errors import ConfigurationError
from outrider.shipped import shipped
from tiny import llama


def test_the_folder_holds_an_eagle_head_of_some_tokens():
    folder = shipped("smollm2-head")
    described = json.loads((folder / "config.json").read_text())
    assert described["speculators_model_type"] == "eagle3"
    assert described["draft_dtype"] == "int8"
    verifier = described["speculators_config"]["verifier"]["name_or_path"]
    assert verifier == "HuggingFaceTB/SmolLM2-135M-Instruct"
    parts = load_file(folder / "model.safetensors")
    ids = parts.pop("d2t") + torch.arange(described["draft_vocab_size"])
    assert (ids.diff() > 0).all()
    assert torch.equal(parts.pop("t2d").nonzero()[:, 0], ids)
    assert {part.dtype for part in parts.values()} == {torch.bfloat16}
    assert not {"lm_head.weight", "embed_tokens.weight"} & set(parts)  # lent by the target
    assert (folder / "model.safetensors").stat().st_size < 16e6
    card = (folder / "MODEL_CARD.md").read_text()
    assert "Apache-2.0" in card
    assert "held-out" in card


def test_it_is_known_by_name_and_refuses_another_target():
    with pytest.raises(ConfigurationError, match="smollm2-head"):
        outrider.load(llama(), draft="smollm2-head", dtype="float32", threads=1)
    with pytest.raises(ConfigurationError, match="no local folder"):
        outrider.load(llama(), draft="smollm2-heads", dtype="float32", threads=1)
