"""Python files of a model folder do not run unless the caller says so, whatever is typed."""

import ast
import json
import pickle
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import outrider
from outrider.cli import app
from outrider.loading import load
from outrider.models import pretrained
from outrider.models.heads import formats
from outrider.models.sources import ModelSource
from outrider.models.tokenizer_files import read_tokenizer
from outrider.shipped import shipped
from tiny import llama

ROOT = Path(__file__).parents[2]
PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False}
MARKS = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
pathlib.Path({marker!r}).write_text("ran")
class Config(LlamaConfig):
    model_type = "evil"
class Model(LlamaForCausalLM):
    config_class = Config
class Words(PreTrainedTokenizerFast):
    pass
"""
CONFIG = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
WORDS = {"AutoTokenizer": ["evil.Words", "evil.Words"]}


@pytest.fixture
def answers_yes(monkeypatch):
    """What a hurried user types."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    return asked


def folder(path: Path, auto_map: dict, config: dict | None = None) -> Path:
    """A model folder whose configuration names Python that leaves a mark."""
    llama().save_pretrained(path)
    told = json.loads((path / "config.json").read_text())
    if auto_map:
        told |= {"auto_map": auto_map, "model_type": "evil"}
    (path / "config.json").write_text(json.dumps(told | (config or {})))
    (path / "evil.py").write_text(MARKS.format(marker=str(path / "marker")))
    return path


def ran(path: Path) -> bool:
    return (path / "marker").exists()


REFUSED = r"(?s)does not run.*evil.*--trust-remote-code"


@pytest.mark.parametrize("auto_map", [CONFIG, {"AutoConfig": "evil.Config"}, {**CONFIG, **WORDS}])
def test_a_configuration_that_names_code_is_refused(tmp_path, answers_yes, auto_map):
    path = folder(tmp_path / "evil", auto_map)
    for call in (
        lambda: load(path, **PLAIN),
        lambda: load(shipped("target"), path, **PLAIN),
        lambda: load(shipped("target"), [path, path], drafter="paths", **PLAIN),
        lambda: ModelSource(path, "target"),
        lambda: load(llama(), path, **PLAIN),
    ):
        with pytest.raises(outrider.errors.RemoteCodeRefused, match=REFUSED):
            call()
    assert not answers_yes
    assert not ran(path)


def test_a_known_model_type_is_read_by_transformers_own_classes(tmp_path, answers_yes):
    path = folder(tmp_path / "evil", CONFIG, {"model_type": "llama"})
    load(path, drafter="none", **PLAIN)
    assert not answers_yes
    assert not ran(path)


def test_tokenizers_that_name_code_are_refused(tmp_path, answers_yes):
    path = folder(tmp_path / "evil", {}, {"model_type": "llama"})
    (path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": WORDS, "tokenizer_class": "Words"})
    )
    for call in (
        lambda: load(path, drafter="none", **PLAIN),
        lambda: load(shipped("target"), path, **PLAIN),
        lambda: read_tokenizer(path),
        lambda: load(shipped("target"), shipped("draft"), draft_tokenizer=path, **PLAIN),
        lambda: load(llama(), drafter="none", tokenizer=path, **PLAIN),
    ):
        with pytest.raises(outrider.errors.RemoteCodeRefused, match=REFUSED):
            call()
    assert not answers_yes
    assert not ran(path)


def test_a_feature_extractor_that_names_code_is_transformers_own(tmp_path, answers_yes):
    told = {"auto_map": {"AutoFeatureExtractor": "evil.Config", "AutoProcessor": "evil.Config"}}
    for name in ("preprocessor_config.json", "processor_config.json", "generation_config.json"):
        (tmp_path / name).write_text(json.dumps(told))
    (tmp_path / "evil.py").write_text(MARKS.format(marker=str(tmp_path / "marker")))
    assert pretrained.read_feature_extractor(str(tmp_path)).sampling_rate == 16000
    assert pretrained.read_generation_config(str(tmp_path)) is not None
    assert not answers_yes
    assert not ran(tmp_path)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_of_the_hub_is_refused(tmp_path, name):
    path = folder(tmp_path, {}, {name: "somebody/kernel"})
    with pytest.raises(outrider.errors.RemoteCodeRefused, match="kernel of the hub"):
        load(path, **PLAIN)


COMMANDS = (
    ["generate", "x", "--model", "EVIL"],
    ["generate", "x", "--model", str(shipped("target")), "--draft-model", "EVIL"],
    ["chat", "--model", "EVIL"],
    ["serve", "--model", "EVIL", "--port", "0", "--processes", "1"],
    ["certify", "--model", "EVIL", "--draft-model", "EVIL"],
    ["compare", "--model", "EVIL"],
    ["plan", "EVIL", "--bandwidth", "1T", "--flops", "1T"],
    ["transcribe", "WAV", "--model", "EVIL"],
    ["train-draft", "EVIL", "--data", "TEXT", "--out", "OUT"],
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_commands_refuse_and_do_not_ask(tmp_path, answers_yes, command):
    if command[0] == "serve":
        pytest.importorskip("fastapi", reason="the extra 'server' is not installed")
    path = folder(tmp_path / "evil", CONFIG)
    (tmp_path / "text.txt").write_text("words " * 2000)
    names = {"EVIL": path, "TEXT": tmp_path / "text.txt", "OUT": tmp_path / "out"}
    names["WAV"] = silence(tmp_path)
    typed = [str(names.get(word, word)) for word in command]
    done = CliRunner().invoke(app, typed, input="y\n")
    assert done.exit_code
    told = f"{done.output}{done.exception}"
    assert "does not run" in told, told
    assert "--trust-remote-code" in told, told
    assert not answers_yes
    assert not ran(path)


def silence(folder: Path) -> Path:
    import wave

    with wave.open(str(folder / "silence.wav"), "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes(bytes(32000))
    return folder / "silence.wav"


def test_who_says_so_runs_it_and_reads_that_in_the_log(tmp_path, caplog):
    path = folder(tmp_path / "evil", CONFIG)
    with caplog.at_level("WARNING", "outrider.security"):
        load(path, drafter="none", trust_remote_code=True, **PLAIN)
    assert ran(path)
    assert str(path) in caplog.text
    assert "may run" in caplog.text


@pytest.mark.parametrize("given", ["False", 1, None])
def test_what_is_no_bool_is_no_yes(given):
    with pytest.raises(outrider.ConfigurationError, match="True or False"):
        load(shipped("target"), trust_remote_code=given)


class Evil:
    """What a pickle runs where nobody looks."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (self.marker, "ran")


def test_pickled_weights_that_run_something_are_our_error(tmp_path):
    path = folder(tmp_path, {})
    (path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil(path / "marker")}, path / "pytorch_model.bin")
    with pytest.raises(outrider.ConfigurationError, match=r"(?s)more than weights.*not run"):
        load(path, drafter="none", **PLAIN)
    assert not ran(path)


def test_a_pickled_head_that_runs_something_is_our_error(tmp_path):
    torch.save({"fc.weight": Evil(tmp_path / "marker")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(outrider.ConfigurationError, match=r"(?s)more than weights.*safetensors"):
        formats.weights_of(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "marker"), 2))
    with pytest.raises(outrider.ConfigurationError, match="more than weights"):
        formats.weights_of(tmp_path)
    assert not ran(tmp_path)


def test_files_that_are_no_safetensors_are_our_error(tmp_path):
    path = folder(tmp_path, {})
    for bad in (b"", b"{}", pickle.dumps(Evil(path / "marker"))):
        (path / "model.safetensors").write_bytes(bad)
        with pytest.raises(outrider.ConfigurationError, match="weights"):
            load(path, drafter="none", **PLAIN)
    save_file({"a": torch.ones(1)}, path / "model.safetensors")
    with pytest.raises(outrider.ConfigurationError, match="not there"):
        load(path, drafter="none", **PLAIN)
    assert not ran(path)


@cache
def calls(where: Path):
    """Every call of every file, with its file."""
    return [
        (path, node, node.func)
        for path in sorted(where.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]


def test_every_load_of_the_package_goes_through_one_module():
    loads = {"from_pretrained", "get_config_dict", "pipeline", "from_config"}
    seen = []
    for path, node, called in calls(ROOT / "src"):
        if called.attr in loads and path.name != "pretrained.py":
            raise AssertionError(f"{path}:{node.lineno} loads past models/pretrained.py")
        if called.attr in loads:
            seen.append(node)
            of = ast.unparse(called.value)
            told = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            coded = of.startswith("Auto") or (of == "kind" and "trust_remote_code" in told)
            assert not coded or told["trust_remote_code"] == "trust", of
    assert len(seen) == 11


@pytest.mark.parametrize(
    "where", ["src", "packages", "benchmarks", "training", "tools", "examples"]
)
def test_scripts_say_false_and_unpickle_weights_alone(where):
    for path, node, called in calls(ROOT / where):
        told = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        place, of = f"{path}:{node.lineno}", ast.unparse(called.value)
        if called.attr == "from_pretrained" and of.split(".")[-1].startswith("Auto"):
            assert told.get("trust_remote_code") in ("False", "trust"), place
        if called.attr == "load" and of == "torch":
            assert told.get("weights_only") == "True", place
        if called.attr == "load" and of in ("np", "numpy"):
            assert told.get("allow_pickle", "False") == "False", place
