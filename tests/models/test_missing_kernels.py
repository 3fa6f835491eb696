"""Hybrid models where kernels of states are missing: the same texts, and somebody says so."""

import json
import logging

import pytest
import torch
from recurrent_models import made

from outrider import SamplingParams, Stop
from outrider.errors import ConfigurationError
from outrider.loading import load
from outrider.models import pretrained
from outrider.models.cpu_kernels import build
from outrider.models.recurrent import runner

LOAD = {"drafter": "recall", "dtype": "float32", "threads": 1, "pack_weights": False}
PROMPT = [7, 8, 9, 10, 11] * 5
#: As authors write the files beside their weights.
NEEDY = """
import mamba_ssm_of_somebody
from transformers import {config}
class Own{config}({config}):
    pass
"""


def text(speculator):
    told = speculator.generate([PROMPT], SamplingParams(0.0), Stop(20))
    return told.completions[0].token_ids


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1"])
def test_without_a_compiler_torchs_operators_write_the_same_text(kind, monkeypatch, caplog):
    model = made(kind)
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)
    expected = expected[0, len(PROMPT) :].tolist()
    runner._said_once.cache_clear()
    monkeypatch.setattr(build, "unbuilt", lambda: "there is no compiler")
    with caplog.at_level(logging.WARNING, "outrider.models"):
        speculators = [load(model, **LOAD) for _ in range(2)]
    said = [r.message for r in caplog.records if "states of hybrid models" in r.message]
    assert said == [
        "states of hybrid models are computed by torch's operators: there is no compiler"
    ]
    assert speculators[0].notes.means.endswith("torch's operators (there is no compiler)")
    assert text(speculators[0]) == expected
    monkeypatch.undo()
    if build.unbuilt() is None:
        compiled = load(model, **LOAD)
        assert compiled.notes.means.endswith("states by a compiled kernel")
        assert text(compiled) == expected


def test_models_without_such_states_have_nothing_to_say(monkeypatch, caplog):
    runner._said_once.cache_clear()
    monkeypatch.setattr(build, "unbuilt", lambda: "there is no compiler")
    with caplog.at_level(logging.WARNING, "outrider.models"):
        notes = load(made("rwkv"), **LOAD).notes
    assert notes.means.endswith("states by torch's operators")
    assert "states of hybrid models" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "means"), [("lfm2", "a compiled kernel"), ("mamba", "torch's operators")]
)
def test_a_convolution_counts_where_a_model_has_no_other_states(kind, means):
    if build.unbuilt() is None:
        assert load(made(kind), **LOAD).notes.means.endswith(f"states by {means}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("named", [("AutoConfig", "AutoModelForCausalLM"), ("AutoConfig",)])
def test_files_that_need_a_missing_package_give_way_to_transformers_own(tmp_path, named, caplog):
    """`trust_remote_code=True` on a checkpoint whose files import kernels of their authors."""
    model = made("falcon_h1")
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["auto_map"] = dict.fromkeys(named, "needy.OwnFalconH1Config")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "needy.py").write_text(NEEDY.format(config="FalconH1Config"))
    expected = text(load(model, **LOAD))
    with caplog.at_level(logging.WARNING, "outrider.security"):
        found = load(tmp_path, trust_remote_code=True, **LOAD)
    assert text(found) == expected
    said = [r.message for r in caplog.records if "need a package" in r.message]
    assert len(said) == 1
    assert "mamba_ssm_of_somebody" in said[0]
    assert "own falcon_h1 is read" in said[0]


def test_what_transformers_does_not_know_needs_its_package(tmp_path):
    made("falcon_h1").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["auto_map"] = {"AutoConfig": "needy.OwnFalconH1Config"}
    fields["model_type"] = "unheard_of"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "needy.py").write_text(NEEDY.format(config="FalconH1Config"))
    with pytest.raises(ConfigurationError, match="mamba_ssm_of_somebody"):
        load(tmp_path, trust_remote_code=True, **LOAD)
    assert str(tmp_path) not in pretrained._FELL_BACK
