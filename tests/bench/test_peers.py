"""`outrider bench peers`: processes, files, tables and the page."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from typer.testing import CliRunner

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider_lab.papers import app
from outrider_lab.papers.record import Store
from outrider_lab.peers import engines, gguf_files, page, speech, text
from tokenizers_of import byte_level

SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
}


@pytest.fixture(scope="module", params=[LlamaConfig, Qwen2Config])
def folder(request, tmp_path_factory):
    """A tiny checkpoint with a tokenizer."""
    torch.manual_seed(3)
    where = tmp_path_factory.mktemp("model") / request.param.model_type
    config = request.param(**SIZES, tie_word_embeddings=request.param is Qwen2Config)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(where)
    byte_level(b" the", b" of").save_pretrained(where)
    return where


def test_a_folder_becomes_a_file_with_the_same_numbers(folder, tmp_path):
    path = gguf_files.written(folder, tmp_path, "BF16")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=path.name, dtype=torch.float32
    )
    ids = torch.arange(20, 60)[None]
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
    said = "one of the two"
    tokenizer = gguf_files.tokenizer(path)
    assert tokenizer.decode(byte_level(b" the", b" of")(said)["input_ids"]) == said


def test_a_file_is_written_in_another_type_and_once(folder, tmp_path):
    first = gguf_files.written(folder, tmp_path, "BF16")
    small = gguf_files.written(first, tmp_path, "Q8_0")
    assert small.stat().st_size < 0.8 * first.stat().st_size
    before = small.stat().st_mtime_ns
    assert gguf_files.written(first, tmp_path, "Q8_0") == small
    assert small.stat().st_mtime_ns == before
    with pytest.raises(ConfigurationError, match="--weights are some of BF16"):
        gguf_files.written(first, tmp_path, "Q9")


def test_a_folder_of_another_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UnsupportedModel, match="got 'bert'"):
        gguf_files.written(tmp_path, tmp_path, "Q8_0")


def test_a_process_that_ends_says_its_last_words():
    words = {"engine": "none", "model": "m", "threads": 1, "cores": []}
    with pytest.raises(engines.EngineGone, match=r"none on m ended with status 1; .*KeyError"):
        engines.EngineProcess(sys.executable, words)


def test_several_threads_wait_as_they_do_where_nobody_has_set_anything(monkeypatch):
    """llama.cpp with two threads that sleep at once takes twice as long as with one."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("OUTRIDER_ISA", "avx2")
    asked = [("outrider", 1), ("outrider", 2), ("llama.cpp, server", 1), ("OpenVINO GenAI", 1)]
    told = [engines.surroundings({"engine": name, "threads": n}) for name, n in asked]
    assert [one.get("OMP_WAIT_POLICY") for one in told] == ["PASSIVE", None, None, "PASSIVE"]
    assert [one.get("OUTRIDER_ISA") for one in told] == ["avx2", "avx2", "avx2", None]
    assert [one["OMP_NUM_THREADS"] for one in told] == ["1", "2", "1", "1"]


def test_what_is_not_installed_is_said_with_the_command():
    none = engines.Peer("none", "no-such-package", "no_such_package")
    assert none.version(sys.executable) is None
    assert none.missing("python") == "none is not in python: python -m pip install no-such-package"
    assert engines.TRANSFORMERS.version(sys.executable)
    with pytest.raises(ConfigurationError, match="--peer is a Python"):
        none.version("/no/python")


def asked(**more):
    every = ("llama.cpp", "OpenVINO GenAI", "transformers")
    return text.TextRequest(Path("m.gguf"), None, "own", "peer", every, ("NGRAM_MOD",), **more)


def test_arms_are_what_the_engines_there_can_do():
    names = [arm.name for arm in text.arms(asked())]
    assert names[:4] == [text.PLAIN, text.DEFAULT, "llama.cpp", "llama.cpp NGRAM_MOD"]
    assert {"OpenVINO GenAI, lookup", "transformers, lookup"} < set(names)
    plain, default, llama = text.arms(asked())[:3]
    assert plain.words == default.words
    assert (plain.python, llama.python) == ("own", "peer")
    few = text.TextRequest(Path("m.gguf"), Path("d.gguf"), "own", "peer", ("llama.cpp",), ())
    assert [arm.name for arm in text.arms(few)][2:] == [
        text.DRAFT, "llama.cpp", "llama.cpp, draft model",
    ]  # fmt: skip


def row(cpu, said="a", **more):
    return {"cpu": cpu, "wall": 2 * cpu, "tokens": 10, "text": said, "memory": 9.0, **more}


def figures():
    first = {"first_cpu": 0.1, "first_wall": 0.2}
    rows = {
        text.PLAIN: [row(1.0, **first), row(2.0)],
        text.DEFAULT: [row(0.5, **first), row(2.5)],
        "llama.cpp": [row(2.0, "b", **first), row(2.0)],
        "llama.cpp NGRAM_MOD": [row(3.0, **first), row(2.0)],
    }
    starts = {name: {"wall": 1.0, "cpu": 1.0, "means": ""} for name in rows}
    return text.TextFigures(["code", "story"], rows, starts, {}, {1: 1.0})


def test_the_table_is_of_sums_and_the_best_other():
    plain, default, *_ = text.table(figures())
    assert default["ms a token, CPU"] == pytest.approx(150)
    assert default["wall"] == pytest.approx(300)
    assert default["behind the first token"] == pytest.approx(400 / 9)
    assert default["first token, ms (median)"] == 200
    assert default["times the best other's speed"].startswith("1.33 [")
    assert default["worst prompt, of our plain"] == pytest.approx(0.8)
    assert plain["texts as our plain"] == "2 of 2"
    assert text.best_peer(figures()) == "llama.cpp"
    assert text.by_kind(figures())[1] == {"engine": text.DEFAULT, "code": 50.0, "story": 250.0}


def test_several_threads_are_compared_by_the_clock():
    assert (asked().clock, asked(cores=(0, 1)).clock) == ("cpu", "wall")
    found = dataclasses.replace(figures(), clock="wall")
    for one in found.rows["llama.cpp NGRAM_MOD"]:
        one["wall"] = 1.0
    _, default, llama, mod = text.table(found)
    assert text.best_peer(found) == "llama.cpp NGRAM_MOD"
    assert (llama["ms a token, CPU"], mod["ms a token, CPU"]) == (200, 250)
    assert default["times the best other's speed"].startswith("0.33 [")
    assert default["behind the first token"] == pytest.approx(800 / 9)
    assert text.by_kind(found)[3] == {"engine": "llama.cpp NGRAM_MOD", "code": 100, "story": 100}


def test_the_worst_prompt_is_by_the_fastest_of_all_calls_and_sums_by_the_first():
    found = figures()
    found.rows[text.DEFAULT][1]["fastest"] = 1.6
    default = text.table(found)[1]
    assert default["worst prompt, of our plain"] == pytest.approx(1.25)
    assert default["ms a token, CPU"] == pytest.approx(150)


def test_only_ours_are_called_again_and_the_least_time_is_kept(monkeypatch, tmp_path):
    times = {"plain": iter([9, 3, 2.0, 4]), "default": iter([5, 1.0, 3]), None: iter([9, 7])}

    class Process:
        def __init__(self, _):
            self.ready, self.start = {"means": "", "cpu": 0.0}, 0.0

        def ask(self, way=None, widths=(), **_):
            return {"ms": {"1": 1.0}} if widths else row(next(times[way]))

        def close(self):
            pass

    monkeypatch.setattr(text, "started", Process)
    monkeypatch.setattr(text, "FIRSTS", 0)
    request = text.TextRequest(
        Path("m.gguf"), None, "o", "p", ("llama.cpp",), (), first_start=False, rounds=3
    )
    store = Store(tmp_path, "peers", {})
    found = text.run(request, [("code", [1])], store, lambda *_: None)
    calls = {name: (rows[0]["cpu"], rows[0].get("fastest")) for name, rows in found.rows.items()}
    assert calls == {text.PLAIN: (3, 2.0), text.DEFAULT: (5, 1.0), "llama.cpp": (7, None)}


def test_word_errors_and_time_for_a_minute():
    rows = {
        "outrider int8, plain, greedy": [row(3.0, "a b c d")],
        "outrider int8, drafted, greedy": [row(2.0, "a b c d")],
        "faster-whisper int8, greedy": [row(4.0, "a b c x")],
    }
    _, drafted, other = speech.table(speech.SpeechFigures([0.5], ["a b c d"], rows, {}))
    assert drafted["CPU s a minute"] == 4
    assert drafted["texts as plain"] == "1 of 1"
    assert drafted["of faster-whisper int8's CPU"] == "0.50"
    assert other["word errors, %"] == 25


def test_a_page_has_every_section_with_its_command_and_what_was_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_ISA", "avx2")
    tables = {"all": [{"engine": "outrider, plain", "ms": 1.5}, {"engine": "other", "ms": 2.0}]}
    for number in (1, 2):
        found = page.section("m", tables, {"x": "not there"}, {"x": "1"}, f"run {number}", (0, 1))
        page.keep(tmp_path, "m", found)
    page.keep(tmp_path, "n", found | {"title": "n"})
    target = tmp_path / "page.md"
    page.write(tmp_path, target, pictures=True)
    written = target.read_text()
    assert written.count("\n## ") == 2
    assert "run 1" not in written
    assert "| outrider, plain | 1.5 |" in written
    assert "- left out: x: not there" in written
    assert "`OUTRIDER_ISA=avx2 " in written
    assert "(page-m.svg)" in written
    assert "<svg" in (tmp_path / "page-m.svg").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "neither --model nor --whisper"),
        (["--model", "m.gguf", "--cores", "x"], r"--cores must be some of \[.*; try --cores \d+"),
        (["--model", "m.gguf", "--engines", "vllm"], "--engines"),
        (["--whisper", "w", "--engines", "faster-whisper"], "without --recordings"),
    ],
)
def test_what_is_asked_wrongly_is_said(words, said, tmp_path):
    with pytest.raises(ConfigurationError, match=said):
        CliRunner().invoke(app, ["peers", "--out", str(tmp_path), *words], catch_exceptions=False)


@pytest.mark.slow
def test_the_command_measures_and_goes_on_from_what_is_there(folder, tmp_path):
    words = ["peers", "--model", str(folder), "--out", str(tmp_path), "--quick"]
    words += ["--engines", "transformers,llama.cpp"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    written = (tmp_path / "peers.md").read_text()
    assert "transformers, lookup" in written
    assert "pip install xllamacpp" in written
    count = len((tmp_path / "peers.jsonl").read_text().splitlines())
    CliRunner().invoke(app, words, catch_exceptions=False)
    assert len((tmp_path / "peers.jsonl").read_text().splitlines()) == count
    (one,) = page.sections(tmp_path).values()
    table = json.loads(json.dumps(one["tables"]["all prompts"]))
    assert [row["texts as our plain"] for row in table][:2] == ["6 of 6", "6 of 6"]
