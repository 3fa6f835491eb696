"""Folders with heads: either layout, what the target lends, how layers are counted, refusals."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

import outrider
from outrider import Root, SamplingParams, StopConditions
from outrider.errors import ConfigurationError, VocabularyMismatch
from outrider.models.heads import formats
from outrider.models.heads.source import HeadSource
from outrider.models.sources import ModelSource
from tiny import PROMPTS, decode, llama
from tiny_heads import FLAGS, IDS, SIZES, eagle3, original, speculators, target

LOAD = {"dtype": "float32", "threads": 1, "pack_weights": False}
AUX_LAYERS = (2, 3, 3)  # the usual layers of a target of six


def loaded(folder, model=None, **options):
    return outrider.load(target() if model is None else model, folder, **LOAD, **options)


@pytest.mark.parametrize("flags", FLAGS)
@torch.inference_mode()
def test_a_speculators_checkpoint_is_read_whole(tmp_path, flags):
    head = eagle3(AUX_LAYERS, Qwen3Config, layers=1, **FLAGS[flags])
    model = loaded(speculators(tmp_path, head)).engine.drafter.model
    assert model.aux_layers == AUX_LAYERS
    assert vars(model.runner.head.config) | {"layer": None} == vars(head.config) | {"layer": None}
    for name, weight in head.state_dict().items():
        assert torch.equal(model.runner.head.state_dict()[name], weight), name


@torch.inference_mode()
def test_an_original_checkpoint_borrows_what_it_lacks(tmp_path):
    head, model = eagle3(AUX_LAYERS), target()
    folder = original(tmp_path, head, lent=("embed_tokens.weight", "t2d"))
    read = loaded(folder, model).engine.drafter.model.runner.head.module
    tokens, states = torch.tensor([[3, 1, 4]]), torch.randn(1, 3, 32)
    own = head.state_dict() | {"embed_tokens.weight": model.model.embed_tokens.weight}
    head.load_state_dict(own)
    assert torch.allclose(read.logits(read(tokens, states)), head.logits(head(tokens, states)))
    assert "embed_tokens.weight" not in read.state_dict()


@torch.inference_mode()
def test_a_head_of_all_tokens_may_have_the_targets_output_layer(tmp_path):
    head, model = eagle3(AUX_LAYERS, ids=None), target()
    weights = {n: w for n, w in head.state_dict().items() if n != "lm_head.weight"}
    folder = speculators(tmp_path, head)
    save_file(weights, folder / "model.safetensors")
    read = loaded(folder, model).engine.drafter.model.runner.head.module
    tokens, states = torch.tensor([[3, 1, 4]]), torch.randn(1, 3, 32)
    made = head(tokens, states).read_BQE
    assert torch.allclose(read.logits(read(tokens, states)), model.lm_head(made), atol=1e-5)


def test_what_is_saved_is_read_again(tmp_path):
    head = eagle3(AUX_LAYERS, fc_norm=True, norm_output=True)
    formats.save(head, tmp_path, "tiny")
    read = loaded(tmp_path).engine.drafter.model.runner.head.module
    assert vars(read.config) | {"layer": None} == vars(head.config) | {"layer": None}
    assert all(torch.equal(w, read.state_dict()[n]) for n, w in head.state_dict().items())


@pytest.mark.parametrize("more", [0, 1], ids=["before", "after"])
def test_how_an_author_counts_layers_is_measured(tmp_path, more):
    """A head that was fitted to one way of counting is loaded that way."""
    model, head = target(), eagle3(AUX_LAYERS, ids=None)
    aux_layers = tuple(layer + more for layer in AUX_LAYERS)
    tokens = (5 + torch.arange(32) * 7 % (32 - 5))[None]
    with torch.no_grad():
        told = model(input_ids=tokens, output_hidden_states=True)
    hidden = [told.hidden_states[layer][:, :-1] for layer in aux_layers]
    law = told.logits[:, 1:].softmax(-1)
    head.requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), 0.01)
    for _ in range(40):
        logits = head.logits(head(tokens[:, 1:], head.fuse(hidden)))
        loss = torch.nn.functional.cross_entropy(logits[0], law[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    speculator = loaded(original(tmp_path, head.requires_grad_(False)), model)
    assert speculator.engine.drafter.aux_layers == aux_layers
    assert (
        f"states after {aux_layers[0]}, {aux_layers[1]}, {aux_layers[2]} layers"
        in speculator.notes.draft
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", [speculators, original])
@pytest.mark.parametrize("drafter", ["draft_model", "dynamic_tree"])
def test_texts_are_the_targets_own(tmp_path, layout, drafter):
    """Ragged rows that end one by one, greedy and coupled, with chains and trees."""
    speculator = loaded(layout(tmp_path, eagle3(AUX_LAYERS)), drafter=drafter, shared_noise=True)
    sampling = [
        SamplingParams(0),
        SamplingParams(0.8, seed=1),
        SamplingParams(1.0, top_k=5, seed=2),
    ]
    sampling += [SamplingParams(1.2, top_p=0.9, seed=3), SamplingParams(0)]
    engine = speculator.engine
    plain = speculator.plain().engine
    assert isinstance(plain.drafter, Root)
    for row, size in enumerate((20, 9, 14, 3, 17)):
        alone = decode(plain, [PROMPTS[row]], [sampling[row]], StopConditions(size))[0]
        assert decode(engine, PROMPTS, sampling, StopConditions(20))[0][row][:size] == alone[0]


BAD = {
    "another kind": ({"speculators_model_type": "hydra"}, "speculators_model_type='hydra'"),
    "an unknown flag": ({"mask_token_id": 7}, "mask_token_id=7, which is not computed here"),
    "no norm": ({"norm_before_residual": "gone"}, "no norm_before_residual"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 6]}, r"layers \(0, 1, 6\)"),
    "states": ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "96 inputs of fc for 2 states"),
    "width": ({"target_hidden_size": 64}, "3 states of width 64"),
    "family": ({"transformer_layer_config": {"model_type": "gpt2"}}, "decoder layers of 'gpt2'"),
    "inner flag": (
        {"transformer_layer_config": {"model_type": "llama", **SIZES, "qk_clip": 3}},
        "qk_clip=3, which is not computed here",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_speculators_head_asks_for_in_vain(tmp_path, name):
    fields, said = BAD[name]
    folder = speculators(tmp_path, eagle3(AUX_LAYERS), **fields)
    if "gone" in fields.values():
        whole = json.loads((folder / "config.json").read_text())
        del whole["norm_before_residual"]
        (folder / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigurationError, match=said):
        loaded(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm=True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"parallel_drafting": 2}, "parallel_drafting=2, which is not computed here"),
        ({"use_sliding_window": True, "model_type": "qwen3"}, "use_sliding_window=True"),
    ],
)
def test_what_an_original_head_asks_for_in_vain(tmp_path, fields, said):
    with pytest.raises(ConfigurationError, match=said):
        loaded(original(tmp_path, eagle3(AUX_LAYERS), **fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["MedusaModel"], "medusa_num_heads": 3}, "'MedusaModel'; known are"),
        ({"model_type": "hydra"}, r"model_type='hydra', architectures=\[\], and 'hydra'"),
        (
            {"speculators_model_type": "mlp"},
            "got speculators_model_type='mlp'; give a head of EAGLE-3, P-EAGLE",
        ),
    ],
)
def test_a_head_of_an_unknown_form_is_named_and_so_are_those_that_are_known(tmp_path, fields, said):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigurationError, match=said):
        loaded(tmp_path)


def test_weights_that_are_not_those_of_the_configuration(tmp_path):
    folder = speculators(tmp_path, eagle3(AUX_LAYERS), fc_norm=True)
    with pytest.raises(ConfigurationError, match=r"not those.*fc_norm.0.weight"):
        loaded(folder)
    with pytest.raises(ConfigurationError, match=r"not those.*input_norm"):
        loaded(speculators(tmp_path, eagle3(AUX_LAYERS, norm_before_fc=True), norm_before_fc=False))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"no tensor fc.weight"):
        loaded(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"cannot read the head's weights"):
        loaded(folder)


def test_heads_of_other_vocabularies(tmp_path):
    folder = speculators(tmp_path, eagle3(AUX_LAYERS))
    with pytest.raises(VocabularyMismatch, match=r"a vocabulary of 32 tokens; got .* 40"):
        loaded(folder, llama(num_hidden_layers=6, vocab_size=40))
    head = eagle3(AUX_LAYERS)
    head.d2t += 5
    with pytest.raises(VocabularyMismatch, match="the same 18 tokens of 32"):
        loaded(speculators(tmp_path, head))


def test_only_known_tokens_are_proposed(tmp_path):
    speculator = loaded(speculators(tmp_path, eagle3(AUX_LAYERS)), branching=(3, 2))
    source = ModelSource(target(), "target")
    assert torch.equal(HeadSource(source, tmp_path).ids_K, IDS)
    from outrider.engine import step

    batch = step.begin(
        speculator.engine.target,
        speculator.engine.drafter,
        [outrider.engine.Request(PROMPTS[0], SamplingParams(1.0, seed=1), StopConditions(8))],
        128,
    )
    for seed in range(5):
        sampling = batch.context.sampling._replace(seed_B=torch.tensor([seed]))
        drafted = step.propose(
            speculator.engine.drafter,
            batch._replace(context=batch.context._replace(sampling=sampling)),
        )
        assert torch.isin(drafted.tokens_BN[:, 1:], IDS).all()
