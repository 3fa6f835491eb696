"""SmolLM2 with every other layer on a disk writes what it writes in memory, under drafts, too."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import SamplingParams, Stop

pytestmark = pytest.mark.real
LAYERS = 30


def test_texts_are_those_of_the_model_in_memory(smollm2, tmp_path):
    pytest.importorskip("accelerate")
    places = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    places |= {f"model.layers.{at}": ("cpu", "disk")[at % 2] for at in range(LAYERS)}
    how = {"dtype": torch.float32, "trust_remote_code": False}
    whole = AutoModelForCausalLM.from_pretrained(smollm2, **how)
    placed = AutoModelForCausalLM.from_pretrained(
        smollm2, device_map=places, offload_folder=str(tmp_path), **how
    )
    assert {parameter.device.type for parameter in placed.parameters()} == {"cpu", "meta"}
    prompt = outrider.load(smollm2, drafter="none").tokenizer("The capital of France is").input_ids
    ids = torch.tensor([prompt])
    wanted = whole.generate(ids, max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    for drafter in ("none", "recall"):
        speculator = outrider.load(placed, drafter=drafter)
        made = speculator.generate([prompt], SamplingParams(0), Stop(24, token_ids=()))
        assert list(made.completions[0].token_ids)[: len(wanted)] == wanted
