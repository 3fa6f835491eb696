"""`outrider batch` from the command line."""

import itertools
import json

import pytest

from outrider.cli import batch
from outrider.server import batch_file


def row(custom_id, **body):
    body = {"model": "outrider-pair", "prompt": "import os\n", "max_tokens": 4} | body
    url = "/v1/completions"
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


@pytest.fixture
def source(tmp_path):
    """A file of two requests and a line that is none."""
    (tmp_path / "in.jsonl").write_text(row("a", seed=1) + "nonsense\n" + row("b", temperature=0))
    return tmp_path / "in.jsonl"


def test_a_file_is_answered_and_goes_on(shipped, source, outrider, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        batch, "load_speculator", lambda setup, dtype: loaded.append(dtype) or shipped
    )
    out = source.with_name("out.jsonl")
    command = ("batch", source, out, "--max-num-seqs", 2, "--max-model-len", 128)
    code, said, told = outrider(*command)
    assert (code, said) == (1, "")
    assert told == f"3 requests, 1 of them with an error: {out}\n"
    rows = {one["custom_id"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert rows.keys() == {"a", None, "b"}
    assert rows["a"]["response"]["body"]["usage"]["completion_tokens"] == 4
    code, said, told = outrider(*command)
    assert code == 1
    assert "2 of 3 requests have their answers already" in told
    source.write_text(row("a", seed=1) + row("b", temperature=0))
    code, said, told = outrider(*command)
    assert code == 0
    assert told.endswith(f"2 requests, 0 of them with an error: {out}\n")
    assert len(loaded) == 2, "with nothing left to answer no model is loaded"


def test_what_cannot_be_done_is_said_before_a_model_is_loaded(source, outrider, monkeypatch):
    monkeypatch.setattr(batch, "load_speculator", None)
    out = source.with_name("out.jsonl")
    for command, part in [
        (("batch", source.with_name("none"), out), "no file of requests"),
        (("batch", source.parent, out), "no file of requests"),
        (("batch", source, source), "written over the requests"),
        (("batch", source, source.parent / "in.jsonl"), "written over the requests"),
        (("batch", source, source.parent), "Is a directory"),
        (("batch", source, source.parent / "none" / "out.jsonl"), "No such file or directory"),
        (("batch", source, source / "out.jsonl"), "check the path"),
    ]:
        code, _, told = outrider(*command)
        assert code == 2
        assert part in " ".join(told.split())
    out.write_text("my diary\n")
    code, _, told = outrider("batch", source, out)
    assert code == 2
    assert "no answer of a batch" in told
    assert out.read_text() == "my diary\n"
    assert len(source.read_text().splitlines()) == 3


def test_a_run_that_is_interrupted_says_what_is_there(shipped, source, outrider, monkeypatch):
    monkeypatch.setattr(batch, "load_speculator", lambda setup, dtype: shipped)
    out = source.with_name("out.jsonl")
    answers = batch_file.answers
    with monkeypatch.context() as once:
        once.setattr(batch_file, "answers", lambda *given: stopped(answers, *given))
        code, _, told = outrider("batch", source, out, "--max-model-len", 128)
    assert code == 130
    assert told == (
        f"interrupted; 1 of 3 requests have their rows in {out}; the same command goes on\n"
    )
    assert outrider("batch", source, out, "--max-model-len", 128)[0] == 1
    assert len(out.read_text().splitlines()) == 3


def stopped(answers, *given):
    """One answer, then Ctrl-C."""
    yield from answers(*given[:-1], itertools.islice(given[-1], 1))
    raise KeyboardInterrupt
