"""Files of requests: every line gets its row, once, however often the run is stopped."""

import json

import pytest
from served import NAME, PROMPT

from outrider import SamplingParams, Stop
from outrider.errors import ConfigurationError
from outrider.server import batch_file
from outrider.server.batch_file import BatchResults, requests


def line(custom_id, url="/v1/completions", **body):
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.8} | body
    if "messages" in body:
        del body["prompt"]
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path, lines):
    """A file of lines: objects, or text as it is."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    path.write_text("\n".join(texts) + "\n", "utf-8")
    return path


def read(path):
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()]


def answered(speculator, source, target, most=None, rows=3):
    """As the command does it; stopped after `most` rows, if that is said."""
    with BatchResults(target) as file:
        file.check({one.name for one in requests(source)}, source)
        left = [one for one in requests(source) if one.name not in file.names]
        told = batch_file.answers(speculator, NAME, rows, 256, left)
        for at, row in enumerate(told, start=1):
            assert file.write(row)
            if at == most:
                told.close()
                break
    return {row["custom_id"]: text(row) for row in read(target)}


def text(row):
    """Of a row that has one."""
    body = {} if row["response"] is None else row["response"]["body"]
    return body["choices"][0]["text"] if "choices" in body else None


@pytest.fixture
def seeded(tmp_path):
    """Eight requests of several lengths."""
    lines = [line(f"row {at}", seed=at, max_tokens=6 + 2 * at) for at in range(8)]
    return written(tmp_path / "in.jsonl", lines)


def test_texts_are_the_engines_own(shipped, seeded, tmp_path):
    plain = shipped.plain(shared_noise=True)
    texts = answered(shipped, seeded, tmp_path / "out.jsonl")
    assert texts == {
        f"row {at}": plain.generate(PROMPT, SamplingParams(0.8, seed=at), Stop(6 + 2 * at)).texts[0]
        for at in range(8)
    }
    assert (
        texts["row 7"]
        != answered(
            shipped,
            written(tmp_path / "other.jsonl", [line("row 7", seed=8, max_tokens=20)]),
            tmp_path / "other_out.jsonl",
        )["row 7"]
    ), "a seed has its text"


def test_a_run_that_was_stopped_goes_on(shipped, seeded, tmp_path):
    whole = answered(shipped, seeded, tmp_path / "whole.jsonl")
    out = tmp_path / "out.jsonl"
    first = answered(shipped, seeded, out, most=3)
    assert len(first) == 3
    with out.open("a") as file:  # the fourth row, as a power cut leaves it
        file.write('{"id": "batch_req_')
    before = read(written(tmp_path / "rows", out.read_text().splitlines()[:3]))
    assert answered(shipped, seeded, out) == whole
    rows = read(out)
    assert rows[:3] == before, "what was there is not touched"
    assert len(rows) == len({row["id"] for row in rows}) == 8
    stamp = out.read_bytes()
    assert answered(shipped, seeded, out) == whole
    assert out.read_bytes() == stamp, "nothing is left to do"


BAD = {
    "nonsense": "no JSON",
    "[" * 100_000: "no JSON",
    "[1, 2]": "no JSON object",
    '"text"': "no JSON object",
    json.dumps(line("g") | {"custom_id": 3}): "custom_id must be a text; got 3",
    json.dumps(line("g") | {"method": "GET"}): "method must be POST; got 'GET'",
    json.dumps(line("g") | {"url": "/v1/embeddings"}): "url must be /v1/completions or",
    json.dumps(line("g") | {"url": ["/v1/completions"]}): "url must be /v1/completions or",
    json.dumps(line("g") | {"body": "x"}): "body must be an object; got 'x'",
    json.dumps(line("g") | {"priority": 3}): "unknown field 'priority'",
    json.dumps(line("good", seed=1)): "was given in line 1",
}


def test_bad_lines_are_rows_with_an_error_and_lose_nothing(shipped, tmp_path):
    source = written(tmp_path / "in.jsonl", [line("good", seed=1), "", *BAD, line("last", seed=2)])
    with source.open("ab") as file:
        file.write(b'{"custom_id": "\xff"}\n')
    texts = answered(shipped, source, tmp_path / "out.jsonl")
    rows = read(tmp_path / "out.jsonl")
    assert len(rows) == len({row["id"] for row in rows}) == len(BAD) + 3
    assert None not in (texts["good"], texts["last"])
    faults = {row["error"]["message"] for row in rows if row["error"]}
    for number, part in enumerate(BAD.values(), start=3):
        (message,) = [one for one in faults if one.startswith(f"line {number}: ")]
        assert part in message
    assert len(faults) == len(BAD) + 1
    named = [row["custom_id"] for row in rows if row["error"]]
    assert (named.count("g"), named.count(None)) == (5, len(BAD) + 1 - 5), "what a line says it is"


ENDLESS = {"name": "x", "schema": {"type": "number", "maximum": float("inf")}}


def test_a_fault_of_our_own_is_a_row_and_ends_no_run(shipped, tmp_path, monkeypatch):
    def broken(body):
        raise LookupError("nobody has foreseen this")

    monkeypatch.setattr("outrider.server.request_parsing.grammar_of", broken)
    source = written(tmp_path / "in.jsonl", [line("bad"), line("worse")])
    answered(shipped, source, tmp_path / "out.jsonl")
    rows = [row["response"] for row in read(tmp_path / "out.jsonl")]
    assert [row["status_code"] for row in rows] == [500, 500]
    assert "LookupError: nobody has foreseen this" in rows[0]["body"]["error"]["message"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("asked", "status", "part"),
    [
        ({"nonsense": 3}, 400, "nonsense: this field is not supported"),
        ({"stream": True}, 400, "has no streams"),
        ({"model": "another"}, 404, "no model 'another'"),
        ({"prompt": []}, 400, "prompt"),
        ({"max_tokens": 10_000}, 400, "ask for at most 240"),
        ({"n": 4}, 400, "4 completions of 1 prompts; there is room for 3"),
        ({"timeout": 1e-9}, 504, "deadline"),
        ({"messages": [{"role": "user", "content": "x"}]}, 400, "chat template"),
        ({"response_format": {"type": "json_schema", "json_schema": ENDLESS}}, 400, "infinite"),
    ],
)
def test_requests_that_cannot_be_answered_say_why(shipped, tmp_path, asked, status, part):
    url = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    source = written(tmp_path / "in.jsonl", [line("bad", url, **asked), line("good", seed=1)])
    assert answered(shipped, source, tmp_path / "out.jsonl")["good"]
    rows = {row["custom_id"]: row["response"] for row in read(tmp_path / "out.jsonl")}
    assert rows["bad"]["status_code"] == status
    assert part in rows["bad"]["body"]["error"]["message"]
    assert len(rows) == 2


def test_scores_of_prompts_do_not_fill_the_queue(shipped, tmp_path):
    """Beside one row only three requests to the engine could be open, and each of these is two."""
    asked = {"echo": True, "logprobs": 0, "max_tokens": 2}
    lines = [line(str(at), prompt=f"import {at}", **asked) for at in range(6)]
    source = written(tmp_path / "in.jsonl", lines)
    answered(shipped, source, tmp_path / "out.jsonl", rows=1)
    rows = [row["response"] for row in read(tmp_path / "out.jsonl")]
    assert [row["status_code"] for row in rows] == [200] * 6


@pytest.fixture
def three(tmp_path):
    """A file of three requests, and one of their answers, of no model."""
    source = written(tmp_path / "in.jsonl", [line(name) for name in "abc"])
    with BatchResults(tmp_path / "out.jsonl") as file:
        for wanted in requests(source):
            file.write(wanted.answered(200, {"choices": [{"text": wanted.custom_id}]}))
    return source, tmp_path / "out.jsonl"


def test_a_file_that_was_cut_anywhere_keeps_its_whole_rows(three):
    _, out = three
    whole = out.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 0x0A]
    near = {end + by for end in ends for by in (-2, -1, 0, 1)}
    for cut in sorted({0, *range(1, len(whole), 37), *near} - {len(whole) + 1}):
        out.write_bytes(whole[:cut])
        rows = sum(end <= cut for end in ends)
        with BatchResults(out) as file:
            assert len(file.names) == rows
            assert file.dropped == (cut not in (0, *ends))
        assert out.read_bytes() == whole[: ends[rows - 1] if rows else 0]
    assert sorted(path.name for path in out.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_rows_with_errors_are_asked_again(three):
    source, out = three
    wanted = list(requests(source))
    with BatchResults(out) as file:
        assert not file.write(wanted[0].answered(200, {})), "none twice"
        assert not file.dropped
    rows = [wanted[0].answered(200, {}), wanted[1].answered(503, {}), wanted[2].refused()]
    with BatchResults(written(out, rows)) as file:
        assert (file.names, file.dropped) == ({wanted[0].name}, 2)
        assert file.write(wanted[1].answered(200, {}))
        assert file.faults == 0
        assert file.write(wanted[2].refused())
        assert file.faults == 1
    assert [row["custom_id"] for row in read(out)] == ["a", "b", "c"]


def test_files_that_do_not_belong_together_are_refused_and_left_alone(three):
    source, out = three
    before = out.read_bytes()
    written(source, [line("a"), line("b", max_tokens=13), line("c")])
    with (
        BatchResults(out) as file,
        pytest.raises(ConfigurationError, match=r"other requests than .* got 1 such rows"),
    ):
        file.check({one.name for one in requests(source)}, source)
    with BatchResults(out), pytest.raises(ConfigurationError, match="another process writes"):
        BatchResults(out)
    assert out.read_bytes() == before
    for strange in ("no JSON\n", "[1]\n", '{"id": 3}\n'):
        out.write_bytes(before + strange.encode() + before)
        with pytest.raises(ConfigurationError, match=r"line 4 of .* is no answer of a batch"):
            BatchResults(out)
        assert out.read_bytes() == before + strange.encode() + before


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_stops_ends_the_run_and_loses_no_row(shipped, seeded, tmp_path, monkeypatch):
    from outrider.engine.engine_run import EngineRun

    whole = answered(shipped, seeded, tmp_path / "whole.jsonl")
    step, turns = EngineRun.step, iter(range(8))

    def broken(run):
        if next(turns, None) is None:
            raise RuntimeError("the machine is on fire")
        return step(run)

    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(EngineRun, "step", broken)
        with pytest.raises(RuntimeError, match="on fire"):
            answered(shipped, seeded, out)
    assert 0 < len(read(out)) < 8
    assert answered(shipped, seeded, out) == whole
