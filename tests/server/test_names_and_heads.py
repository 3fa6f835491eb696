"""Who may ask by which name, pages that load nothing from elsewhere, and heads that never end."""

import asyncio
import http.client
import socket
import time
from contextlib import closing

import pytest
from served import serving

from outrider.cli.serve import _hosts
from outrider.server.http_server import HeaderDeadline
from outrider.server.middleware import host_of


@pytest.fixture(scope="module")
def local(shipped):
    with serving(shipped, hosts=_hosts("127.0.0.1", (), ("box.example",))) as running:
        yield running


def asked(server, path, host):
    """The status of a GET with this header Host."""
    connection = http.client.HTTPConnection(*server.socket.getsockname(), timeout=20)
    with closing(connection):
        connection.putrequest("GET", path, skip_host=True)
        connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8", "box.example"]
)
def test_the_server_s_own_names_may_ask(local, host):
    assert asked(local, "/v1/models", host)[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/", "/metrics"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example"])
def test_other_names_are_refused(local, path, host):
    status, said = asked(local, path, host)
    assert status == 403
    assert "invalid_host" in said
    assert "--allowed-host" in said


@pytest.mark.parametrize(
    ("host", "keys", "allowed", "found"),
    [
        ("127.0.0.1", (), (), ("127.0.0.1", "::1", "localhost")),
        ("localhost", ("k",), (), ()),
        ("0.0.0.0", (), (), ()),
        ("0.0.0.0", ("k",), ("Box",), ("box",)),
    ],
)
def test_names_are_asked_for_where_nothing_else_is(host, keys, allowed, found):
    assert _hosts(host, keys, allowed) == found


def test_a_host_is_a_name_without_its_port():
    assert [host_of(x) for x in ("A:1", "[::1]:80", "::1", "")] == ["a", "::1", "::1", ""]


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
def test_no_page_loads_scripts_from_elsewhere(local, path):
    assert asked(local, path, "localhost")[0] == 404


def test_every_page_has_a_policy_and_no_address_elsewhere(local):
    status, page = asked(local, "/", "localhost")
    assert status == 200
    assert 'src="http' not in page
    assert 'href="http' not in page


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["h11", "httptools"])
@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET / HTTP/1.1\r\nhost: x\r\nx-"])
def test_half_a_head_is_closed_in_time(shipped, monkeypatch, kind, sent):
    pytest.importorskip(kind)
    monkeypatch.setattr(HeaderDeadline, "seconds", 0.3)
    with serving(shipped, http=kind) as server:
        raw = socket.create_connection(server.socket.getsockname(), timeout=20)
        began = time.monotonic()
        raw.sendall(sent)
        answer = raw.recv(100)
        assert answer.startswith(b"HTTP/1.1 408")
        assert raw.recv(100) == b""
        assert time.monotonic() - began < 10
        raw.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_every_event_loop_of_uvicorn_serves(shipped, monkeypatch, loop):
    """uvloop's connections are no asyncio.Transport: nothing of ours may ask what they are."""
    pytest.importorskip(loop)
    monkeypatch.setattr(HeaderDeadline, "seconds", 0.3)
    loops, made = [], HeaderDeadline.connection_made

    def connected(self, transport):
        loops.append(type(asyncio.get_running_loop()).__module__)
        made(self, transport)

    monkeypatch.setattr(HeaderDeadline, "connection_made", connected)
    with serving(shipped, loop=loop) as server:
        text = server.client().completions.create(model="pair", prompt="x", max_tokens=4, seed=1)
        assert text.usage.completion_tokens == 4
        raw = socket.create_connection(server.socket.getsockname(), timeout=20)
        assert raw.recv(100).startswith(b"HTTP/1.1 408")
        raw.close()
    assert {name.split(".")[0] for name in loops} == {loop}


@pytest.mark.exhaustive
def test_bytes_that_trickle_do_not_prolong_it_and_answers_are_not_cut(shipped, monkeypatch):
    monkeypatch.setattr(HeaderDeadline, "seconds", 0.5)
    with serving(shipped) as server:
        raw = socket.create_connection(server.socket.getsockname(), timeout=20)
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in raw.recv(4000)
        began, sent = time.monotonic(), 0
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        raw.settimeout(0.1)
        while time.monotonic() - began < 10:
            try:
                raw.sendall(b"x")
                sent += 1
                said = raw.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                break
            if not said or b"408" in said:
                break
        raw.close()
        assert 1 < sent < 60
        client = server.client()
        text = client.completions.create(model="pair", prompt="x", max_tokens=200)
        assert text.usage.completion_tokens > 0
