"""Sources and references on the command line."""

import io
import json
import sys
from pathlib import Path

import pytest
from transformers import WhisperConfig

import words
from outrider import SamplingParams, Stop, load
from outrider.testing import encoder_decoder, llama

FAST = ["--dtype", "float32", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BART with a tokenizer of words, as transformers saves them."""
    path = tmp_path_factory.mktemp("bart")
    model = encoder_decoder("bart")
    model.generation_config.no_repeat_ngram_size = 3
    model.save_pretrained(path)
    words.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def answer(folder):
    def made(**options):
        speculator = load(folder, dtype="float32", threads=1)
        done = speculator.generate("w9 w4 w7", SamplingParams(0), Stop(12), **options)
        return done.texts[0]

    return made


@pytest.mark.parametrize("how", ["text", "file", "input"])
def test_a_source_is_answered(outrider, folder, answer, tmp_path, how, monkeypatch):
    path = tmp_path / "source.txt"
    path.write_text("w9 w4 w7")
    source = {"text": "w9 w4 w7", "file": str(path), "input": "-"}[how]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w9 w4 w7")))
    typed = ["generate", "--model", folder, "--source", source, "-n", "12", *FAST]
    code, out, err = outrider(*typed)
    assert (code, out, err) == (0, answer() + "\n", "")


def test_an_answer_that_has_begun_and_a_reference(outrider, folder, answer, tmp_path):
    path = tmp_path / "reference.txt"
    path.write_text(answer(decoder_prompts="w12"))
    typed = ["generate", "w12", "--model", folder, "--source", "w9 w4 w7", "-n", "12", *FAST]
    code, out, err = outrider(*typed, "--reference", path, "--json", "-v")
    document = json.loads(out)
    assert code == 0
    assert document["text"] == answer(decoder_prompts="w12")
    assert document["drafter"] == "reference_lookup"
    assert document["stats"]["mean_acceptance_length"] > 1.5
    assert "rules of the model: no_repeat_ngram_size=3" in err


@pytest.mark.parametrize("how", [[], ["--drafter", "reference_lookup"]])
def test_a_reference_is_copied_from_without_saying_how(outrider, tmp_path, how):
    path = tmp_path / "previous.py"
    path.write_text("def area(w, h):\n    return w * h\n")
    typed = ["generate", "import math", "--reference", path, "-n", "4", "-k", "4", "--json"]
    code, out, err = outrider(*typed, *how, *FAST)
    assert (code, err) == (0, "")
    assert json.loads(out)["drafter"] == "reference_lookup"


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (["w5", "--model", "it"], ["reads a source", "--source TEXT"]),
        (["--source", "", "--model", "it"], ["source is empty"]),
        (["--source", "w5", "--reference", "no/such", "--model", "it"], ["reference", "no/such"]),
        (["--source", "w5"], ["--source is what an encoder-decoder reads", "--model"]),
        (
            ["x", "--reference", "pyproject.toml", "--drafter", "recall"],
            ["'recall' copies from no reference", "--drafter reference_lookup"],
        ),
        (
            ["x", "--reference", "pyproject.toml", "--draft-model", "no/such"],
            ["'draft_model' copies from no reference", "leave --draft-model out"],
        ),
        (
            ["--source", "w5", "--drafter", "none", "--ngram", "1,2", "--model", "it"],
            ["no use for ngram"],
        ),
    ],
)
def test_refused(outrider, folder, typed, parts):
    typed = [folder if word == "it" else word for word in typed]
    code, out, err = outrider("generate", *typed, *FAST)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    for part in parts:
        assert part in " ".join(err.split())


@pytest.mark.parametrize(
    ("config", "typed", "said"),
    [
        (lambda: encoder_decoder("bart").config, ["w5"], "reads a source"),
        (lambda: llama().config, ["--source", "w5"], "--source is what an encoder-decoder reads"),
        (WhisperConfig, ["w5"], "a Whisper model, which hears recordings"),
    ],
)
def test_a_target_of_the_wrong_kind_is_refused_before_weights_are_read(
    outrider, tmp_path, config, typed, said
):
    config().save_pretrained(tmp_path)  # it has no weights
    code, _, err = outrider("generate", *typed, "--model", tmp_path, *FAST)
    assert code == 2
    assert said in " ".join(err.split())


def test_compare_refuses_a_source(outrider, folder):
    code, out, err = outrider("compare", "--model", folder, *FAST)
    assert (code, out) == (2, "")
    assert "got an encoder-decoder" in " ".join(err.split())


@pytest.mark.parametrize("typed", ["surce.txt", "~/nothing", "../text", f"{Path.cwd()}/surce"])
def test_a_source_that_looks_like_a_file_and_is_none(outrider, folder, typed):
    code, _, err = outrider("generate", "--model", folder, "--source", typed, "-n", "2", *FAST)
    assert (code, err) == (0, f"there is no file {typed!r}: it is read as the source itself\n")


@pytest.mark.parametrize("typed", ["w9", "w9/w4", "/w9/w4/w7", "see w4.txt", "w9 " * 2000, "~w9"])
def test_a_source_that_only_has_slashes_or_dots_is_text(outrider, folder, typed):
    told = outrider("generate", "--model", folder, "--source", typed[:200], "-n", "2", *FAST)
    assert told[::2] == (0, "")


def test_home_in_options(outrider, folder, answer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(folder)
    (tmp_path / "text").write_text("w9 w4 w7")
    typed = ["generate", "--model=~/model", "--source=~/text", "-n", "12", *FAST]
    assert outrider(*typed) == (0, answer() + "\n", "")
    typed = ["generate", "--model=~/model", "--source=w9 w4 w7", "-n", "12", *FAST]
    assert outrider(*typed, "--reference=~/text") == (0, answer() + "\n", "")


def test_home_in_python(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    llama().save_pretrained(tmp_path / "model")
    words.tokenizer().save_pretrained(tmp_path / "words")
    more = {"tokenizer": "~/words", "dtype": "float32", "threads": 1}
    load("~/model", "~/model", draft_tokenizer="~/words", **more)
    load("~/model", ["~/model"] * 2, drafter="paths", **more)


@pytest.mark.parametrize("command", ["serve", "batch", "chat"])
def test_commands_of_prompts_name_the_one_that_reads_a_source(outrider, folder, tmp_path, command):
    body = {"model": folder.name, "prompt": "w9 w4"}
    one = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(one) + "\n")
    more = {
        "serve": ["--port", "0", "--processes", "1"],
        "batch": [tmp_path / "in.jsonl", tmp_path / "out.jsonl"],
        "chat": [],
    }
    code, out, err = outrider(command, *more[command], "--model", folder, *FAST)
    assert code == 2
    assert not out
    assert "error: " in err
    assert "outrider generate --source" in err
