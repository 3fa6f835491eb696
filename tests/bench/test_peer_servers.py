"""`outrider bench peers --clients`: one server that dies costs its own rows, and is named."""

import sys
from pathlib import Path

import pytest

from outrider_lab.papers.record import Store
from outrider_lab.peers import engines, page, servers, text

#: Stands for a Python with an engine: a server that ends in the middle of its so-manieth answer.
SERVER = """#!{python}
import http.server, json, os, sys, threading, time

words = json.loads(sys.argv[2])


class Handler(http.server.BaseHTTPRequestHandler):
    answers = 0

    def log_message(self, *said):
        pass

    def do_GET(self):
        self.say({{"object": "list", "data": [{{"id": "m", "object": "model"}}]}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Handler.answers += 1
        if Handler.answers == words["dies"]:
            os._exit(7)
        choice = {{"index": 0, "text": str(asked["prompt"]), "finish_reason": "length"}}
        usage = {{"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}}
        self.say({{"id": "c", "object": "text_completion", "choices": [choice], "usage": usage}})

    def say(self, what):
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(json.dumps({{"address": f"http://127.0.0.1:{{server.server_port}}"}}), flush=True)
worked = 0.0
for line in sys.stdin:
    worked += 1.0
    print(json.dumps({{"worked": worked}}), flush=True)
"""
PROMPTS = [[1, 2], [3, 4], [5, 6]]


@pytest.fixture
def fake(tmp_path):
    """A program that is such a server."""
    path = tmp_path / "python"
    path.write_text(SERVER.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def arm(name, fake, dies):
    words = {"engine": name, "model": "m", "threads": 1, "dies": dies}
    return text.Arm(name, fake, words)


def measured(monkeypatch, fake, tmp_path, dies):
    """What comes of three servers, each of which dies with that answer (0: never)."""
    monkeypatch.setattr(
        servers, "arms", lambda asked: [arm(name, fake, at) for name, at in dies.items()]
    )
    request = servers.ServersRequest(Path("m.gguf"), None, "", "", (), (1, 2), (), rounds=2)
    store = Store(tmp_path / "out", "peers", {})
    return servers.run(request, PROMPTS, store, lambda *said: None)


def test_a_server_here_is_asked_past_proxies(monkeypatch, fake, tmp_path):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    assert not measured(monkeypatch, fake, tmp_path, {text.PLAIN: 0}).left_out


@pytest.mark.parametrize("gone", [text.PLAIN, "llama.cpp"])
def test_a_server_that_dies_is_named_and_the_others_go_on(monkeypatch, fake, tmp_path, gone):
    dies = {text.PLAIN: 0, text.DEFAULT: 0, "llama.cpp": 0} | {gone: 8}
    found = measured(monkeypatch, fake, tmp_path, dies)
    assert list(found.left_out) == [gone]
    why = found.left_out[gone]
    assert f"the server of {gone} gave no answer: APIConnectionError" in why
    assert "clients, round 0" in why
    there = [name for name in dies if name != gone]
    rows = servers.table(found)
    assert [(row["clients"], row["engine"]) for row in rows] == [
        (clients, name) for clients in (1, 2) for name in there
    ]
    assert ("times our plain" in rows[0]) == (gone != text.PLAIN)
    section = page.section("m", {"by clients": rows}, found.left_out, {}, "", (0.0, 0.0))
    page.keep(tmp_path, "m", section)
    page.write(tmp_path, tmp_path / "page.md", pictures=False)
    assert f"- left out: {gone}: the server of {gone} gave no answer" in (
        tmp_path / "page.md"
    ).read_text("utf-8")


def test_a_server_that_dies_while_it_is_warmed_leaves_no_rows(monkeypatch, fake, tmp_path):
    found = measured(monkeypatch, fake, tmp_path, {text.PLAIN: 0, "llama.cpp": 2})
    assert "(2 clients, round -1)" in found.left_out["llama.cpp"]
    assert {name for arms in found.rounds.values() for name in arms} == {text.PLAIN}
    assert [row["texts as our plain's of few clients"] for row in servers.table(found)] == [
        "3 of 3"
    ] * 2


def test_a_server_that_fails_at_once_is_named(fake):
    words = {"engine": "vLLM, server", "model": "m", "threads": 1, "dies": 0}
    broken = Path(fake)
    broken.write_text(broken.read_text().replace("send_response(200)", "send_response(500)"))
    with pytest.raises(engines.EngineGone, match="the server of vLLM bf16 gave no answer"):
        servers.RunningServer(text.Arm("vLLM bf16", fake, words))
