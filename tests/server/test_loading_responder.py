"""What a server answers before its model is there."""

import http.client
import json
import socket
import subprocess
import sys
import time

import pytest

from outrider.server.loading_responder import RETRY_SECONDS, answering


@pytest.fixture
def place():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def asked(place, method, path, body=None):
    connection = http.client.HTTPConnection(*place.getsockname(), timeout=10)
    connection.request(method, path, body)
    answer = connection.getresponse()
    try:
        return answer.status, answer.headers, json.loads(answer.read())
    finally:
        connection.close()


def test_health_says_that_the_model_is_loading(place):
    with answering(place):
        status, headers, body = asked(place, "GET", "/health")
    assert (status, body) == (503, {"status": "loading"})
    assert headers["retry-after"] == str(RETRY_SECONDS)


def test_everybody_else_gets_an_error_in_openais_form(place):
    with answering(place):
        found = [
            asked(place, "POST", "/v1/completions", json.dumps({"prompt": "x" * 200_000})),
            asked(place, "GET", "/v1/models"),
        ]
    for status, _, body in found:
        assert status == 503
        assert body["error"]["code"] == "loading"
        assert "GET /health" in body["error"]["message"]


def test_half_a_request_holds_up_nobody_and_not_the_end(place):
    with socket.socket() as half, socket.socket() as nonsense:
        with answering(place):
            for each, said in ((half, b"GET /hea"), (nonsense, b"\r\n\r\n")):
                each.connect(place.getsockname())
                each.sendall(said)
            assert asked(place, "GET", "/health")[0] == 503
            started = time.monotonic()
        assert time.monotonic() - started < 5
        assert nonsense.recv(100).startswith(b"HTTP/1.1 503")


def test_the_socket_goes_on_listening_for_the_server_itself(place):
    with answering(place):
        pass
    with socket.create_connection(place.getsockname(), timeout=10) as client:
        place.setblocking(True)
        accepted, _ = place.accept()
        with accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"


def test_it_needs_no_packages():
    """A server listens before torch and HTTP's packages are imported, which takes seconds."""
    program = (
        "import sys, outrider.cli.commands, outrider.server.loading_responder;"
        "print([name for name in ('torch', 'transformers', 'uvicorn', 'fastapi', 'llguidance')"
        " if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.strip() == "[]", said.stderr
