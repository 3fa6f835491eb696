"""A server that is ended while it answers: what is done in time is whole, the rest is told so."""

import asyncio
import json
import logging
import signal
import socket
import threading
import time

import pytest
from served import BODY, asked, events, far, serving

from outrider.server import http_server, serving as answers
from outrider.server.engine_loop import EngineLoop


@pytest.mark.parametrize("opened", [serving, far], ids=["here", "across a pipe"])
def test_whoever_waits_is_told_that_the_server_closes(shipped, opened):
    long = BODY | {"ignore_eos": True, "temperature": 0, "speculative_config": {"method": "none"}}
    long["max_tokens"] = 480
    with opened(shipped, max_num_seqs=1, grace=0.2) as server:
        got = []
        stream = events(server, long | {"stream": True})
        assert "choices" in json.loads(next(stream))
        waits = [threading.Thread(target=lambda: got.append(asked(server, long))) for _ in "ab"]
        for each in waits:
            each.start()
        ends = time.monotonic() + 20
        while server.engine.load.waiting < 2:
            assert time.monotonic() < ends
            time.sleep(0.01)
        server.uvicorn.should_exit = True
        *_, last = stream
        for each in waits:
            each.join(20)
    assert json.loads(last)["error"]["code"] == "closing"
    assert [(code, told["error"]["code"]) for code, told in got] == [(503, "closing")] * 2


@pytest.mark.parametrize("between", [0.0, 0.2], ids=["at once", "while it waits"])
def test_who_presses_ctrl_c_twice_waits_no_longer(shipped, caplog, between):
    """Clients were cut off without a word, and each left a traceback."""
    long = BODY | {"ignore_eos": True, "temperature": 0, "speculative_config": {"method": "none"}}
    with serving(shipped, grace=60.0) as server, caplog.at_level(logging.ERROR):
        stream = events(server, long | {"stream": True, "max_tokens": 480})
        next(stream)
        started = time.monotonic()
        server.uvicorn.handle_exit(signal.SIGINT, None)
        time.sleep(between)
        server.uvicorn.handle_exit(signal.SIGINT, None)
        *_, last = stream
        server.thread.join(30)
        assert time.monotonic() - started < 30
    assert json.loads(last)["error"]["code"] == "closing"
    assert not caplog.records


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_third_signal_waits_for_no_handler(shipped, monkeypatch, kind):
    """What hung outside the engine held the process up, however often somebody pressed Ctrl-C."""
    monkeypatch.setattr(http_server, "_TOLD", 0.1)
    hangs, body = threading.Event(), json.dumps(BODY).encode()

    async def forever(http, work):
        work.close()
        hangs.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(answers, "unless_gone", forever)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with serving(shipped, grace=60.0) as server:
        with socket.create_connection(server.socket.getsockname()) as client:
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert hangs.wait(20)
            for _ in range(2):
                server.uvicorn.handle_exit(kind, None)
            server.thread.join(1.5)
            assert server.thread.is_alive()  # as two of them give everybody time to be told
            server.uvicorn.handle_exit(kind, None)
            server.thread.join(20)
            assert not server.thread.is_alive()


@pytest.mark.parametrize("opened", [serving, far], ids=["here", "across a pipe"])
def test_a_long_step_keeps_nobody_from_being_told(shipped, opened, monkeypatch):
    """Sixteen long prompts being read: clients got a 500 without a word, and a server took 19 s."""
    begun, goes_on = threading.Event(), threading.Event()

    def long(loop, lane, run):
        begun.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(EngineLoop, "_step", long)
    monkeypatch.setattr(answers, "JOIN_SECONDS", 0.1)
    got = []
    try:
        with opened(shipped, grace=0.1) as server:
            wait = threading.Thread(target=lambda: got.append(asked(server, BODY)))
            wait.start()
            assert begun.wait(20)
            server.uvicorn.should_exit = True
            wait.join(20)
            server.thread.join(20)
            assert not goes_on.is_set()
            assert not server.thread.is_alive()
    finally:
        goes_on.set()
        server.engine.join(20)
    assert [(code, told["error"]["code"]) for code, told in got] == [(503, "closing")]


def test_who_does_not_read_or_write_is_cut_off(shipped, monkeypatch, caplog):
    monkeypatch.setattr(http_server, "_TOLD", 0.1)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    long = json.dumps(BODY | {"stream": True, "ignore_eos": True, "max_tokens": 480}).encode()
    with serving(shipped, grace=0.1) as server, caplog.at_level(logging.ERROR):
        place = server.socket.getsockname()
        with socket.create_connection(place) as deaf, socket.create_connection(place) as half:
            deaf.sendall(f"{head}content-length: {len(long)}\r\n\r\n".encode() + long)
            half.sendall(f"{head}content-length: 500\r\n\r\n{{".encode())
            ends = time.monotonic() + 20
            while not server.engine.load.running:
                assert time.monotonic() < ends
                time.sleep(0.01)
            server.uvicorn.should_exit = True
            server.thread.join(20)
            assert not server.thread.is_alive()
    assert not caplog.records
