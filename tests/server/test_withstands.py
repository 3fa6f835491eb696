"""Sockets that close or hardly read, bodies that are noise: rows are freed, nobody else notices."""

import json
import random
import socket
import threading
import time

import pytest
from served import NAME, PROMPT, asked, idle, serving, streamed, write

BODY = {"model": NAME, "prompt": PROMPT, "ignore_eos": True, "max_tokens": 400, "seed": 1}
MOMENT = 2.0  #: seconds; two turns and 100 ms are a tenth of it where nothing else runs


@pytest.fixture(scope="module", params=["h11", "httptools"])
def narrow(request, shipped):
    """A server of two rows on each of uvicorn's implementations of HTTP."""
    if request.param == "httptools":
        pytest.importorskip("httptools", reason="needs httptools")
    with serving(shipped, http=request.param, max_num_seqs=2) as running:
        yield running


def posted(server, body, raw=None):
    """A socket on which a completion was asked for; `body` as JSON, or as it is sent."""
    raw = raw or socket.create_connection(server.socket.getsockname(), timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    raw.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
    return raw


def until(condition, seconds=10.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.mark.parametrize("streams", [False, True])
def test_a_closed_socket_frees_its_row(narrow, streams):
    raw = posted(narrow, BODY | {"stream": streams})
    until(lambda: narrow.engine.load.running)
    if streams:
        assert b"200 OK" in raw.recv(4096)
    raw.close()
    assert idle(narrow, MOMENT)


@pytest.mark.parametrize("streams", [False, True])
def test_a_socket_that_closes_in_the_queue_leaves_it(narrow, streams):
    busy = [posted(narrow, BODY), posted(narrow, BODY | {"seed": 2})]
    until(lambda: narrow.engine.load.running == 2)
    raw = posted(narrow, BODY | {"stream": streams})
    until(lambda: narrow.engine.load.waiting == 1)
    raw.close()
    until(lambda: narrow.engine.load.waiting == 0, MOMENT)
    assert narrow.engine.load.running == 2
    for one in busy:
        one.close()
    assert idle(narrow, MOMENT)


@pytest.mark.exhaustive
def test_a_slow_reader_holds_nobody_up(shipped):
    """Its row is over while it has read a few bytes; the others have their texts."""
    with serving(shipped) as server:
        alone = streamed(server.client(), seed=5, max_tokens=40)[0]
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(server.socket.getsockname())
        many = {"max_tokens": 200, "stream": True, "stream_options": {"chunk_tokens": 1}}
        posted(server, BODY | many, slow)
        until(lambda: server.engine.load.running)
        assert slow.recv(1)
        texts = [streamed(server.client(), seed=5, max_tokens=40)[0] for _ in range(2)]
        assert texts == [alone, alone]
        assert idle(server, 30)
        assert slow.recv(1)
        slow.close()


def noise(draws):
    """A body that was meant to be one."""
    kind = draws.randrange(4)
    if kind == 0:
        return draws.randbytes(draws.randrange(300))
    if kind == 1:
        text = bytearray(json.dumps(BODY | {"max_tokens": 2}).encode())
        for _ in range(draws.randrange(1, 6)):
            text[draws.randrange(len(text))] = draws.randrange(256)
        return bytes(text)
    strange = [None, [], {}, -1, 1e308, "", "x" * 99, [[1]], True, 2**70, "\ud800", {"a": []}]
    names = [*BODY, "n", "stop", "stream", "logprobs", "logit_bias", "response_format", "echo"]
    names += ["guided_regex", "guided_grammar", "prediction", "speculative_config", "timeout"]
    body = dict(BODY, max_tokens=2)
    for _ in range(draws.randrange(1, 4)):
        body[draws.choice(names)] = draws.choice(strange)
    return json.dumps(body).encode()


def fuzz(server, count, seed):
    draws = random.Random(seed)
    for _ in range(count):
        body = noise(draws)
        raw = posted(server, body)
        status = int(raw.recv(64).split()[1])
        raw.close()
        assert status < 500, body
    assert server.engine.alive
    assert idle(server)
    assert write(server.client(), max_tokens=3, seed=1).usage.completion_tokens == 3


def test_noise_does_not_end_the_engine(server):
    fuzz(server, 40, 1)


@pytest.mark.slow
def test_much_noise_does_not_end_the_engine(server):
    threads = [threading.Thread(target=fuzz, args=(server, 500, seed)) for seed in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fuzz(server, 10, 9)


HALF = "\ud800"


@pytest.mark.parametrize(
    "more",
    [{"guided_grammar": HALF}, {"prompt": HALF}, {"stop": ["a", HALF]}, {HALF: 1}, {"model": HALF}],
)
def test_half_a_character_is_refused(server, more):
    code, told = asked(server, BODY | more)
    assert code == 400
    assert "lone surrogate" in told["error"]["message"]


def test_bodies_that_are_no_utf8_are_refused(server):
    assert asked(server, b'{"model": "\xff"}')[0] == 400
