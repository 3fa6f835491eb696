"""`outrider generate --image/--audio` and `outrider chat` with /image and /audio."""

import builtins
import sys

import image_folder
import pytest
import sound_folder

import outrider
from outrider import SamplingParams, Stop, cli

PLAIN = ["--dtype", "float32", "--threads", "1", "--temperature", "0"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folders of models, a picture and recordings."""
    place = tmp_path_factory.mktemp("media")
    image_folder.saved(place / "sees")
    sound_folder.saved(place / "hears")
    for at in (1, 2):
        (place / f"{at}.png").write_bytes(image_folder.png(image_folder.picture(at)))
        (place / f"{at}.wav").write_bytes(sound_folder.wav(sound_folder.samples(at, 0.3 * at)))
    (place / "broken.png").write_bytes(b"\x89PNG\r\n")
    (place / "broken.wav").write_bytes(b"RIFF")
    return place


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line: (exit code, stdout, stderr)."""

    def call(*words, typed=()):
        left = iter(typed)

        def read(prompt=""):
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as leave:
            code = int(leave.code or 0)
        return code, *capsys.readouterr()

    return call


def right(folder, *turns):
    """What the library answers to the last of these, plainly."""
    model = outrider.load(str(folder), drafter="none", dtype="float32", threads=1)
    return model.generate([list(turns)], SamplingParams(0), Stop(6)).texts[0]


def said(text, *parts):
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


KINDS = {"image": ("sees", "png"), "audio": ("hears", "wav")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_generate_reads_a_file(run, files, kind, stream):
    folder, suffix = KINDS[kind]
    texts = []
    for at in (1, 2):
        path = files / f"{at}.{suffix}"
        words = ["generate", "w20 w21", f"--{kind}", path, "-m", files / folder, "-n", 6]
        code, out, err = run(*words, *PLAIN, *stream)
        assert code == 0, err
        texts.append(out)
        part = {"type": kind, kind: str(path)}
        assert out == right(files / folder, said("w20 w21", part)) + "\n"
    assert texts[0] != texts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_about_a_file(run, files, kind):
    """The file goes with the next question, and stays in the conversation."""
    folder, suffix = KINDS[kind]
    path = files / f"1.{suffix}"
    words = ["chat", "-m", files / folder, "--max-new-tokens", 6, *PLAIN]
    typed = [f"/{kind} {files / 'none'}", f"/{kind} {path}", "w20 w21", "w30"]
    code, out, err = run(*words, typed=typed)
    assert code == 0, err
    assert f"no {kind} to read" in err
    first = said("w20 w21", {"type": kind, kind: str(path)})
    one = right(files / folder, first)
    two = right(files / folder, first, {"role": "assistant", "content": one}, said("w30"))
    assert "(the next question is about 1 of these)" in out
    lines = [line for line in out.splitlines() if line.startswith(one[:2])]
    assert lines == [one, two]


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_cannot_be_read_are_one_sentence(run, files, kind):
    folder, suffix = KINDS[kind]
    other, wrong = KINDS["audio" if kind == "image" else "image"]
    for path, model, part in [
        (files / "none", folder, f"no {kind} to read"),
        (files / f"broken.{suffix}", folder, "broken"),
        (files / f"1.{wrong}", folder, "cannot read|no picture"),
        (files / f"1.{suffix}", other, "image|audio|sound"),
    ]:
        code, out, err = run("generate", "w20", f"--{kind}", path, "-m", files / model, *PLAIN)
        assert (code, out) == (2, ""), err
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert any(one in err for one in part.split("|")), err


def test_a_chat_goes_on_behind_a_file_that_is_broken(run, files):
    words = ["chat", "-m", files / "sees", "--max-new-tokens", 6, *PLAIN]
    typed = [f"/image {files / 'broken.png'}", "w20 w21", "w20 w21"]  # of which one is refused
    code, out, err = run(*words, typed=typed)
    assert code == 0
    assert err.count("no picture that can be read") == 1
    assert right(files / "sees", said("w20 w21")) in out
