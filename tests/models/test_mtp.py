"""Layers of multi-token prediction: their laws, texts, checkpoints, refusals."""

import copy

import pytest
import recurrent_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

import outrider
from outrider import DraftModel, SamplingParams, StopConditions, testing
from outrider.engine import step
from outrider.engine.batch import begin
from outrider.engine.request import Request
from outrider.errors import ConfigurationError
from outrider.integrations.generate import SpeculativeGenerate
from outrider.integrations.generate_setup import load_arguments
from outrider.models import TransformersRunner, TreeDecoder
from outrider.models.heads import mtp
from outrider.models.heads.autoregressive_head import AutoregressiveHead
from outrider.models.heads.model import HeadModel
from outrider.models.heads.mtp import ChainedHead, Mtp
from outrider.verifiers import VERIFIERS
from tiny import PROMPTS, VOCAB, decode, llama

#: Of one such layer: versions of transformers differ in what they take where nothing is said.
MTP = {
    "num_mtp_layers": 1,
    "mtp_layer_types": ["sliding_attention"],
    "mtp_mlp_layer_types": ["dense"],
}
READS = transformers.MellumForCausalLM._keys_to_ignore_on_load_unexpected or ()
reads_mellums = pytest.mark.skipif(
    not any("mtp" in pattern for pattern in READS),
    reason=f"transformers {transformers.__version__} reads no such layers of Mellum's; 5.20 does",
)
LOAD = {"dtype": "float32", "threads": 1, "pack_weights": False}


def mellum(**more):
    """A tiny family whose checkpoints bring such a layer."""
    torch.manual_seed(0)
    config = transformers.MellumConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=256,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"],
        initializer_range=0.3,
        **{**MTP, **more},
    )
    return transformers.MellumForCausalLM(config).eval()


def deepseek():
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def forward_layer(layers, number, state, at, cache, tokens):
    """One layer's states of tokens: a turn of the loop of `MtpModel.forward`."""
    embedded = layers.embed_tokens(tokens)
    masks = layers.create_masks_for_mtp_layer(number, embedded, cache, at)
    nested = any(isinstance(each, dict) for each in layers.config.rope_parameters.values())
    kind = {"layer_type": layers.config.layer_types[number]} if nested else {}
    turned = layers.rotary_emb(embedded, position_ids=at, **kind)
    return layers.layers[number](
        embedded,
        state,
        position_embeddings=turned,
        position_ids=at,
        past_key_values=cache,
        **masks,
    )


@pytest.mark.parametrize("family", [mellum, deepseek])
@torch.inference_mode()
def test_a_layer_drafts_as_transformers_has_it(family):
    """The law after a text and after tokens drafted below it, against MtpModel's own calls."""
    model = family()
    torch.manual_seed(1)
    layer = MtpModel(model, 1).eval()
    for parameter in layer.layers.parameters():
        parameter.normal_(std=0.3)
    target, drafter = (
        TreeDecoder(TransformersRunner(model)),
        DraftModel(HeadModel(AutoregressiveHead(Mtp(layer)), VOCAB), (1, 1, 1)),
    )
    requests = [
        Request(p, SamplingParams(1.0, seed=1), StopConditions(16))
        for p in (PROMPTS[2], PROMPTS[1])
    ]
    batch = begin(target, drafter, requests, 128)
    for _ in range(2):
        draft = step.propose(drafter, batch)
        for row, length in enumerate(batch.context.length_B.tolist()):
            text = batch.context.tokens_BL[row, :length]
            told = model.model(input_ids=text[None, :-1]).last_hidden_state
            state, at = told, torch.arange(1, length)[None]
            cache = transformers.cache_utils.MtpCache(config=layer.config)
            tokens, drafted = text[None, 1:], draft.tokens_BN[row]
            for node in range(3):
                state = forward_layer(layer, 0, state, at, cache, tokens)[:, -1:]
                expected = layer._project_to_logits(state)[0, -1]
                assert torch.allclose(draft.laws.logits_BRV[row, node], expected, atol=1e-4)
                tokens, at = drafted[node + 1][None, None], at[:, -1:] + 1
        scores = step.score(target, batch, draft, drafter.aux_layers)
        verdict = step.verify(VERIFIERS["block"], batch, draft, scores)
        batch, _ = step.commit(target, drafter, batch, draft, scores, verdict)


#: What a checkpoint's authors call the modules of such a layer.
AUTHORS = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
    "mtp_block": "layers.0",
}


def checkpoint(folder):
    """A target whose folder has the layer's weights by its authors' names."""
    model = mellum()
    model.save_pretrained(folder)
    torch.manual_seed(1)
    layer = MtpModel(model, 1).layers[0]
    for parameter in layer.parameters():  # of which the experts' are memory as it was found
        parameter.data.normal_(std=0.3)
    weights = load_file(folder / "model.safetensors")
    for name, weight in layer.state_dict().items():
        part, _, rest = name.partition(".")
        weights[f"mtp.{AUTHORS[part]}.{rest}"] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return layer


@reads_mellums
def test_the_layer_of_a_checkpoint_drafts_for_it(tmp_path):
    layer = checkpoint(tmp_path)
    speculator = outrider.load(tmp_path, "mtp", shared_noise=True, branching=(2, 1), **LOAD)
    read = speculator.engine.drafter.model.runner.head.model.layers[0]
    assert all(torch.equal(w, read.state_dict()[n]) for n, w in layer.state_dict().items())
    sampling = [
        SamplingParams(0),
        SamplingParams(0.8, seed=1),
        SamplingParams(1.0, seed=2),
        SamplingParams(0),
    ]
    sampling.append(SamplingParams(1.2, top_p=0.9, seed=3))
    own = decode(speculator.plain().engine, PROMPTS, sampling, StopConditions(12))[0]
    assert decode(speculator.engine, PROMPTS, sampling, StopConditions(12))[0] == own


@pytest.mark.one_in(2)
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_the_layer_of_a_hybrid_models_checkpoint_drafts_for_it(kind, tmp_path):
    """transformers drops it; each expert has tensors of its own there."""
    mixed = ["linear_attention", "full_attention"] * 2
    model = recurrent_models.made(kind, layer_types=mixed)
    model.save_pretrained(tmp_path)
    vars(model.config).update(num_mtp_layers=1, mtp_layer_types=["full_attention"])
    layer = MtpModel(model, 1).layers[0]
    torch.manual_seed(1)
    weights = load_file(tmp_path / "model.safetensors")
    for name, weight in layer.state_dict().items():
        weight.normal_(std=0.3)
        part, _, rest = name.partition(".")
        name = f"mtp.{AUTHORS[part]}.{rest}"
        if not rest.endswith("_up_proj") and not rest.endswith("experts.down_proj"):
            weights[name] = weight.contiguous()
            continue
        for number, expert in enumerate(weight):
            kinds = ["gate", "up"] if "gate_up" in rest else ["down"]
            for each, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True):
                place = f"{name.rpartition('.')[0]}.{number}.{each}_proj.weight"
                weights[place] = matrix.contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    speculator = outrider.load(tmp_path, "mtp", shared_noise=True, branching=(2, 1), **LOAD)
    target, read = speculator.engine.target.runner.model, speculator.engine.drafter.model.runner
    assert not vars(target.config).keys() & {"num_mtp_layers", "mtp_layer_types"}
    found = read.head.model.layers[0].state_dict()
    assert all(torch.equal(w, found[n]) for n, w in layer.state_dict().items())
    again, ids = type(model).from_pretrained(tmp_path).eval(), torch.tensor([PROMPTS[0]])
    given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    call = SpeculativeGenerate(draft_model="mtp")  # transformers' own word is not for states
    expected = again.generate(ids, **given)
    assert torch.equal(again.generate(ids, **given, custom_generate=call), expected)
    assert call.stats.drafted
    sampling = [SamplingParams(0), SamplingParams(0.8, seed=1)]
    own = decode(speculator.plain().engine, PROMPTS[:2], sampling, StopConditions(12))[0]
    assert decode(speculator.engine, PROMPTS[:2], sampling, StopConditions(12))[0] == own
    save_file(
        {name: weight for name, weight in weights.items() if "mtp.layers.0.mlp" not in name},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ConfigurationError, match="cannot read the multi-token prediction layer"):
        outrider.load(tmp_path, "mtp", **LOAD)


@reads_mellums
def test_generate_takes_its_own_word_for_it(tmp_path):
    """`use_mtp=True`, as transformers' own assisted generation is asked for such layers."""
    checkpoint(tmp_path)
    model = transformers.MellumForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    call, own = SpeculativeGenerate(), model.generate(ids, **given)
    assert torch.equal(model.generate(ids, **given, use_mtp=True, custom_generate=call), own)
    assert call.stats.drafted
    with pytest.raises(ConfigurationError, match="use_mtp='mtp' contradicts draft='other'"):
        load_arguments({"use_mtp": True, "assistant_model": "other"})


def test_targets_without_such_a_layer_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="which has none; use another draft"):
        outrider.load(llama(), "mtp", **LOAD)
    checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    left = {name: weight for name, weight in weights.items() if "mtp.fc" not in name}
    save_file(left, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match="cannot read the multi-token prediction layer"):
        outrider.load(tmp_path, "mtp", **LOAD)
    left = {name: weight for name, weight in weights.items() if "mtp." not in name}
    save_file(left, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match="not one tensor of it, though its configuration"):
        outrider.load(tmp_path, "mtp", **LOAD)


def test_layers_that_transformers_does_not_build_are_named(tmp_path):
    """Checkpoints that have `mtp.*` of another form, of which their configuration does not say."""
    llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    said = r"none \(1 tensors of its checkpoint .* mtp.fc.weight, which transformers .* 'llama'"
    with pytest.raises(ConfigurationError, match=said):
        outrider.load(tmp_path, "mtp", **LOAD)


def chained(model, count=3, std=0.3):
    """Layers of which each one drafts a token more."""
    model.config.num_mtp_layers = count
    torch.manual_seed(1)
    layers = MtpModel(model, count).eval()
    for parameter in layers.layers.parameters():  # of which the experts' are memory as it was found
        parameter.data.normal_(std=std)
    return layers


def sliding():
    """Three chained layers, of which the second has a window."""
    model, kinds = mellum(), ["full_attention", "sliding_attention", "full_attention"]
    more = {"num_mtp_layers": 3, "mtp_mlp_layer_types": ["dense"] * 3, "mtp_layer_types": kinds}
    vars(model.config).update(more)  # whose own configuration allows one alone
    return model


@pytest.mark.parametrize("family", [sliding, deepseek])
@pytest.mark.parametrize("depth", [3, 5])
@torch.inference_mode()
def test_each_layer_of_several_drafts_at_a_depth_of_its_own(family, depth):
    """Against MtpModel's own layers, shifted by a token for each, over steps that keep some."""
    model = family()
    layers = chained(model)
    target = TreeDecoder(TransformersRunner(model))
    drafter = DraftModel(HeadModel(ChainedHead(Mtp(layers)), VOCAB), (1,) * depth)
    requests = [
        Request(p, SamplingParams(1.0, seed=1), StopConditions(24))
        for p in (PROMPTS[2], PROMPTS[1])
    ]
    batch, kept = begin(target, drafter, requests, 128), 0
    for _ in range(4):
        draft = step.propose(drafter, batch)
        for row, length in enumerate(batch.context.length_B.tolist()):
            text = batch.context.tokens_BL[row, :length]
            state = model.model(input_ids=text[None, :-1]).last_hidden_state
            tokens, at = text[None, 1:], torch.arange(1, length)[None]
            cache = transformers.cache_utils.MtpCache(config=layers.config)
            cache.activate_past_recording()
            for node in range(depth):
                if node < 3:
                    state = forward_layer(layers, node, state, at, cache, tokens)
                else:  # below all layers the last one goes on by its own output
                    ends = state[:, -1:], at[:, -1:], cache, tokens[:, -1:]
                    state = forward_layer(layers, 2, *ends)
                expected = layers._project_to_logits(state)[0, -1]
                assert torch.allclose(draft.laws.logits_BRV[row, node], expected, atol=1e-4)
                tokens = torch.cat([tokens[:, 1:], draft.tokens_BN[row, node + 1].view(1, 1)], 1)
                at = torch.cat([at[:, 1:], at[:, -1:] + 1], 1)
        scores = step.score(target, batch, draft, drafter.aux_layers)
        verdict = step.verify(VERIFIERS["block"], batch, draft, scores)
        kept += int(verdict.count_B.sum())
        batch, _ = step.commit(target, drafter, batch, draft, scores, verdict)
    assert kept > 0


@pytest.mark.parametrize("branching", [(1, 1, 1, 1), (2, 2, 1)])
def test_chained_layers_change_no_text(monkeypatch, branching):
    model = sliding()
    layers = chained(model, std=0.1)
    monkeypatch.setattr(mtp.pretrained, "read_mtp", lambda kind, target, **how: layers)
    speculator = outrider.load(model, "mtp", branching=branching, shared_noise=True, **LOAD)
    assert isinstance(speculator.engine.drafter.model.runner, ChainedHead)
    sampling = [SamplingParams(0), SamplingParams(0.8, seed=1), SamplingParams(0)]
    sampling += [SamplingParams(1.0, seed=2), SamplingParams(1.2, top_p=0.9, seed=3)]
    own = decode(speculator.plain().engine, PROMPTS, sampling, StopConditions(12))[0]
    assert decode(speculator.engine, PROMPTS, sampling, StopConditions(12))[0] == own


def test_several_layers_of_a_checkpoint_are_read(tmp_path, monkeypatch):
    """As DeepSeek-V3's stand behind the decoder's own, each expert's tensors alone."""
    model = deepseek()
    # transformers knows such layers by the numbers of the published sizes
    numbers = [r"model\.layers\.[23]\..*"]
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", numbers)
    model.config.num_mtp_layers = 2
    model.save_pretrained(tmp_path)
    layers = chained(model, 2).layers
    weights = load_file(tmp_path / "model.safetensors")
    for number, layer in enumerate(layers):
        for name, weight in layer.state_dict().items():
            name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            place = f"model.layers.{2 + number}.{name}"
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                weights[place] = weight.contiguous()
                continue
            kinds = ["gate", "up"] if "gate_up" in name else ["down"]
            for at, expert in enumerate(weight):
                for kind, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True):
                    own = f"{place.rpartition('.')[0]}.{at}.{kind}_proj.weight"
                    weights[own] = matrix.contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    speculator = outrider.load(tmp_path, "mtp", shared_noise=True, branching=(2, 1, 1), **LOAD)
    read = speculator.engine.drafter.model.runner.head.model.layers
    for mine, layer in zip(read, layers, strict=True):
        found = mine.state_dict()
        assert all(torch.equal(w, found[n]) for n, w in layer.state_dict().items())
    sampling = [SamplingParams(0), SamplingParams(0.8, seed=1)]
    own = decode(speculator.plain().engine, PROMPTS[:2], sampling, StopConditions(12))[0]
    assert decode(speculator.engine, PROMPTS[:2], sampling, StopConditions(12))[0] == own


@pytest.mark.exhaustive
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (2, 1)])
def test_chained_layers_are_a_drafter_like_others(counts):
    model = testing.llama()
    layers = chained(model)

    def made(model):
        own = Mtp(copy.deepcopy(layers).to(model.device))
        return DraftModel(HeadModel(ChainedHead(own), testing.VOCAB), counts)

    testing.check_drafter(made)
