"""Folders open by what their configuration is; what cannot be a target says why."""

import json

import installed
import pytest
import torch
import transformers
from families import based, build
from transformers import AutoConfig, SeamlessM4TConfig

from outrider import SamplingParams, Stop, StopConditions, load
from outrider.costs import Costs
from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import linear, load_checks, runner_of, weight_only
from outrider.models.auto_classes import auto_class
from outrider.models.decoder import TreeDecoder
from outrider.models.runtime_config import RuntimeOptions, resolve_runtime
from outrider.models.sources import ModelSource

QUICK = {
    "threads": 1,
    "pack_weights": False,
    "dtype": "float32",
    "step_costs": Costs.of({1: 1.0, 8: 1.5}),
    "generation_config": "none",
}
TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SOUND = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "num_mel_bins": 8,
    "max_source_positions": 8,
}
#: model types that no causal class opens -> a tiny configuration
BESIDE_TEXT = {
    "llava": lambda: AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **SIGHT, "projection_dim": 16},
        image_token_index=96,
    ),
    "qwen3_vl": lambda: AutoConfig.for_model(
        "qwen3_vl",
        text_config={
            **TEXT,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=96,
        video_token_id=95,
    ),
    "qwen2_audio": lambda: AutoConfig.for_model(
        "qwen2_audio",
        text_config={"model_type": "qwen2", **TEXT},
        audio_config=SOUND,
        audio_token_index=96,
    ),
}


def text_of(speculator, prompt, count=8):
    run = speculator.engine.run([prompt], [SamplingParams(0.0)], StopConditions(count))
    return [token for block in run for token in block.token_ids]


@pytest.mark.parametrize("kind", BESIDE_TEXT)
@torch.inference_mode()
def test_a_folder_that_no_causal_class_opens_decodes_text(kind, tmp_path):
    config = BESIDE_TEXT[kind]()
    torch.manual_seed(0)
    model = auto_class(config).from_config(config).eval()
    model.save_pretrained(tmp_path)
    prompt = [5, 9, 11, 4, 7]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )[0, 5:].tolist()
    speculator = load(tmp_path, drafter="recall", **QUICK)
    assert text_of(speculator, prompt) == expected


def test_what_is_no_language_model_is_refused_before_its_weights(tmp_path):
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"'vit' model cannot be a target.*ViTConfig"):
        load(tmp_path, drafter="recall", **QUICK)


def test_an_encoder_says_that_it_is_one(tmp_path):
    sizes = {name: size for name, size in TEXT.items() if name != "num_key_value_heads"}
    AutoConfig.for_model("roberta", **sizes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"it is an encoder.*is_decoder=True"):
        load(tmp_path, drafter="recall", **QUICK)


DECODERS = {
    "roberta": {"pad_token_id": 1},
    "xlm-roberta-xl": {"pad_token_id": 1},
    "camembert": {"pad_token_id": 1},
    "roformer": {"embedding_size": 32},
    "moshi": {"sliding_window": 8, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", installed.params(DECODERS))
@torch.inference_mode()
def test_decoders_that_count_positions_otherwise_score_trees_as_their_own_forward(kind):
    sizes = {name: size for name, size in TEXT.items() if name != "num_key_value_heads"}
    config = AutoConfig.for_model(kind, **sizes, is_decoder=True, **DECODERS[kind])
    model = build(config, "eager")
    target = TreeDecoder(runner_of(model)(model))
    assert target.trees
    assert load_checks.paths(target, "target") < 1e-5


def llama(dtype=torch.float32):
    return build(based("llama")).to(dtype)


def test_a_dtype_that_nothing_computes_in_is_said():
    with pytest.raises(ConfigurationError, match=r"torch.float64.*model.float\(\)"):
        load(llama(torch.float64), drafter="recall", **QUICK)


def test_an_output_layer_of_another_dtype_is_said_where_states_have_the_weights_dtype():
    """Where they are float32 over bfloat16 weights, such a model runs as it is meant."""
    model = llama(torch.bfloat16)
    model.lm_head.float()
    quick = {"threads": 1, "step_costs": QUICK["step_costs"], "generation_config": "none"}
    if not weight_only.applies_to("bfloat16", torch.device("cpu")):
        with pytest.raises(ConfigurationError, match=r"output layer.*float32.*bfloat16"):
            load(model, drafter="recall", **quick)
        return
    made = load(model, drafter="recall", **quick)
    done = made.generate([5, 6, 7], SamplingParams(0), Stop(12, token_ids=()))
    wide = model.float().generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert done.completions[0].token_ids == wide[0, 3:].tolist()


def saved_as(folder, method, **more):
    """A folder that says that its weights were quantised by this method."""
    llama().save_pretrained(folder)
    file = folder / "config.json"
    said = json.loads(file.read_text())
    said["quantization_config"] = {"quant_method": method, **more}
    file.write_text(json.dumps(said))
    return folder


def test_a_quantised_folder_names_the_package_that_it_lacks(tmp_path, monkeypatch):
    folder = saved_as(tmp_path, "awq", bits=4, group_size=32)

    def lacking(*_, **__):
        raise ImportError("Loading an AWQ model requires gptqmodel")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lacking)
    with pytest.raises(ConfigurationError, match=r"quantised by 'awq'.*requires gptqmodel"):
        load(folder, drafter="recall", threads=1)


def test_a_quantised_folder_keeps_the_dtype_that_it_was_saved_in(tmp_path):
    folder = saved_as(tmp_path, "torchao", quant_type="int8_weight_only")
    wish = RuntimeOptions(threads=1, pack_weights=False)
    source = ModelSource(folder, "target")
    setting, measured = resolve_runtime(wish, source, [], None, torch.device("cpu"), 4)
    assert setting.dtype == source.checkpoint_dtype() == "float32"
    assert measured is None


class RoundedActivations(torch.Tensor):
    """As torchao's weights of dynamic activation quantisation say of themselves what they do."""

    act_quant_kwargs = "per token"


def test_dynamic_activation_quantisation_is_named():
    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    weight = layer.weight.detach().as_subclass(RoundedActivations)
    del layer.weight
    layer.weight = weight
    with pytest.raises(UnsupportedModel, match=r"dynamic activation quantisation.*RoundedAct"):
        load(model, drafter="recall", **QUICK)


class Elsewhere(torch.Tensor):
    """A weight whose product is another library's."""


def test_weights_of_another_library_are_not_packed():
    model = llama()
    layers = [part for part in model.modules() if type(part) is torch.nn.Linear]
    for layer in layers:
        layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Elsewhere))
    assert linear.pack_linear_layers(model) is None


@pytest.mark.parametrize("kind", ["ctrl", "gpt2"])
def test_a_folder_without_any_file_of_a_tokenizer_has_none(kind, tmp_path):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 97}
    build(AutoConfig.for_model(kind, **sizes), "eager").save_pretrained(tmp_path)
    speculator = load(tmp_path, drafter="recall", **QUICK)
    assert speculator.tokenizer is None
    assert len(text_of(speculator, [5, 9, 11])) == 8


def test_a_tokenizer_that_lacks_one_of_its_files_is_said(tmp_path):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 97}
    build(AutoConfig.for_model("ctrl", **sizes), "eager").save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"vocab.json: a file .* is missing"):
        load(tmp_path, drafter="recall", **QUICK)


@pytest.mark.parametrize("name", ["SeamlessM4TForSpeechToText", "SeamlessM4TForTextToText"])
def test_of_a_type_with_two_classes_the_folder_says_which(name):
    """One reads sound, the other text: the wrong one would have an encoder of random weights."""
    config = SeamlessM4TConfig(architectures=[name])
    kind = auto_class(config)
    assert kind._model_mapping[SeamlessM4TConfig].__name__ == name


@pytest.mark.parametrize(
    ("kind", "why"),
    [("parakeet_tdt", "a transducer"), ("parakeet_ctc", "at once"), ("dia", "sound")],
)
def test_recognisers_that_write_no_text_token_by_token_say_so(kind, why, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=why):
        load(tmp_path, drafter="none", tokenizer=None, **QUICK)
