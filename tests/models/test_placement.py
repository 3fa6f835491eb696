"""Models that accelerate has placed: weights on the host and on a disk, fetched for each call."""

import logging

import pytest
import torch
import transformers
from recurrent_models import made

import outrider
from outrider import SamplingParams, Stop
from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import placement
from outrider.testing import llama

LOAD = {"threads": 1, "dtype": "float32"}
PROMPT = [5, 6, 7, 8] * 5
SKIP = {"drafter": "layer_skip", "drafter_options": {"skip": (1,)}}
WAYS = [SamplingParams(0.0), SamplingParams(0.8, seed=3)]


def placed(folder, model, disk):
    """The model read again, the modules of `disk` kept there and the rest on the host."""
    model.save_pretrained(folder)
    names = ["lm_head", *(f"model.{name}" for name, _ in model.model.named_children())]
    names.remove("model.layers")
    names += [f"model.layers.{n}" for n in range(len(model.model.layers))]
    where = {name: "disk" if name in disk else "cpu" for name in names}
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map=where, offload_folder=str(folder / "disk")
    )


def texts(target, **more):
    speculator = outrider.load(target, **{**LOAD, "shared_noise": True, **more})
    told = [speculator.generate([PROMPT], way, Stop(16)) for way in WAYS]
    return speculator, [each.completions[0].token_ids for each in told]


@pytest.fixture
def calls(monkeypatch):
    """How often the disk's layer was fetched."""
    from accelerate.hooks import AlignDevicesHook

    seen = []
    theirs = AlignDevicesHook.pre_forward

    def pre_forward(self, module, *args, **kwargs):
        seen.append(type(module).__name__)
        return theirs(self, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", pre_forward)
    return seen


def test_weights_on_a_disk_are_a_target_like_others(tmp_path, calls):
    whole = llama()
    model = placed(tmp_path, whole, {"model.layers.1", "lm_head"})
    assert placement.offloaded(model)
    _, expected = texts(whole, drafter="none", pack_weights=False, rule="match", shared_noise=False)
    for more in ({"drafter": "recall"}, {"draft": whole, "branching": (2, 1)}, SKIP):
        speculator, found = texts(model, **more)
        assert found == expected
        assert speculator.notes.means.endswith("weights fetched for each call")
        assert not speculator.notes.packed
        assert speculator.notes.device == "cpu"
    assert "Linear" in calls


def test_a_model_that_is_on_a_disk_altogether(tmp_path):
    whole = llama()
    whole.save_pretrained(tmp_path)
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map={"": "disk"}, offload_folder=str(tmp_path / "disk")
    )
    assert placement.device_of(model) == torch.device("cpu")
    _, expected = texts(whole, drafter="none", pack_weights=False, shared_noise=False)
    assert texts(model, drafter="recall")[1][0] == expected[0]


def test_layers_with_states_on_a_disk(tmp_path):
    """Mixers read weights of their convolutions by hand: these have to be fetched, too."""
    whole = made("lfm2")
    model = placed(tmp_path, whole, {"model.layers.2"})  # the one that attends
    expected = whole.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)
    assert texts(model, drafter="recall")[1][0] == expected[0, len(PROMPT) :].tolist()


def test_what_would_read_weights_by_hand_is_refused(tmp_path):
    whole = llama()
    model = placed(tmp_path, whole, {"model.layers.1"})
    with pytest.raises(UnsupportedModel, match="with device_map; use a draft model of its own"):
        outrider.load(model, "mtp", **LOAD)
    with pytest.raises(ConfigurationError, match="fetched for each call stay as they are"):
        outrider.load(model, drafter="recall", threads=1, dtype="int8")
    with pytest.raises(ConfigurationError, match="draft_dtype='int8'"):
        outrider.load(llama(), model, draft_dtype="int8", **LOAD)
    with pytest.raises(ConfigurationError, match="pack_weights=True"):
        outrider.load(model, drafter="recall", pack_weights=True, **LOAD)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(llama().config)
    with pytest.raises(ConfigurationError, match="on the meta device, which keeps none"):
        outrider.load(model, drafter="recall", **LOAD)


def test_where_a_model_runs():
    model = llama()
    for places, expected in (
        ({"": 0}, "cuda:0"),
        ({"a": "cuda:1", "b": "cpu", "c": "disk"}, "cuda:1"),
        ({"a": "cpu", "b": "disk"}, "cpu"),
    ):
        model.hf_device_map = places
        assert placement.device_of(model) == torch.device(expected)
    model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(UnsupportedModel, match=r"spread over several devices .* on 0, 1"):
        placement.device_of(model)
