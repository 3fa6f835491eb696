"""A new kind of head is one file of its own and one line: that of docs/adding-a-head.md, run."""

import importlib
import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.tiny_heads import IDS, SIZES, VOCAB, target
from transformers import LlamaConfig

from outrider import ConfigurationError, SamplingParams, Stop, VocabularyMismatch, load, plugins
from outrider.models import heads
from outrider.models.heads import formats

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-head.md"
#: The package of somebody else: the file that the page shows.
FILE = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)[1]
PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False, "device": "cpu"}


def weights(package, ids=None):
    """Of a head whose state is that of the token before it, and a little of what the layer says."""
    torch.manual_seed(0)
    model = target()
    lent = formats.lent(model, {}, ids)
    head = package.MyHead(LlamaConfig(**SIZES), **lent, ids_K=ids)
    mix = torch.cat([torch.eye(32), 0.05 * torch.randn(32, 32)], 1)
    return head.state_dict() | {"mix.weight": mix}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A head's folder, while its package is installed and has added itself."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("my_package")
    monkeypatch.setattr(heads, "SOURCES", [*heads.SOURCES])
    heads.SOURCES.append(package.MyHeadSource)
    made = tmp_path / "head"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"my_head": SIZES}))
    save_file(weights(package), made / "model.safetensors")
    yield made
    del sys.modules["my_package"]


class Distribution:
    name = "my-package"


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
        my_head="my_package:MyHeadSource",
        another_head="no_such_module:X",
        eagle_config="my_package:MyHeadSource",
    )
    loaded = load(target(), folder, num_speculative_tokens=3, **PLAIN)
    assert type(loaded.engine.drafter.model.runner.head).__name__ == "MyHead"
    told = [record.getMessage() for record in caplog.records]
    assert any("outrider has a head of that name" in text for text in told)
    assert any("no_such_module" in text for text in told)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("no_such_module:X", "the head 'my_head' of my-package .* cannot be imported"),
        ("my_package:MyHead", "a head's source is a subclass of .*TargetBoundSource; got"),
    ],
)
def test_an_entry_point_that_is_of_no_use_is_named(installed, value, told):
    with pytest.raises(ConfigurationError, match=told):
        load(target(), installed(my_head=value), **PLAIN)


def test_no_plug_in_is_imported_for_another_folder(installed, monkeypatch):
    installed(my_head="no_such_module:X")
    monkeypatch.setattr(heads.PLUGINS, "load", None)  # not asked
    assert heads.source_of("a/model/elsewhere", None) is None


def test_a_head_of_another_package_drafts_by_its_folder(folder):
    loaded = load(target(), folder, num_speculative_tokens=3, **PLAIN)
    assert loaded.notes.draft == str(folder)
    model = loaded.engine.drafter.model
    assert (model.aux_layers, model.vocab_size, type(model.runner.head).__name__) == (
        ((-1,), VOCAB, "MyHead")
    )
    prompts, how, stop = [[5, 6, 7], [8]], SamplingParams(0), Stop(24, token_ids=())
    drafted = loaded.generate(prompts, how, stop)
    assert drafted.stats.mean_acceptance_length > 1, "some of its tokens are the target's"
    plain = loaded.plain().generate(prompts, how, stop)
    assert [one.token_ids for one in drafted.completions] == [
        one.token_ids for one in plain.completions
    ]


def test_its_page_says_how_it_knows_fewer_tokens(folder):
    save_file(weights(sys.modules["my_package"], IDS), folder / "model.safetensors")
    loaded = load(target(), folder, num_speculative_tokens=3, **PLAIN)
    assert loaded.engine.drafter.model.runner.ids_K.tolist() == IDS.tolist()
    how, stop = SamplingParams(0), Stop(24, token_ids=())
    texts = [one.generate([[5, 6, 7]], how, stop) for one in (loaded, loaded.plain())]
    assert texts[0].completions[0].token_ids == texts[1].completions[0].token_ids


def test_its_page_says_how_folders_are_refused(folder):
    made = weights(sys.modules["my_package"])
    for change, told in (
        ({"mix.weight": torch.ones(32, 3)}, "size mismatch for mix.weight"),
        ({"spare.weight": torch.ones(3)}, "Unexpected key.*spare.weight"),
    ):
        save_file(made | change, folder / "model.safetensors")
        with pytest.raises(ConfigurationError, match=told):
            load(target(), folder, **PLAIN)
    (folder / "config.json").write_text(json.dumps({"my_head": SIZES | {"vocab_size": VOCAB - 1}}))
    with pytest.raises(VocabularyMismatch, match=f"made for a vocabulary of {VOCAB - 1} tokens"):
        load(target(), folder, **PLAIN)


def test_what_a_kind_does_not_say_is_refused_by_its_name(folder):
    with pytest.raises(ConfigurationError, match=f"got the head {folder}"):
        load(target(), folder, draft_dtype="int8", **PLAIN)


def test_without_its_line_the_folder_is_another_model(folder, monkeypatch):
    monkeypatch.setattr(heads, "SOURCES", heads.SOURCES[:-1])
    with pytest.raises(ConfigurationError, match="cannot load the draft model"):
        load(target(), folder, **PLAIN)
