"""Nonsense for any option of any command ends in one line that says what to do, and code 2."""

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import safetensors.torch

from outrider.errors import ConfigurationError, PromptError
from outrider.sampling.sampling_params import SamplingParams
from outrider.shipped import shipped
from outrider_lab.bench.prompts import read_prompts, read_rows
from outrider_lab.certify import Power, matrix

FAST = ["--dtype", "float32", "--threads", "1"]
RANGE = "Invalid value for"  # the option parser names the bound in words of its version


@pytest.fixture
def places(tmp_path):
    """A folder, a file that is no results file, and files of bad prompts."""
    (tmp_path / "text").write_text("not a result\n")
    (tmp_path / "nothing").write_text("\n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    (tmp_path / "field").write_text(json.dumps({"text": "x"}))
    (tmp_path / "short").write_text("a long enough line of text\nx\n")
    shutil.copytree(
        shipped("target"), tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")
    )
    for name, config in (("odd", '{"model_type": "none"}'), ("half", '{"model_type": ')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("demo --repeats 0", RANGE),
        ("demo -n 0", RANGE),
        ("demo -k 0", RANGE),
        ("generate x --threads 0", RANGE),
        ("compare --dtype INT8", "Did you mean 'int8'?"),
        ("generate x --image {1}/MODEL_CARD.md", "leave --image and --audio out"),
        ("generate x --top-k 1.5", "'1.5'"),
        ("bench speed -k q", "'q'"),
        ("generate x --threads 100000", RANGE),
        ("generate x -k 1000000000000000", RANGE),
        ("generate x --width 1000000 --drafter beam", RANGE),
        ("generate x --branching 1000,1000", "at most 4096 nodes"),
        ("generate x --device mps", "device"),
        ("generate x --model {0}/bare", "cannot read the weights of the target model"),
        ("generate x --model {0}/odd", "a folder whose config.json cannot be used"),
        ("generate x --model {0}/half", "a folder whose config.json cannot be used"),
        ("compare --threads 0", RANGE),
        ("compare --assisted -1", RANGE),
        ("compare -k 4 -k 0", RANGE),
        ("compare -k 0 -k 4", "got '0' and '4'"),
        ("compare --model {1}/target --branching 3,2 --count 1", "give --draft-model"),
        ("compare --branching 1000,1000", "at most 4096 nodes"),
        ("compare --device gpu", "'cpu', 'cuda'"),
        ("certify --matrix {0}", "results go to a file"),
        ("certify --matrix {0}/text", "line 1 of"),
        ("certify --matrix {0}/new --only recal", "Did you mean 'recall'?"),
        ("certify --only recall", "--only chooses drafters of --matrix"),
        ("certify --prompts {0}", "cannot read prompts"),
        ("certify --prompts {0}/latin", "UTF-8"),
        ("certify --prompts {0}/field", "prompt field"),
        ("certify --prompts {0}/nothing", "empty file"),
        ("certify --prompts {0}/short", "at least 3 tokens"),
        ("bench wagner --device gpu", "'cpu', 'cuda'"),
        ("bench wagner --dtype half", "--dtype must be one of float32, bfloat16, float16"),
        ("bench wagner --bound 0", "--bound must be positive"),
        ("bench wagner --out {0}/text", "another --out"),
        ("bench wagner --skip 3", "--skip goes with --model"),
        ("bench wagner --model t --skip x", "numbers of layers"),
        ("bench chen --drafter suffix", "--drafter goes with --model"),
        ("bench chen --margin 0", "--margin must be between"),
        ("bench wagner --model t", "both --model and --draft-model"),
        (
            "bench wagner --model {0} --draft-model {0} --prompts {0}/short",
            "cannot load the target model",
        ),
        (
            "bench wagner --model {1}/target --draft-model {0} --prompts {0}/short",
            "the draft model",
        ),
        ("bench wagner --model {0}/bare --draft-model {0}/bare --prompts {0}/short", "weights"),
        ("bench wagner --prompts {0}/none", "cannot read prompts"),
        ("bench wagner --recordings {0}", "--model and --draft-model of a Whisper pair"),
        ("bench wagner --language fr", "goes with --recordings"),
        ("bench wagner --model t --draft-model d --recordings {0}/none", "no folder of recordings"),
        (
            "bench wagner --model t --draft-model d --recordings {0}",
            "no recording with a transcript",
        ),
        ("bench toy --out {0}/text", "another --out"),
        pytest.param(
            "bench k-sweep --no-pictures --out /proc",
            "another --out",
            marks=pytest.mark.skipif(not Path("/proc/self").exists(), reason="no such folder"),
        ),
        ("bench alpha --threads 0", RANGE),
        ("bench k-sweep -t -1", RANGE),
        ("bench k-sweep --draft-model t", "both --model and --draft-model"),
        ("bench k-sweep --no-pictures --out {0}/o --prompts {0}/field", "prompt field"),
        ("bench k-sweep --no-pictures --out {0}/o --prompts {0}/nothing", "empty file"),
        ("bench k-sweep --no-pictures --out {0}/text", "another --out"),
        ("bench budget --samples -1", RANGE),
    ],
)
def test_one_line_and_code_2(outrider, places, words, part):
    given = words.format(places, shipped("target").parent).split()
    if given[0] in ("generate", "certify") and "--threads" not in given:
        given += FAST
    elif "--prompts" in given and given[1] == "k-sweep":
        given += FAST
    code, _, err = outrider(*given)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err


@pytest.mark.parametrize("how", ["cut off", "one is missing", "one is of another size"])
def test_weights_that_are_not_whole_are_refused(outrider, places, how):
    """Without that, transformers would draw those that are missing at random."""
    path, key = places / "bare" / "model.safetensors", "model.layers.0.mlp.gate_proj.weight"
    raw = (shipped("target") / "model.safetensors").read_bytes()
    weights = safetensors.torch.load(raw)
    if how == "cut off":
        path.write_bytes(raw[: len(raw) // 2])
    else:
        other = {} if how == "one is missing" else {key: weights[key][:-1].clone()}
        del weights[key]
        path.write_bytes(safetensors.torch.save(weights | other, {"format": "pt"}))
    code, _, err = outrider("generate", "x", "--model", places / "bare", *FAST)
    assert code == 2
    assert "cannot read the weights of the target model" in err
    assert how == "cut off" or f"1 of them are not there, or of another size: {key}" in err


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_without_a_command_there_is_help(outrider, words):
    code, out, err = outrider(*words)
    assert code == 2
    assert "Usage: " in out
    assert "error" not in out + err


def test_no_memory_is_one_line(outrider, monkeypatch):
    def empty(*_, **__):
        raise MemoryError

    monkeypatch.setattr("outrider.loading.load", empty)
    code, _, err = outrider("generate", "x")
    assert code == 2
    assert err.startswith("error: out of memory")


def test_results_of_a_matrix_are_read_back(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    assert matrix.done(path, SamplingParams(), Power()) == {}
    path.write_text('{"key": "a", "settings": "other"}\n\n')
    assert matrix.read_results(path) == [{"key": "a", "settings": "other"}]
    path.write_text('{"key": "a", "sett')
    with pytest.raises(ConfigurationError, match=r"line 1 of .* remove the line"):
        matrix.read_results(path)


def test_rows_keep_what_their_lines_say(tmp_path):
    path = tmp_path / "rows"
    path.write_text('{"prompt": "one ", "reference": "two"}\n\nplain text\n{"prompt": ""}\n')
    with pytest.raises(PromptError, match=r"line 4 .* no text in prompt"):
        read_rows(path)
    path.write_text('{"prompt": "one ", "reference": "two"}\n\nplain text\n')
    assert read_rows(path) == [{"prompt": "one ", "reference": "two"}, {"prompt": "plain text"}]
    assert read_prompts(path) == ["one", "plain text"]


def test_only_a_line_feed_ends_a_prompt(tmp_path):
    path = tmp_path / "rows"
    inside = "a\u2028b\x85c\x0cd"
    text = json.dumps({"prompt": inside}, ensure_ascii=False) + "\r\n" + inside + "\n"
    path.write_bytes(text.encode("utf-8-sig"))  # with a byte order mark
    assert read_prompts(path) == [inside, inside]


def test_the_version_names_what_it_stands_on(outrider):
    code, out, err = outrider("--version")
    assert (code, err) == (0, "")
    assert out.startswith("outrider 0.")
    assert f"torch {metadata.version('torch')}," in out
    assert "transformers" in out
