"""Targets that torch.compile has made code for: their own forwards run, and it stays theirs."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import outrider
from outrider import SamplingParams, Stop
from outrider.models import row_padding
from outrider.models.model_lock import uncompiled

LOAD = {"drafter": "recall", "dtype": "float32", "threads": 1, "pack_weights": False}
LOAD |= {"num_speculative_tokens": 4}  # of a fixed length: a planner may dare nothing here
PROMPT = [7, 8, 9, 10, 11] * 5
SIZES = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def compiled(how):
    """A model of which something was compiled, and how many graphs were."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", **SIZES)
    model = AutoModelForCausalLM.from_config(config).eval()
    calls = []

    def backend(graph, inputs):
        calls.append(0)
        return graph.forward

    if how == "torch.compile(model)":
        return torch.compile(model, backend=backend), calls
    if how == "model.compile()":
        model.compile(backend=backend)
    elif how == "layers":
        for layer in model.transformer.h:
            layer.compile(backend=backend)
    else:
        model.forward = torch.compile(model.forward, backend=backend)
    return model, calls


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "how", ["torch.compile(model)", "model.compile()", "model.forward", "layers"]
)
def test_nothing_is_compiled_for_a_tree(how):
    given, calls = compiled(how)
    speculator = outrider.load(given, **LOAD)
    told = speculator.generate([PROMPT], SamplingParams(0.0), Stop(24))
    assert calls == []
    assert (how == "torch.compile(model)") == (
        "not as torch.compile made it" not in speculator.notes.means
    )
    assert told.stats.accepted > 0
    with torch.inference_mode():
        text = list(PROMPT)
        for _ in range(24):
            text.append(int(given(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    assert calls, "the user's own calls run what was compiled"
    assert told.completions[0].token_ids == text[len(PROMPT) :]


def test_what_is_not_compiled_is_as_it_was():
    model = torch.nn.Linear(2, 2)
    assert uncompiled(model) is model
    assert uncompiled(torch.compile(model)) is model


@torch.inference_mode()
def test_a_program_compiles_other_models_in_one_piece():
    """Torch's attention is ours by name, and a tracer takes it as its own."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("gemma3_text", **sizes, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    whole = torch.compile(model, fullgraph=True, backend="eager")
    ids = torch.tensor([PROMPT])
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is row_padding.attend
    assert torch.equal(whole(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
