"""Every family over ragged trees, in coupled mode against plain decoding, and those refused."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from families import EAGER_ONLY, FAMILIES, attentions, based, build, gpt, own
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from outrider import verifiers
from outrider.drafters import DraftModel, Root
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.loading import load
from outrider.models import (
    SUPPORTED,
    ChainRunner,
    LlamaRunner,
    TreeDecoder,
    adapt,
    load_checks,
    runner_of,
)
from outrider.sampling.sampling_params import SamplingParams
from outrider.testing.runner_checks import perturbed_copy, ragged_trees, shared_noise_text

CASES = [(name, attention) for name in FAMILIES for attention in attentions(name)]
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
CAPACITY = 128


def driven(name, attention, seed=0):
    model = build(FAMILIES[name](), attention, seed)
    return model, TreeDecoder(runner_of(model)(model))


def test_at_least_twenty_families_and_every_supported_type():
    kinds = {config().model_type for config in FAMILIES.values()}
    assert kinds == SUPPORTED
    assert len(kinds) >= 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "attention"), CASES, ids=[f"{n}-{a}" for n, a in CASES])
def test_ragged_trees_score_as_their_paths(name, attention):
    """Four rows, two rounds with an accepted path between them, all past the window of 8."""
    assert ragged_trees(*driven(name, attention)) < 1e-4


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "attention"), CASES, ids=[f"{n}-{a}" for n, a in CASES])
def test_coupled_text_equals_plain_decoding(name, attention):
    """The target drafts for itself from perturbed weights, chain and tree, two ragged rows."""
    model, target = driven(name, attention)
    other = perturbed_copy(model)
    shared_noise_text(target, TreeDecoder(runner_of(other)(other)))


def test_the_probe_at_load_sees_a_wrong_window():
    model = build(FAMILIES["Mistral (window)"]())
    wrong = TreeDecoder(runner_of(model)(model))
    assert load_checks.paths(wrong, "target") < 1e-4
    wrong.runner.masks = lambda seen, at, keys: torch.where(seen, 0.0, -1e30)[:, None]
    with pytest.raises(UnsupportedModel, match="does not score trees as paths"):
        load_checks.paths(wrong, "target")
    assert model.config.sliding_window == 8


REFUSED = {
    "xlnet": (lambda: own("xlnet", d_model=32, n_layer=1, n_head=2, d_inner=32), "left-to-right"),
    "cpmant": (lambda: AutoConfig.for_model("cpmant"), "not causal"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_with_the_reason_before_weights_are_read(kind, tmp_path):
    config, reason = REFUSED[kind]
    config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"'{kind}' models are not supported.*{reason}"):
        load(tmp_path, drafter="none", threads=1, pack_weights=False, dtype="float32")


def test_a_loaded_model_is_refused_as_well():
    model = build(REFUSED["xlnet"][0]())
    with pytest.raises(UnsupportedModel, match="'xlnet' models are not supported"):
        adapt(model)


@pytest.mark.parametrize("back_end", ["flash_attention_2", "flex_attention"])
def test_attention_back_ends_without_tree_masks_are_refused(back_end):
    model = build(based("qwen2"))
    model.config._attn_implementation_internal = back_end
    with pytest.raises(UnsupportedModel, match=f"{back_end}.*takes no tree mask"):
        adapt(model)


def test_a_model_spread_over_devices_is_refused():
    model = build(based("qwen2"))
    model.hf_device_map = {"model.layers.0": 0, "lm_head": 1}
    with pytest.raises(UnsupportedModel, match="spread over several devices"):
        adapt(model)
    model.hf_device_map = {"": "cpu"}
    assert adapt(model).trees


class Rounded(nn.Module):
    """Weight-only quantisation, as 4-bit loaders do: 15 levels a row, no look at the input."""

    def __init__(self, linear):
        super().__init__()
        self.scale = nn.Parameter(linear.weight.abs().amax(1, keepdim=True) / 7, False)
        self.levels = nn.Parameter((linear.weight / self.scale).round(), False)

    def forward(self, x):
        return x @ (self.levels * self.scale).T


class Dynamic(Rounded):
    """Activations rounded by one scale for the whole call: siblings change each other."""

    def forward(self, x):
        scale = x.abs().amax() / 7
        return super().forward((x / scale).round() * scale)


def quantised(kind):
    model = build(FAMILIES["Llama"]())
    for layer in model.model.layers:
        layer.mlp.down_proj = kind(layer.mlp.down_proj)
        layer.self_attn.o_proj = kind(layer.self_attn.o_proj)
    return model


def test_weight_only_quantisation_is_honoured():
    model = adapt(quantised(Rounded))
    assert type(model.runner).__name__ == "TransformersRunner"
    assert load_checks.paths(model, "target") < 1e-5


def test_activation_quantisation_over_the_whole_call_is_refused():
    with pytest.raises(UnsupportedModel, match="looks at the whole call"):
        load_checks.paths(adapt(quantised(Dynamic)), "target")


def test_int8_with_outlier_columns_is_refused_by_name():
    class Linear8bitLt(Rounded):
        state = SimpleNamespace(threshold=6.0)

    with pytest.raises(UnsupportedModel, match="outlier columns"):
        adapt(quantised(Linear8bitLt))


@pytest.mark.parametrize("name", ["GPT-2", "BLOOM", "GPT-Neo", "Mistral (window)", "Gemma 3"])
def test_the_chain_fallback_is_exact(name):
    model = build(FAMILIES[name]())
    chain = TreeDecoder(ChainRunner(model))
    assert not chain.trees
    assert load_checks.paths(chain, "target") < 1e-5
    tree = TreeDecoder(runner_of(model)(model))
    prompts, ends = [[5, 9, 11, 4, 7, 8, 3, 20, 31, 12], [40]], StopConditions(12)

    def text(target, drafter):
        out = [[], []]
        for block in Engine(target, drafter, verifiers.get("match")).run(
            prompts, [SamplingParams(0.9, seed=1), SamplingParams(0)], ends
        ):
            out[block.request_id] += block.token_ids
        return out

    plain = text(tree, Root())
    assert text(chain, Root()) == plain
    assert text(chain, DraftModel(chain, (1, 1, 1), shared_noise=True)) == plain
    with pytest.raises(ConfigurationError, match="chains but not trees"):
        Engine(chain, DraftModel(tree, (2, 2)))


def test_an_unlisted_architecture_falls_back_to_chains(monkeypatch, tmp_path):
    """BLOOM without its exception cannot build its bias: trees fail, chains stay exact."""
    monkeypatch.setattr(sys.modules["outrider.models"], "EXCEPTIONS", {})
    monkeypatch.setattr(sys.modules["outrider.models.sources"], "SUPPORTED", frozenset())
    build(FAMILIES["BLOOM"]()).save_pretrained(tmp_path)
    pair = load(
        tmp_path,
        drafter="prompt_lookup",
        threads=1,
        pack_weights=False,
        dtype="float32",
        tokenizer=None,
    )
    assert not pair.engine.target.trees
    assert pair.generate([[5, 6, 7, 5, 6]], SamplingParams(0)).completions[0].token_ids


def test_configurations_are_not_shared_between_models():
    """from_config writes the attention implementation into the configuration it is given."""
    config = gpt("gpt2")
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
    assert eager.config._attn_implementation == "eager"
    assert EAGER_ONLY <= set(FAMILIES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_families_on_a_cuda_device(name, attention):
    """Ragged trees against the model's own forward past the window, then coupled against plain."""
    prompts, how = [[5, 9, 11, 4, 7, 8, 3, 20, 31, 12], [40, 2, 17]], SamplingParams(0.9, seed=11)
    target = adapt(build(FAMILIES[name](), attention).cuda())
    differs = load_checks.paths(target, name)
    if differs is None:  # a lean decoder, compared with transformers in test_cuda_kernels.py
        assert isinstance(target.runner, LlamaRunner)
    else:
        assert differs < 1e-4

    def text(drafter):
        out = [[], []]
        engine = Engine(target, drafter, verifiers.get("match"))
        for block in engine.run(prompts, how, StopConditions(14)):
            out[block.request_id] += block.token_ids
        return out

    plain = text(Root())
    assert text(DraftModel(target, (1, 1, 1), shared_noise=True)) == plain
    assert text(DraftModel(target, (2, 2), shared_noise=True)) == plain
