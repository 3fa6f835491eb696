"""`outrider serve`: how many processes it is, and what it refuses before a model is read."""

import logging
import os
import socket
import threading

import pytest
import uvicorn
from served import linked
from starlette.testclient import TestClient

from outrider.cli import serve
from outrider.cli.serve import _parted
from outrider.server import engine_process
from outrider.server.engine_loop import Broken, EngineLoop


class Handler(logging.Handler):
    """Somebody else's, which no command may close."""

    closed = False

    def close(self):
        self.closed = True


ASK = {"model": "outrider-pair", "prompt": "import", "max_tokens": 4, "seed": 3}


@pytest.mark.parametrize(
    ("cores", "words", "parted", "told"),
    [
        (1, "", False, "one process for one core"),
        (2, "", True, "decoding in a process of its own"),
        (1, "--processes 2", True, "decoding in a process of its own"),
        (2, "--processes 1", False, "; one process)"),
    ],
)
def test_where_one_core_is_all_there_is_one_process(
    outrider, monkeypatch, shipped, cores, words, parted, told
):
    answers, others = [], []

    def started(load, room, still):
        assert still == 120
        others.append(linked(load, room))
        return others[-1]

    def run(server, sockets):
        assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ
        with TestClient(server.config.app, base_url="http://localhost") as client:
            answers.append(client.post("/v1/completions", json=ASK).json())
            assert client.get("/health").json()["status"] == "ok"
        with socket.create_connection(sockets[0].getsockname()):
            pass  # it listens

    # for another program, of several processes; where no such folder is, nothing would be counted
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/not/there")
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(range(cores)), raising=False)
    monkeypatch.setattr("outrider.loading.load", lambda *_, **__: shipped)
    monkeypatch.setattr(engine_process, "launch_engine", started)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    others_log = Handler()
    code, _, err = outrider(
        "serve", "--port", 0, "--max-num-seqs", 2, "--max-model-len", 128, *words.split()
    )
    assert code == 0
    assert not others_log.closed
    assert told in err
    lines = err.splitlines()
    assert lines[0] == "reading outrider-pair"  # a model may take a minute to read
    assert lines[1].startswith("listening at http://127.0.0.1:")
    assert bool(others) == parted
    assert answers[0]["choices"][0]["text"]
    assert answers[0]["usage"]["completion_tokens"] == 4


def test_where_cores_cannot_be_asked_for_all_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, parted in ((1, False), (8, True), (None, False)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert _parted(None)[0] == parted


@pytest.fixture
def places(tmp_path):
    """A file without keys, and one that is no text."""
    (tmp_path / "none").write_text("\n \n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--host 0.0.0.0", ["without a key", "--host 0.0.0.0", "--api-key-file"]),
        ("--host 0.0.0.0 --api-key-file {0}/no", ["cannot read the keys", "{0}/no", "the path"]),
        ("--api-key-file {0}", ["cannot read the keys", "directory"]),
        ("--api-key-file {0}/none", ["--api-key-file", "{0}/none", "put one in"]),
        ("--api-key-file {0}/latin", ["UTF-8", "{0}/latin"]),
        ("--host 192.0.2.1 --no-auth", ["cannot listen", "--host 192.0.2.1", "give others"]),
        ("--port 70000", ["--port", "65535"]),
        ("--max-num-seqs -1", ["--max-num-seqs", "greater than or equal to 1"]),
        ("--max-model-len 10", ["--max-model-len", "64"]),
        ("--timeout -1", ["--timeout", "positive", "-1"]),
        ("--timeout nan", ["--timeout", "positive", "nan"]),
        ("--metrics-prefix 9x", ["--metrics-prefix", "'9x'", "vllm:"]),
        ("--cors-origin *", ["--cors-origin", "'*'", "https://example.org"]),
        ("--cors-origin example.org", ["--cors-origin", "'example.org'"]),
        ("--cors-origin https://example.org/page", ["--cors-origin", "alone"]),
        ("--served-model-name=", ["--served-model-name", "leave it out"]),
        ("--processes 3", ["--processes", "2"]),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(outrider, monkeypatch, places, words, parts):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    code, _, err = outrider("serve", *words.format(places).split())
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(part.format(places) in err for part in parts)


def test_a_port_in_use_is_refused_before_a_model_is_read(outrider, monkeypatch):
    monkeypatch.setattr("outrider.loading.load", lambda *_, **__: pytest.fail("it is read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = outrider("serve", "--processes", 1, "--port", taken.getsockname()[1])
    assert code == 2
    assert "cannot listen" in err
    assert "--port 0" in err


@pytest.mark.parametrize("stuck", [False, True])
def test_an_engine_that_is_lost_ends_the_command_with_a_code(outrider, monkeypatch, shipped, stuck):
    """One thread of it stands still in a kernel: the process does not wait for it."""
    ended = []

    def run(server, sockets):
        server._engine._loop.fault = Broken("the engine ended no turn for 120 s")

    def gone(code):
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr("outrider.loading.load", lambda *_, **__: shipped)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(os, "_exit", gone)
    monkeypatch.setattr(serve.atexit, "_run_exitfuncs", lambda: None)
    if stuck:
        monkeypatch.setattr(EngineLoop, "is_alive", lambda loop: True)
    code, _, err = outrider("serve", "--port", 0, "--max-num-seqs", 1, "--processes", 1)
    assert code == 2
    assert "the engine ended no turn for 120 s" in err
    assert ended == [2] * stuck


def test_a_kernel_under_way_keeps_no_server_from_telling_what_ends_with_it(monkeypatch):
    """A compiler in the background, a temporary folder, other ranks; it waits a second for them."""
    told, goes_on = [], threading.Event()
    monkeypatch.setattr(serve.atexit, "_run_exitfuncs", lambda: told.append(1) or goes_on.wait(60))
    monkeypatch.setattr(serve.os, "_exit", lambda code: told.append(f"ended {code}"))
    try:
        serve._leave(3)
    finally:
        goes_on.set()
    assert told == [1, "ended 3"]
