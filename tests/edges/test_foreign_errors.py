"""Files that are not right, a disk that is full, faults of a request: one clear error of ours."""

import errno
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigurationError, NumericalError, OutriderError
from outrider.loading import load
from outrider.server import batch_file
from outrider.server.engine_loop import Broken, EngineLoop, EngineRequest
from outrider.server.errors import to_response
from outrider.shipped import shipped as folder_of
from tiny import llama

PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False, "drafter": "none"}


@pytest.fixture
def folder(tmp_path):
    llama().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": 40},
        {"num_attention_heads": 3},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"hidden_size": "wide"},
        {"vocab_size": 0},
        {"rope_parameters": {"rope_type": "none"}},
        {"hidden_act": "loud"},
    ],
    ids=lambda wrong: "-".join(f"{name}={value}" for name, value in wrong.items())[:40],
)
def test_sizes_that_do_not_fit_are_one_error_with_the_folder(folder, wrong):
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | wrong))
    with pytest.raises(OutriderError, match=str(folder)):
        load(folder, **PLAIN)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_named(folder, value):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericalError, match=r"(?s)NaN or infinity.*layers\.1\.mlp\.up_proj"):
        load(folder, **PLAIN)


@pytest.mark.parametrize("value", [float("nan"), -1e9])
def test_a_norm_that_makes_none_is_looked_for_in_the_configuration(folder, value):
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"rms_norm_eps": value}))
    with pytest.raises(OutriderError, match=r"rms_norm_eps"):
        load(folder, **PLAIN)


@pytest.mark.parametrize("data", ["", "{", '{"model": 3}', "[]", '{"version": "1.0"}'])
@pytest.mark.parametrize("role", ["target", "draft", "alone"])
def test_a_broken_tokenizer_is_one_error_with_the_file(tmp_path, data, role):
    path = tmp_path / "model"
    shutil.copytree(folder_of("draft"), path, symlinks=True)
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").write_text(data)
    calls = {
        "target": lambda: load(path, **PLAIN),
        "draft": lambda: load(folder_of("target"), path, **PLAIN | {"drafter": None}),
        "alone": lambda: load(llama(), tokenizer=path, **PLAIN),
    }
    with pytest.raises(ConfigurationError, match=str(path)):
        calls[role]()


class Full:
    """A file on a disk without room."""

    def __init__(self, file, after):
        self.file, self.left = file, after

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def close(self):
        self.file.close()
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_full_disk_says_where_it_stopped_and_that_it_goes_on(tmp_path, after):
    path = tmp_path / "answers.jsonl"
    wanted = [batch_file.BatchLine(f"n{n}", f"c{n}") for n in range(5)]

    def write_all():
        with batch_file.BatchResults(path) as file:
            file._file = Full(file._file, after)
            for one in wanted:
                file.write(one.answered(200, {}))

    with pytest.raises(ConfigurationError, match=rf"got {after} answers.*goes on"):
        write_all()
    with batch_file.BatchResults(path) as file:
        assert file.names == {f"n{n}" for n in range(after)}
        assert file.write(wanted[4].answered(200, {}))


def test_any_command_on_a_full_disk_says_so(outrider, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "/results/x.json")

    monkeypatch.setattr("outrider_lab.commands.demo._loaded", full, raising=False)
    monkeypatch.setattr("outrider.loading.load", full)
    code, _, said = outrider("demo")
    assert code == 2
    assert "cannot write /results/x.json" in said
    assert "make room" in said


class Failing:
    """A lane's run whose requests raise what is foreign to us."""

    done, errors = True, {}

    def submit(self, request):
        raise request


@pytest.mark.parametrize("error", [ZeroDivisionError("by 0"), KeyError("x"), RuntimeError("cuda")])
def test_a_foreign_error_of_a_request_is_that_request_s(error):
    heard = []
    loop = EngineLoop(lambda lane: Failing(), 2, heard.extend)
    loop.start()
    for _ in range(2):
        loop.submit([EngineRequest("a", error)])
    while len(heard) < 2:
        assert loop.is_alive()
    assert loop.alive
    loop.close()
    loop.join(5)
    for event in heard:
        status, body = to_response(event.error)
        assert status == 500
        assert type(error).__name__ in body["error"]["message"]


def test_only_an_engine_that_has_stopped_is_called_so():
    assert to_response(Broken("x"))[1]["error"]["code"] == "engine_stopped"
    status, body = to_response(ZeroDivisionError("by 0"))
    assert (status, body["error"]["message"]) == (500, "internal error: ZeroDivisionError")
