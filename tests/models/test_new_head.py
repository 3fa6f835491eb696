"""A new kind of head is one file of its own and one line: docs/adding-a-head.md, done here."""

import importlib
import json
import sys
from importlib import metadata

import pytest
import torch
from safetensors.torch import save_file
from tests.tiny_heads import VOCAB, target

from outrider import ConfigurationError, SamplingParams, Stop, load, plugins
from outrider.models import heads

#: The package of somebody else: a recurrent head without attention.
FILE = '''
"""The next state is the last one and the token, each through a matrix."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear

from outrider.models.draft_source import TargetBoundSource
from outrider.models.heads.autoregressive_head import AutoregressiveHead
from outrider.models.heads.eagle3 import HeadStates
from outrider.models.heads.model import HeadModel
from outrider.models.config import folder_fields
from outrider.models.heads.model import DraftHead


class Recurrent(DraftHead):
    aux_layers, depth, window = (-1,), 1, None

    def __init__(self, weights, model):
        output = model.get_output_embeddings().weight
        super().__init__(*output.shape, model.get_input_embeddings().weight, output)
        self.mix_E2E = torch.nn.Parameter(weights["mix"], requires_grad=False)

    @property
    def device(self):
        return self.mix_E2E.device

    @property
    def dtype(self):
        return self.mix_E2E.dtype

    def fuse(self, hidden):
        return hidden[0]

    def entries(self, nodes, states_BQE, cache):
        x = torch.cat([states_BQE, self.embedded(nodes.tokens_BQ)], -1)
        made = states_BQE + linear(x, self.mix_E2E)
        return HeadStates(made, made)

    def logits(self, states):
        return linear(states.read_BQE, self.output)


class RecurrentSource(TargetBoundSource):
    @classmethod
    def reads(cls, given):
        return isinstance(given, (str, Path)) and "recurrent_head" in folder_fields(given)

    def __init__(self, target, given):
        super().__init__(target, Path(given))
        self.config = target.config

    def driven(self, setting, device, vocab, shares=False):
        weights = load_file(self.given / "model.safetensors")
        head = Recurrent(weights, self.target.model(setting.dtype, device))
        return HeadModel(AutoregressiveHead(head), vocab)
'''
PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False, "device": "cpu"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A head's folder, while its package is installed and has added itself."""
    (tmp_path / "recurrent_heads").mkdir()
    (tmp_path / "recurrent_heads" / "__init__.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("recurrent_heads")
    monkeypatch.setattr(heads, "SOURCES", [*heads.SOURCES])
    heads.SOURCES.append(package.RecurrentSource)
    made = tmp_path / "head"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"recurrent_head": 1}))
    torch.manual_seed(0)
    save_file({"mix": 0.05 * torch.randn(32, 64)}, made / "model.safetensors")
    yield made
    del sys.modules["recurrent_heads"]


class Distribution:
    name = "recurrent-heads"


@pytest.fixture
def installed(folder, monkeypatch):
    """The same without that line, as if its package had these entry points: name to value."""
    monkeypatch.setattr(heads, "SOURCES", heads.SOURCES[:-1])

    def install(**points):
        made = [metadata.EntryPoint(name, value, "outrider.heads")._for(Distribution())
                for name, value in points.items()]  # fmt: skip
        of = plugins.PluginGroup("outrider.heads", "head", heads.PLUGINS.read)
        monkeypatch.setattr(heads, "PLUGINS", of)
        monkeypatch.setattr(
            metadata, "entry_points", lambda group: [one for one in made if one.group == group]
        )
        return folder

    return install


def test_an_entry_point_makes_it_known_by_a_field_of_its_folder(installed, caplog):
    folder = installed(
        recurrent_head="recurrent_heads:RecurrentSource",
        another_head="no_such_module:X",
        eagle_config="recurrent_heads:RecurrentSource",
    )
    loaded = load(target(), folder, num_speculative_tokens=3, **PLAIN)
    assert type(loaded.engine.drafter.model.runner.head).__name__ == "Recurrent"
    told = [record.getMessage() for record in caplog.records]
    assert any("outrider has a head of that name" in text for text in told)
    assert any("no_such_module" in text for text in told)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("no_such_module:X", "the head 'recurrent_head' of recurrent-heads .* cannot be imported"),
        ("recurrent_heads:Recurrent", "a head's source is a subclass of .*TargetBoundSource; got"),
    ],
)
def test_an_entry_point_that_is_of_no_use_is_named(installed, value, told):
    with pytest.raises(ConfigurationError, match=told):
        load(target(), installed(recurrent_head=value), **PLAIN)


def test_no_plug_in_is_imported_for_another_folder(installed, monkeypatch):
    installed(recurrent_head="no_such_module:X")
    monkeypatch.setattr(heads.PLUGINS, "load", None)  # not asked
    assert heads.source_of("a/model/elsewhere", None) is None


def test_a_head_of_another_package_drafts_by_its_folder(folder):
    loaded = load(target(), folder, num_speculative_tokens=3, **PLAIN)
    assert loaded.notes.draft == str(folder)
    model = loaded.engine.drafter.model
    assert (model.aux_layers, model.vocab_size, type(model.runner.head).__name__) == (
        ((-1,), VOCAB, "Recurrent")
    )
    prompts, how, stop = [[5, 6, 7], [8]], SamplingParams(0), Stop(24, token_ids=())
    drafted = loaded.generate(prompts, how, stop)
    assert drafted.stats.mean_acceptance_length > 1, "some of its tokens are the target's"
    plain = loaded.plain().generate(prompts, how, stop)
    assert [one.token_ids for one in drafted.completions] == [
        one.token_ids for one in plain.completions
    ]


def test_what_a_kind_does_not_say_is_refused_by_its_name(folder):
    with pytest.raises(ConfigurationError, match=f"got the head {folder}"):
        load(target(), folder, draft_dtype="int8", **PLAIN)


def test_without_its_line_the_folder_is_another_model(folder, monkeypatch):
    monkeypatch.setattr(heads, "SOURCES", heads.SOURCES[:-1])
    with pytest.raises(ConfigurationError, match="cannot load the draft model"):
        load(target(), folder, **PLAIN)
