"""Servers beside each other: who takes part, what is counted, and what the table says of it."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.errors import ConfigurationError
from outrider_lab.papers import app
from outrider_lab.papers.record import Store
from outrider_lab.peers import engine_process, servers, text

LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="it reads Linux's /proc")


def asked(**more):
    given = {"folder": Path("m"), "engines": ("llama.cpp", "vLLM"), "clients": (1, 8)} | more
    return servers.ServersRequest(
        Path("m.gguf"), own="own", peer="peer", modes=("NGRAM_SIMPLE",), **given
    )


def test_every_server_that_is_there_takes_part_with_room_for_the_most_clients():
    every = servers.arms(asked())
    names = [text.PLAIN, text.DEFAULT, "llama.cpp", "llama.cpp NGRAM_SIMPLE"]
    assert [arm.name for arm in every] == [*names, "vLLM bf16", "vLLM bf16, n-grams"]
    assert {arm.words["rows"] for arm in every} == {8}
    assert [arm.name for arm in servers.arms(asked(folder=None))] == names
    assert [arm.name for arm in servers.arms(asked(engines=()))] == names[:2]


def row(worked, said="a"):
    texts, waits = [said, "b"], [1.0, 2.0]
    return {"wall": 2.0, "worked": worked, "tokens": 100, "texts": texts, "waits": waits}


def test_the_table_is_of_sums_over_rounds_and_the_best_other():
    found = servers.ServersFigures(
        {
            1: {text.PLAIN: [row(1.0), row(1.0)], "llama.cpp": [row(2.0, "x"), row(4.0, "x")]},
            8: {
                text.PLAIN: [row(0.5), row(0.5)],
                "llama.cpp": [row(1.0), row(2.0)],
                "llama.cpp NGRAM_SIMPLE": [row(8.0), row(8.0)],
                "vLLM bf16": [row(1.0), row(1.0)],
            },
        }
    )
    _, other, many, *_ = servers.table(found)
    assert other["ms a token, CPU"] == 30
    assert many["tokens a second, wall"] == 50
    assert many["answer, s (median)"] == 1.5
    assert many["times llama.cpp's best"] == "3.00 [2.00, 4.00]"
    assert many["times vLLM's best"] == "2.00 [2.00, 2.00]"
    assert "times vLLM's best" not in other
    assert other["texts as our plain's of few clients"] == "1 of 2"


class FakeServer(BaseHTTPRequestHandler):
    """Answers a completion with its prompt's tokens, and knows how many ask at once."""

    at_once, most, bodies = 0, 0, []
    lock = threading.Lock()

    def log_message(self, *words):
        """Nothing."""

    def told(self, what):
        data = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.told({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        kind = type(self)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with kind.lock:
            kind.at_once += 1
            kind.most = max(kind.most, kind.at_once)
            kind.bodies.append(body)
        time.sleep(0.05)
        with kind.lock:
            kind.at_once -= 1
        choice = {"index": 0, "text": str(body["prompt"]), "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        told = {"id": "x", "object": "text_completion", "created": 0, "model": "m"}
        self.told(told | {"choices": [choice], "usage": usage})


class FakeProcess:
    """A server's process that works a second between two looks."""

    def __init__(self, python, words):
        if words["engine"] == "vLLM, server":
            raise servers.EngineGone("vLLM ended with status 1; its last words: no")
        self.looks, self.ready = 0, {"address": words["model"]}

    def ask(self):
        self.looks += 1
        return {"worked": float(self.looks)}

    def close(self):
        """Nothing."""


@LINUX
def test_rounds_ask_as_many_at_once_as_there_are_clients_and_go_on_from_the_store(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(servers, "EngineProcess", FakeProcess)
    monkeypatch.setattr(FakeServer, "bodies", [])
    http = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    # what a fake process calls its model is where it answers
    address = f"http://127.0.0.1:{http.server_port}"
    arms = [
        text.Arm(text.PLAIN, "own", {"engine": "outrider, server", "model": address}),
        text.Arm("llama.cpp", "peer", {"engine": "x", "model": address}, {"cache_prompt": False}),
        text.Arm("vLLM bf16", "peer", {"engine": "vLLM, server", "model": address}),
    ]
    monkeypatch.setattr(servers, "arms", lambda asked: arms)
    prompts, wanted = [[at] for at in range(6)], asked(clients=(1, 3), tokens=5, rounds=2)
    found = servers.run(wanted, prompts, Store(tmp_path, "peers", {}), lambda *_: None)
    assert FakeServer.most == 3
    assert found.left_out == {"vLLM bf16": "vLLM ended with status 1; its last words: no"}
    first = found.rounds[3]["llama.cpp"][0]
    assert first["texts"] == [str(prompt) for prompt in prompts]
    assert (first["worked"], first["tokens"], len(first["waits"])) == (1.0, 18, 6)
    measured = [body for body in FakeServer.bodies if body["max_tokens"] == 5]
    assert len(measured) == 2 * 2 * 2 * 6
    assert {body["temperature"] for body in measured} == {0}
    assert sum("cache_prompt" in body for body in measured) == len(measured) / 2
    again = servers.run(wanted, prompts, Store(tmp_path, "peers", {}), lambda *_: None)
    assert again.rounds == found.rounds
    assert len([body for body in FakeServer.bodies if body["max_tokens"] == 5]) == len(measured)
    http.shutdown()
    http.server_close()


WORKS = """
import subprocess, sys, time
def work(seconds):
    while time.process_time() < seconds:
        pass
child = sys.argv[1:] and subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
work(0.3)
child and child.stdout.readline()
print(flush=True)
sys.stdin.read()
"""


@LINUX
def test_a_servers_work_is_that_of_all_its_processes(tmp_path):
    script = tmp_path / "works.py"
    script.write_text(WORKS)
    words = [sys.executable, str(script), "with a child"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as process:
        process.stdout.readline()
        assert engine_process.worked(process.pid) >= 0.55  # ticks are a hundredth of a second
        process.stdin.close()


@pytest.mark.parametrize("clients", ["x", "1,0", "2,", ""])
def test_clients_are_numbers(clients, tmp_path):
    words = ["peers", "--out", str(tmp_path), "--model", "m.gguf", "--clients", clients]
    with pytest.raises(ConfigurationError, match="--clients"):
        CliRunner().invoke(app, words, catch_exceptions=False)
