"""`outrider transcribe`: files in, texts and captions out, failures named, exit codes."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import whispers
from test_audio import written as wav

from outrider import cli
from outrider.errors import ConfigurationError
from outrider.testing import llama
from outrider.text.speculator import Speculator

BRIEF = ["--dtype", "float32", "--threads", "1", "-t", "0", "--drafter", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Whisper as transformers saves it."""
    path = tmp_path_factory.mktemp("whisper")
    model = whispers.whisper()
    model.generation_config.max_length = 12
    model.save_pretrained(path)
    whispers.tokenizer().save_pretrained(path)
    whispers.extractor().save_pretrained(path)
    return str(path)


@pytest.fixture
def talks(tmp_path):
    return [str(wav(tmp_path / f"{n}.wav", whispers.sound(n, n))) for n in (1, 3)]


def run(capsys, monkeypatch, *words):
    """Exit code, standard output, errors."""
    monkeypatch.setattr("sys.argv", ["outrider", "transcribe", *map(str, words)])
    code = 0
    try:
        cli.main()
    except SystemExit as leave:
        code = leave.code or 0
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_recording_becomes_text(capsys, monkeypatch, folder, talks):
    code, out, err = run(capsys, monkeypatch, talks[1], "-m", folder, *BRIEF)
    assert code == 0, err
    assert out.strip()
    again = run(capsys, monkeypatch, talks[1], "-m", folder, "-f", "json", *BRIEF)
    document = json.loads(again[1])
    lines = [segment["text"].strip() for segment in document["segments"]]
    assert [line for line in out.split("\n") if line] == [line for line in lines if line]
    other = run(capsys, monkeypatch, talks[0], "-m", folder, *BRIEF)
    assert other[1] != out


def test_several_are_written_to_a_folder(capsys, monkeypatch, folder, talks, tmp_path):
    into = tmp_path / "out"
    words = [*talks, "-m", folder, "-o", into, "-f", "srt", "-f", "json", *BRIEF]
    code, out, err = run(capsys, monkeypatch, *words, "--timestamps", "word")
    assert code == 0, err
    assert out == ""
    assert sorted(path.name for path in into.iterdir()) == ["1.json", "1.srt", "3.json", "3.srt"]
    assert "words" in json.loads((into / "3.json").read_text("utf-8"))["segments"][0]
    before = {path.name: path.read_bytes() for path in into.iterdir()}
    run(capsys, monkeypatch, *words, "--timestamps", "word")
    assert {path.name: path.read_bytes() for path in into.iterdir()} == before


def test_standard_input_is_a_recording(capsys, monkeypatch, folder, talks, tmp_path):
    plain = run(capsys, monkeypatch, talks[1], "-m", folder, *BRIEF)
    typed = io.TextIOWrapper(io.BytesIO(Path(talks[1]).read_bytes()))
    monkeypatch.setattr("sys.stdin", typed)
    code, out, err = run(capsys, monkeypatch, "-", "-m", folder, "--verbose", *BRIEF)
    assert (code, out) == (0, plain[1]), err
    assert f"target {folder}" in err
    assert "drafter none" in err
    assert f"target {folder}" not in plain[2]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"no sound")))
    code, out, err = run(capsys, monkeypatch, "-", talks[0], "-m", folder, *BRIEF)
    assert code == 1
    assert "failed: standard input: " in err
    assert "standard-input" not in err
    os.mkfifo(tmp_path / "pipe")  # a header is looked at before the samples are read
    code, _, err = run(capsys, monkeypatch, tmp_path / "pipe", "-m", folder, *BRIEF)
    assert code == 1
    assert "got a pipe" in err


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_heard(
    capsys, monkeypatch, talks
):
    monkeypatch.setattr("outrider.loading.load", lambda *a, **k: pytest.fail("it was loaded"))
    code, _, err = run(capsys, monkeypatch, talks[0], "-m", "x", "-o", f"{talks[1]}/texts")
    assert code == 2
    assert "cannot write to --output (Not a directory)" in err


def test_files_that_fail_are_named_and_the_others_go_on(
    capsys, monkeypatch, folder, talks, tmp_path
):
    empty = tmp_path / "empty.wav"
    empty.write_bytes(b"")
    missing = tmp_path / "missing.wav"
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"not sound at all")
    files = [empty, talks[0], missing, noise, talks[1]]
    code, out, err = run(capsys, monkeypatch, *files, "-m", folder, *BRIEF)
    assert code == 1
    assert out.count("# ") >= 2
    for path in (empty, missing, noise):
        assert f"failed: {path}" in err
    assert "3 of 5 recordings failed" in err
    assert "Traceback" not in err


def test_the_wrong_model_or_language_is_refused_before_weights_are_read(
    capsys, monkeypatch, talks, tmp_path
):
    whispers.whisper().config.save_pretrained(tmp_path)
    whispers.whisper().generation_config.save_pretrained(tmp_path)
    code, _, err = run(capsys, monkeypatch, talks[0], "-m", tmp_path, "--language", "klingon")
    assert code == 2
    assert "klingon" in err
    llama().config.save_pretrained(tmp_path)
    code, _, err = run(capsys, monkeypatch, talks[0], "-m", tmp_path)
    assert code == 2
    assert f"{tmp_path} does not turn speech into text" in err.replace("\n", "")


def test_texts_are_printed_in_the_order_of_their_files(capsys, monkeypatch, folder, tmp_path):
    files = [str(wav(tmp_path / f"{n}.wav", whispers.sound(n, n))) for n in (40, 1, 3)]
    code, out, err = run(capsys, monkeypatch, *files, "-m", folder, *BRIEF)
    assert code == 0, err
    assert [line[2:] for line in out.splitlines() if line.startswith("# ")] == files


def test_without_a_model_it_says_what_fetches_one(capsys, monkeypatch, talks):
    code, _, err = run(capsys, monkeypatch, talks[0])
    assert code == 2
    assert "hf download openai/whisper-base" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-f", "doc"], "unknown format"),
        (["--timestamps", "phone"], "unknown timestamps"),
        (["-t", "-1"], "temperature must be"),
        (["-f", "srt", "-f", "vtt"], "--output"),
        (["--reference", "a.srt", "--reference", "b.srt"], "--reference is one for each file"),
        (["--language", "klingon", "-m", "FOLDER"], "unknown language"),
        (["-m", "/no/such/folder"], "cannot load the target"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(capsys, monkeypatch, folder, talks, words, message):
    words = [folder if word == "FOLDER" else word for word in words]
    code, _, err = run(capsys, monkeypatch, talks[0], *words, *BRIEF)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_of_recordings_with_one_name_those_are_named(capsys, monkeypatch, folder, talks, tmp_path):
    words = ["one/a.wav", "b.wav", "two/a.mp3", "-o", str(tmp_path), "-m", folder]
    code, _, err = run(capsys, monkeypatch, *words, *BRIEF)
    assert code == 2
    assert "['one/a.wav', 'two/a.mp3']; give each its own --output" in err.replace("\n", " ")


def test_compare_tells_both_times_and_that_the_texts_are_one(
    capsys, monkeypatch, folder, talks, tmp_path
):
    reference = tmp_path / "talk.txt"
    reference.write_text("something else", "utf-8")
    brief = [word for word in BRIEF if word not in ("--drafter", "none")]
    words = [talks[1], "-m", folder, "--reference", reference, "--compare", *brief]
    code, _, err = run(capsys, monkeypatch, *words)
    assert code == 0, err
    assert "encoder s" in err
    assert "speculative" in err
    assert "…" not in err
    assert "the same text in 1 of 1" in err


@pytest.mark.exhaustive
def test_compare_times_arms_that_are_warm_each_of_them_first_in_turn(
    capsys, monkeypatch, folder, talks, tmp_path
):
    asked, right = [], Speculator.transcribe

    def transcribe(self, audio, **options):
        kind = "a piece" if isinstance(audio, np.ndarray) else Path(audio).name
        asked.append((self.engine.drafter.name, kind, options.get("reference")))
        return right(self, audio, **options)

    monkeypatch.setattr(Speculator, "transcribe", transcribe)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name, "utf-8")
    captions = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    brief = [word for word in BRIEF if word not in ("--drafter", "none")]
    words = ["--reference", captions[0], "--reference", captions[1], "--compare"]
    code, _, err = run(capsys, monkeypatch, *talks, "-m", folder, *words, *brief)
    assert code == 0, err
    assert asked == [
        ("none", "a piece", None),
        ("reference_lookup", "a piece", captions[0]),
        ("none", "1.wav", None),
        ("reference_lookup", "1.wav", captions[0]),
        ("reference_lookup", "3.wav", captions[1]),
        ("none", "3.wav", None),
    ]
    assert "the same text in 2 of 2" in err


def test_a_draft_of_the_models_own_layers(capsys, monkeypatch, folder, talks):
    brief = [word for word in BRIEF if word not in ("--drafter", "none")]
    plain = run(capsys, monkeypatch, talks[1], "-m", folder, *BRIEF)
    mine = run(capsys, monkeypatch, talks[1], "-m", folder, "--draft-layers", "0", *brief)
    assert mine[0] == 0, mine[2]
    assert mine[1] == plain[1]


def test_the_settings_are_checked_before_anything_is_loaded(capsys, monkeypatch, talks):
    monkeypatch.setattr("outrider.loading.load", lambda *a, **k: pytest.fail("it was loaded"))
    code, _, err = run(capsys, monkeypatch, talks[0], "-m", "x", "--timestamps", "never")
    assert code == 2
    assert isinstance(ConfigurationError("x"), ValueError)
    assert "unknown timestamps" in err
    for plainly in ([], ["--drafter", "none"]):
        code, out, err = run(capsys, monkeypatch, talks[0], "-m", "x", "--compare", *plainly)
        assert (code, out) == (2, "")
        assert "nothing to compare" in err


def test_beams_are_those_of_python(capsys, monkeypatch, folder, talks):
    words = [talks[0], "-m", folder, *BRIEF, "-f", "json", "-l", "en"]
    searched = [*words, "--beam-size", 3, "--patience", 1, "--length-penalty", 0.5]
    code, out, err = run(capsys, monkeypatch, *searched)
    assert code == 0, err
    found = json.loads(out)
    asked = {"beam_size": 3, "patience": 1.0, "length_penalty": 0.5}
    ear = whispers.loaded()
    ear.hearing.model.generation_config.max_length = 12
    mine = ear.transcribe(talks[0], temperature=0, language="en", **asked)
    assert [one["tokens"] for one in found["segments"]] == [list(s.tokens) for s in mine.segments]
    greedy = json.loads(run(capsys, monkeypatch, *words)[1])
    assert greedy["segments"] != found["segments"]
    code, _, err = run(capsys, monkeypatch, *words, "--patience", 1)
    assert code == 2
    assert "beam_size" in err


@pytest.mark.parametrize("words", [["hello"], ["--source", "hello"]])
def test_generate_points_to_transcribe(capsys, monkeypatch, folder, words):
    typed = ["outrider", "generate", *words, "--model", folder, "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", [*typed, "--threads", "1", "--planner", "fixed"])
    with pytest.raises(SystemExit) as leave:
        cli.main()
    assert leave.value.code == 2
    assert "use `outrider transcribe FILE -m MODEL`" in capsys.readouterr().err.replace("\n", " ")


def test_references_by_name_and_home(capsys, monkeypatch, folder, talks, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "talk.wav").write_bytes(Path(talks[0]).read_bytes())
    (tmp_path / "said").write_text("w3 w4")
    brief = ["-m", folder, *BRIEF[:-2]]
    words = ["~/talk.wav", "--reference", "~/said", *brief]
    assert run(capsys, monkeypatch, *words)[::2] == (0, "")
    code, _, err = run(capsys, monkeypatch, talks[0], "--reference", "./nothing", *brief)
    told = "there is no file './nothing': it is read as the reference itself"
    assert (code, " ".join(err.split())) == (0, told)
    code, _, err = run(capsys, monkeypatch, "x.wav", "--reference", "said.srt", "-m", "no/model")
    assert code == 2
    assert "cannot read the reference; got 'said.srt'" in err
