"""Packed weights of models' own forwards: the same scores, and models left as they are."""

import pytest
import torch
from families import FAMILIES, build

import outrider
from outrider import ConfigurationError, SamplingParams, Stop
from outrider.models import adapt, linear
from outrider.models.linear import can_pack
from outrider.models.prefill import causal

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch packs no weights")


def scores(model, packed):
    driven = adapt(model, packed=packed)
    nodes = causal(torch.arange(12)[None] % 7, torch.arange(12)[None], 128)
    with torch.inference_mode():
        return driven, driven.forward(driven.open(1, 128), nodes).logits_BQV


@pytest.mark.parametrize("name", ["Qwen2 (window)", "GPT-2", "Gemma 2"])
def test_scores_are_those_of_the_weights_as_they_lie(name):
    model = build(FAMILIES[name]())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    _, expected = scores(model, packed=False)
    driven, found = scores(model, packed=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert driven.runner.packed
    assert driven.runner.means.endswith("its linear layers packed")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any("forward" in vars(part) for part in model.modules())
    theirs = {id(tensor) for tensor in model.parameters()}
    assert {id(tensor) for tensor in driven.runner.model.parameters()} == theirs


def test_load_packs_what_it_is_told_to():
    model = build(FAMILIES["Qwen2"]()).eval()
    about = {"drafter": "prompt_lookup", "threads": 1}
    packed = outrider.load(model, pack_weights=True, **about)
    loose = outrider.load(model, pack_weights=False, **about)
    assert (packed.notes.packed, loose.notes.packed) == (True, False)
    ends = SamplingParams(0), Stop(12, token_ids=())
    found = packed.generate([[5, 6, 7, 5, 6]], *ends).completions[0].token_ids
    assert found == packed.plain().generate([[5, 6, 7, 5, 6]], *ends).completions[0].token_ids
    assert found == loose.generate([[5, 6, 7, 5, 6]], *ends).completions[0].token_ids


def test_a_model_without_linear_layers_has_nothing_to_pack():
    class Other(torch.nn.Linear):
        """Not one that is known."""

    model = build(FAMILIES["Qwen2"]())
    for part in model.modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = Other
    assert linear.pack_linear_layers(model) is None
    assert not adapt(model, packed=True).runner.packed
    with pytest.raises(ConfigurationError, match="pack_weights=True is for linear layers"):
        outrider.load(model, pack_weights=True, drafter="none", threads=1)
