"""Quantised layers of other libraries that are told to compute in float32."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from outrider import SamplingParams, Stop, load
from outrider.models import TransformersRunner, foreign_layers
from tiny import llama


class Linear4bit(nn.Linear):
    """As bitsandbytes has it: at its first call the scales are turned and rounded."""

    def __init__(self, compute_dtype=None, called=False, packs=True):
        super().__init__(4, 6)
        self.support_avx512bf16_for_cpu, self.compute_dtype = packs, compute_dtype
        scales = torch.arange(12.0).view(6, 2)
        state = SimpleNamespace(packing_format_for_cpu=called, absmax=scales.T.bfloat16(), nested=1)
        self.weight.quant_state = state


@pytest.fixture
def way_back(monkeypatch):
    """The library's own way back, which marks what it has seen."""

    def inverse(weight, state):
        state.packing_format_for_cpu = False
        return weight + 1.0, state

    functional = ModuleType("bitsandbytes.functional")
    functional._convert_weight_packed_for_cpu_inverse = inverse
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)


def test_layers_that_would_round_what_they_are_given(way_back):
    fresh, called = Linear4bit(), Linear4bit(torch.float32, called=True)
    weight = called.weight.detach().clone()
    asked, plain = Linear4bit(torch.bfloat16), Linear4bit(packs=False)
    model = nn.ModuleList([fresh, called, asked, plain, nn.Linear(4, 4)])
    assert foreign_layers.compute_in_float32(model) == 2
    assert not fresh.support_avx512bf16_for_cpu
    assert not called.support_avx512bf16_for_cpu
    assert asked.support_avx512bf16_for_cpu, "it was told to compute in bfloat16"
    assert torch.equal(called.weight, weight + 1.0)
    state = called.weight.quant_state
    assert state.absmax.tolist() == [float(n) for n in range(12)]
    assert state.nested is False
    assert state.packing_format_for_cpu is False


def test_a_float32_target_with_such_layers_says_so(way_back):
    model = llama()
    model.extra = Linear4bit()
    assert "its 4-bit layers in float32" in TransformersRunner(model).means
    half = llama().bfloat16()
    half.extra = Linear4bit()
    assert TransformersRunner(half).means == "the model's own forward"
    assert half.extra.support_avx512bf16_for_cpu, "half precision is judged as such"


def test_weights_that_wait_for_the_first_call_are_unpacked_at_load():
    """As compressed-tensors does: a hook ahead of the first forward makes the layers' weights."""
    model, whole = llama(), llama()
    layers = [m for m in model.modules() if type(m) is nn.Linear]
    packed = [(layer, layer.weight) for layer in layers]
    for layer in layers:
        del layer.weight

    class Compressor:
        def decompress_model(self, model):
            for layer, weight in packed:
                layer.weight = weight
            model.ct_decompress_hook.remove()
            del model.ct_decompress_hook

    model.hf_quantizer = SimpleNamespace(compressor=Compressor())
    model.ct_decompress_hook = model.register_forward_pre_hook(
        lambda model, _: model.hf_quantizer.compressor.decompress_model(model)
    )
    found, own = (load(one, drafter="recall", dtype="float32", threads=1) for one in (model, whole))
    texts = [
        one.generate([[5, 6, 7, 5, 6]], SamplingParams(0), Stop(12)).completions[0].token_ids
        for one in (found, own)
    ]
    assert texts[0] == texts[1]
    assert not foreign_layers.unpack(model)
