"""torch and transformers as commands import them: less of them, and nothing else is different."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_whisper
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.models import program_imports

LEFT_OUT = ("torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "sympy")
_TELL = f"""
import json, sys
from outrider.models.program_imports import import_lean
import_lean()
import transformers
from transformers import AutoTokenizer, LlamaForCausalLM
left = [name for name in {LEFT_OUT!r} if name in sys.modules]
import torch, torch._dynamo, torch.distributed.tensor
doubled = torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1)).item()
exports = {{name: sorted(map(str, found)) for name, found in (
    ("models", transformers.models._class_to_module), ("all", transformers._class_to_module))}}
files = [getattr(module, "__file__", None) for module in (torch._dynamo, torch.distributed.tensor)]
said = dict(left=left, doubled=doubled, exports=exports, files=files,
            sharding=transformers.utils.is_torch_distributed_available())
print(json.dumps(said))
"""


_SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
_MADE = """
import json, os, sys, torch
from outrider.models import program_imports
program_imports.import_lean()
import transformers
def tensors(folder):
    sound = folder.endswith("whisper")
    kind = transformers.AutoModelForSpeechSeq2Seq if sound else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder)
    each = [*model.named_parameters(), *model.named_buffers()]
    return {name: [str(x.dtype), str(x.device), x.tolist()] for name, x in each}
made = {}
for folder in json.loads(os.environ["FOLDERS"]):
    with program_imports.made_lean(os.path.basename(folder)):
        made[folder] = tensors(folder)
imported = "torch._dynamo" in sys.modules
print(json.dumps([imported, [folder for folder in made if made[folder] != tensors(folder)]]))
"""


def told(cache, program=_TELL, **environment):
    here = os.environ | {"XDG_CACHE_HOME": str(cache)} | environment
    start = [str(program)] if isinstance(program, Path) else ["-c", program]
    done = subprocess.run(
        [sys.executable, *start], env=here, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """As a process imports them that is one of several: all of both."""
    return told(tmp_path_factory.mktemp("usual"), WORLD_SIZE="2")


@pytest.fixture(scope="module")
def lean(tmp_path_factory):
    cache = tmp_path_factory.mktemp("lean")
    return cache, told(cache)


@pytest.mark.exhaustive
def test_what_no_command_calls_is_left_out_and_there_for_others(usual, lean):
    _, said = lean
    assert (said["left"], said["sharding"]) == ([], False)
    assert (usual["left"], usual["sharding"]) != ([], False)
    assert said["doubled"] == 2.0
    assert all(said["files"])


@pytest.mark.exhaustive
def test_what_transformers_exports_is_the_same_from_its_files_and_from_ours(usual, lean):
    cache, said = lean
    assert said["exports"] == usual["exports"]
    assert len(said["exports"]["all"]) > 1000
    (kept,) = (cache / "outrider").glob("exports-*.bin")
    again = told(cache)
    assert again == said
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-7])  # damaged: read anew, and written whole
    assert told(cache)["exports"] == usual["exports"]
    assert len(kept.read_bytes()) == len(whole)


def test_a_stand_in_gives_way_to_whoever_asks_for_more(monkeypatch):
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    with program_imports._stands_in("tabnanny", {"check": 1}):
        import tabnanny as first

        assert first.check == 1
        assert first.NannyNag is sys.modules["tabnanny"].NannyNag
        assert sys.modules["tabnanny"] is not first
    assert callable(sys.modules["tabnanny"].check)
    del sys.modules["tabnanny"]  # others begin without it


def test_what_is_below_a_stand_in_is_the_real_packages(tmp_path, monkeypatch):
    """An installed package may import it meanwhile, as torchvision does of the tracer."""
    package = tmp_path / "stood_in"
    package.mkdir()
    (package / "__init__.py").write_text("from stood_in import below\nreal = True\n")
    (package / "below.py").write_text("import runs\nruns.each.append(__name__)\nvalue = 7\n")
    (package / "late.py").write_text("import runs\nruns.each.append(__name__)\nvalue = 8\n")
    (tmp_path / "runs.py").write_text("each = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    with program_imports._stands_in("stood_in", {"real": False}):
        import stood_in

        assert stood_in.real is False
        from stood_in.below import value
        from stood_in.late import value as late

        assert (value, late, sys.modules["stood_in"].real) == (7, 8, True)
    import runs
    import stood_in

    assert stood_in.real
    assert runs.each == ["stood_in.below", "stood_in.late"]
    assert (stood_in.below, stood_in.late) == tuple(sys.modules[name] for name in runs.each)
    for name in ("stood_in", "runs", *runs.each):
        del sys.modules[name]


_BELOW = """
import json, sys
from outrider.models import program_imports
exports = program_imports._exports_kept
def as_others_do():
    from torch._dynamo.utils import is_compile_supported
    assert is_compile_supported("cpu") in (True, False)
    return exports()
def broken():
    raise RuntimeError("planted")
program_imports._exports_kept = MEANWHILE
program_imports.import_lean()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,
    num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1))
print(json.dumps([program_imports._imported_lean, torch._dynamo.__file__ is not None]))
"""


@pytest.mark.parametrize(
    ("meanwhile", "lean"),
    [("as_others_do", True), pytest.param("broken", False, marks=pytest.mark.exhaustive)],
)
def test_other_packages_may_need_what_is_left_out(tmp_path, meanwhile, lean):
    """They get it; and where something breaks all the same, everything is imported as usual."""
    program = _BELOW.replace("MEANWHILE", meanwhile)
    assert told(tmp_path, program) == [lean, True]


@pytest.mark.exhaustive
def test_models_are_made_the_same_without_the_tracer(tmp_path):
    folders = []
    for name in sorted(program_imports._PLAINLY_MADE):
        folders.append(str(tmp_path / name))
        if name == "whisper":
            tiny_whisper.whisper().save_pretrained(folders[-1])
        else:
            config = AutoConfig.for_model(name, **_SMALL)
            AutoModelForCausalLM.from_config(config).save_pretrained(folders[-1])
    imported, different = told(tmp_path, _MADE, FOLDERS=json.dumps(folders))
    assert not imported
    assert different == []


_REACHED = """
import json, os, sys
from typer.testing import CliRunner
from outrider.cli import app, batch, chat, generate, serve, transcribe
def reached():
    found.append([name for name in ("torch", "transformers") if name in sys.modules])
    raise SystemExit(0)
for module in (batch, chat, generate, serve, transcribe):
    module.import_lean = reached
said = {}
for words in json.loads(os.environ["COMMANDS"]):
    found = []
    CliRunner().invoke(app, words)
    said[words[0]] = found
print(json.dumps(said))
"""


def test_every_command_imports_so_before_anything_else_imports_them(tmp_path):
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "sound.wav").write_bytes(b"RIFF")
    commands = [
        ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")],
        ["chat"],
        ["generate", "once"],
        ["serve", "--port", "0"],
        ["transcribe", str(tmp_path / "sound.wav"), "-m", str(tmp_path)],
    ]
    said = told(tmp_path, _REACHED, COMMANDS=json.dumps(commands))
    assert said == {words[0]: [[]] for words in commands}


_APART = f"""
import json, sys
def load():
    from outrider import ConfigurationError
    raise ConfigurationError(json.dumps([name for name in {LEFT_OUT!r} if name in sys.modules]))
if __name__ == "__main__":
    from outrider import ConfigurationError
    from outrider.server.engine_process import launch_engine
    try:
        launch_engine(load, None)
    except ConfigurationError as error:
        print(error)
"""


@pytest.mark.exhaustive
def test_a_server_s_other_process_imports_so_too(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_APART)
    assert told(tmp_path, program) == []


def test_parts_of_a_package_with_a_stand_in_are_the_real_ones(tmp_path, monkeypatch):
    """As torchvision asks for one of torch's tracer while transformers imports it."""
    package = tmp_path / "replaced"
    package.mkdir()
    (package / "__init__.py").write_text("from replaced import first\ntimes = []\n")
    (package / "first.py").write_text("import sys\nnumber = 1\n")
    (package / "second.py").write_text("import replaced\nreplaced.times.append(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    for part in ("first", "second"):
        with program_imports._stands_in("replaced", {"marked": len}):
            from replaced import marked

            assert marked is len
            found = importlib.import_module(f"replaced.{part}")
        real = importlib.import_module("replaced")
        assert real.__file__ == str(package / "__init__.py")
        assert getattr(real, part) is found is sys.modules[f"replaced.{part}"]
        assert found.__spec__.origin == str(package / f"{part}.py")
        assert real.times == [2] * (part == "second")
        assert sys.meta_path == finders
        for name in [name for name in sys.modules if name.startswith("replaced")]:
            del sys.modules[name]
    with (
        program_imports._stands_in("replaced", {}),
        pytest.raises(ModuleNotFoundError, match=r"replaced\.third"),
    ):
        importlib.import_module("replaced.third")
    assert sys.meta_path == finders
