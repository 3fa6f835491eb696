"""LoRA on SmolLM2-135M-Instruct: two adapters in one batch, and each merged alone by peft.

The folder `smollm2` of OUTRIDER_MODELS.
"""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import SamplingParams, Stop

pytestmark = pytest.mark.real

HOW = {"dtype": "float32", "device": "cpu", "threads": 1, "pack_weights": True}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXTS = ["def fibonacci(n):", "The capital of France is", "1, 2, 3, 4,", "Dear Sir or Madam,"]
NAMES = ["one", "two", None, "one"]
SIZE = 32


@pytest.fixture(scope="module")
def folders(smollm2, tmp_path_factory):
    """Two small adapters: random ones whose texts are not the base's."""
    found = {}
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        config = peft.LoraConfig(r=8, lora_alpha=4, target_modules=LAYERS, init_lora_weights=False)
        found[name] = tmp_path_factory.mktemp(name)
        peft.get_peft_model(base, config).save_pretrained(found[name])
    return found


def test_rows_write_what_pefts_merged_models_write(smollm2, folders):
    rows = outrider.load(smollm2, lora_modules=folders, drafter="recall", **HOW)
    prompts = [rows.tokenizer(text)["input_ids"] for text in TEXTS]
    stop = Stop(SIZE)
    found = rows.generate(prompts, SamplingParams(0), stop, lora_request=NAMES)
    texts = [one.token_ids for one in found.completions]
    for name in ("one", "two"):
        base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        merged = peft.PeftModel.from_pretrained(base, folders[name]).merge_and_unload()
        for prompt, text, own in zip(prompts, texts, NAMES, strict=True):
            if own == name:
                ids = torch.tensor([prompt])
                alone = merged.generate(ids, max_new_tokens=SIZE, do_sample=False)
                assert text == alone[0, len(prompt) :].tolist()
    bare = rows.generate(prompts, SamplingParams(0), stop)
    assert [a == b.token_ids for a, b in zip(texts, bare.completions, strict=True)] == [
        name is None for name in NAMES
    ]
