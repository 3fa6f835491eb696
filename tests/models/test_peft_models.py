"""Adapters of peft: as an object, as a folder, merged; on the target and on the draft."""

import json

import peft
import pytest
import torch

import outrider
from outrider import SamplingParams, Stop
from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import peft_models
from tiny import PROMPTS, llama

LOAD = {"dtype": "float32", "device": "cpu", "threads": 1, "pack_weights": False}
LAYERS = ["q_proj", "v_proj", "down_proj"]


def worn(model, seed=3, **settings):
    """The model with an adapter whose weights are random, as an untrained one's are not."""
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 8, "target_modules": LAYERS, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**(given | settings))).eval()


@pytest.fixture
def folders(tmp_path):
    """A base, an adapter of it, and the merged model."""
    llama().save_pretrained(tmp_path / "base")
    base = type(llama()).from_pretrained(tmp_path / "base")
    model = worn(base)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    return tmp_path


def greedy(model):
    """What transformers writes."""
    return [
        model.generate(input_ids=torch.tensor([ids]), max_new_tokens=16, do_sample=False)[
            0, len(ids) :
        ].tolist()
        for ids in PROMPTS
    ]


def texts(speculator):
    done = speculator.generate(list(PROMPTS), SamplingParams(0), Stop(16))
    return [one.token_ids for one in done.completions]


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}], ids=str)
def test_an_object_writes_what_its_own_generate_writes(settings):
    model = worn(llama(), **settings)
    found = outrider.load(model, drafter="recall", **LOAD)
    assert texts(found) == greedy(model) != greedy(llama())


def test_an_objects_active_adapter_is_the_one_that_runs():
    model = worn(llama())
    model.add_adapter("other", peft.LoraConfig(target_modules=LAYERS, init_lora_weights=False))
    found = outrider.load(model, drafter="recall", **LOAD)
    first = texts(found)
    model.set_adapter("other")
    assert first != texts(found) == greedy(model)


def test_a_folder_is_its_base_with_the_adapter_merged(folders):
    found = outrider.load(folders / "adapter", drafter="recall", **LOAD)
    merged = outrider.load(folders / "merged", drafter="recall", **LOAD)
    assert texts(found) == texts(merged) != texts(outrider.load(folders / "base", **LOAD))
    assert found.notes.means == merged.notes.means  # as fast as a model without an adapter


@pytest.mark.parametrize("form", ["folder", "object"])
def test_an_adapter_on_the_draft(folders, form):
    """The draft is the adapted model: a target that is it as well takes every token."""
    draft = folders / "adapter" if form == "folder" else worn(llama())
    target = folders / "merged" if form == "folder" else worn(llama()).merge_and_unload()
    found = outrider.load(target, draft, num_speculative_tokens=3, **LOAD)
    done = found.generate(list(PROMPTS), SamplingParams(0), Stop(16))
    assert [one.token_ids for one in done.completions] == texts(outrider.load(target, **LOAD))
    assert done.stats.accepted == done.stats.drafted > 0


def test_the_base_is_found_beside_the_adapter(folders, monkeypatch):
    _say(folders / "adapter", base_model_name_or_path="base")
    found = outrider.load(folders / "adapter", drafter="recall", **LOAD)
    assert texts(found) == texts(outrider.load(folders / "merged", **LOAD))


def _say(folder, **settings):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | settings), "utf-8")


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({"hidden_size": 16}, "size mismatch|shape"),
        ({"num_hidden_layers": 3}, "nothing for .*layers.2"),
        ({"num_hidden_layers": 1}, "no place for .*layers.1"),
    ],
    ids=["width", "deeper", "shallower"],
)
def test_an_adapter_of_another_base_is_refused(folders, base, said):
    llama(**base).save_pretrained(folders / "other")
    _say(folders / "adapter", base_model_name_or_path=str(folders / "other"))
    with pytest.raises(ConfigurationError, match=f"does not fit its base.*other.*({said})"):
        outrider.load(folders / "adapter", **LOAD)


def test_layers_that_the_base_has_not_are_refused(folders):
    _say(folders / "adapter", target_modules=["c_attn"])
    with pytest.raises(ConfigurationError, match=r"does not fit its base.*c_attn"):
        outrider.load(folders / "adapter", **LOAD)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"base_model_name_or_path": None}, "names no base"),
        ({"base_model_name_or_path": "/no/such/folder"}, "base is not here.*/no/such/folder"),
    ],
    ids=["none", "gone"],
)
def test_a_base_that_is_not_there(folders, settings, said):
    _say(folders / "adapter", **settings)
    with pytest.raises(ConfigurationError, match=said):
        outrider.load(folders / "adapter", **LOAD)


def test_a_broken_file(folders):
    (folders / "adapter" / "adapter_config.json").write_text("[", "utf-8")
    with pytest.raises(ConfigurationError, match=r"adapter_config.json of the adapter cannot be"):
        outrider.load(folders / "adapter", **LOAD)


def test_pickled_weights_are_not_read(folders):
    (folders / "adapter" / "adapter_model.safetensors").rename(folders / "adapter" / "it.bin")
    with pytest.raises(ConfigurationError, match="safetensors alone"):
        outrider.load(folders / "adapter", **LOAD)


def test_a_whole_model_and_an_adapter_in_one_folder(folders):
    llama().save_pretrained(folders / "adapter")
    with pytest.raises(ConfigurationError, match="weights of both"):
        outrider.load(folders / "adapter", **LOAD)


def test_prompts_in_place_of_weights_are_refused(folders):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(llama(), config)
    with pytest.raises(UnsupportedModel, match="PROMPT_TUNING put trained states ahead"):
        outrider.load(model, **LOAD)
    _say(folders / "adapter", peft_type="PREFIX_TUNING")
    with pytest.raises(UnsupportedModel, match="PREFIX_TUNING put trained states ahead"):
        outrider.load(folders / "adapter", **LOAD)


def test_the_package_is_asked_for_in_one_sentence(folders, monkeypatch):
    monkeypatch.setattr(peft_models, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'outrider\[peft\]'"):
        outrider.load(folders / "adapter", **LOAD)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_base_that_cannot_be_reached_is_named(folders, role):
    _say(folders / "adapter", base_model_name_or_path="org/base")
    given = (folders / "adapter",) if role == "target" else (llama(), folders / "adapter")
    with pytest.raises(ConfigurationError, match=rf"the {role} model; got 'org/base', the base of"):
        outrider.load(*given, **LOAD)
