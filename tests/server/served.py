"""A real server in a thread of the test's process, and a real client."""

import json
import multiprocessing
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

import openai

from outrider.server.app import ServerConfig, build_app, build_app_for
from outrider.server.engine_process import ProcessClient, run_engine_process
from outrider.server.http_server import HttpServer

NAME = "pair"
PROMPT = "def fibonacci(n):\n"
BODY = {"model": NAME, "prompt": PROMPT}


class Server:
    """A running server: its address, its engine's thread, and clients."""

    def __init__(self, site, http="auto", grace=1.0, loop="asyncio"):
        self.app, self.engine = site
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.uvicorn = HttpServer(site, grace)
        self.uvicorn.config.http = http
        self.uvicorn.config.loop = loop  # its default is uvloop, if that is installed
        self.clients = []
        self.thread = threading.Thread(target=self.uvicorn.run, args=([self.socket],), daemon=True)

    def start(self):
        self.thread.start()
        while not self.uvicorn.started:
            assert self.thread.is_alive()
            threading.Event().wait(0.01)
        return self

    def stop(self):
        for client in self.clients:
            client.close()
        self.uvicorn.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def client(self, key="none"):
        """OpenAI's own client; it tries nothing twice."""
        url = self.address + "/v1"
        self.clients.append(openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60))
        return self.clients[-1]


def linked(load, room):
    """What decodes behind a pipe, in a thread in place of a process."""
    here, there = multiprocessing.Pipe()

    def run():
        try:
            run_engine_process(there, load, room)
        finally:
            # As a process that ends closes it, whoever still reads. Its number stays taken until
            # nobody does: the next file would have it, and be read as an order.
            with socket.socket(fileno=os.dup(there.fileno())) as both:
                both.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return ProcessClient(here, SimpleNamespace(join=thread.join, exitcode=0), room)


@contextmanager
def serving(speculator, http="auto", grace=1.0, loop="asyncio", **settings):
    """A server for the length of a block."""
    service = _service(settings)
    with _until_the_end(Server(build_app(speculator, service), http, grace, loop)) as server:
        yield server


@contextmanager
def far(speculator, grace=1.0, **settings):
    """A server whose loop is behind a pipe."""
    service = _service(settings)
    engine = linked(lambda: speculator, service.engine_config)
    with _until_the_end(Server(build_app_for(engine, service), grace=grace)) as server:
        yield server


def _service(settings):
    return ServerConfig(
        **{"names": (NAME,), "max_num_seqs": 4, "max_model_len": 512, "public": True} | settings
    )


@contextmanager
def _until_the_end(server):
    server.start()
    try:
        yield server
    finally:
        server.stop()


def write(client, prompt=PROMPT, **options):
    """A completion."""
    options = {"model": NAME, "max_tokens": 24, "temperature": 0.8} | options
    return client.completions.create(prompt=prompt, **options)


def idle(server, seconds=20.0):
    """Wait until no row is taken; whether it came to that."""
    ends = time.monotonic() + seconds
    while server.engine.load[:2] != (0, 0) and time.monotonic() < ends:
        time.sleep(0.02)
    return server.engine.load[:2] == (0, 0)


def events(server, body, path="/v1/completions"):
    """The events of a stream as they were sent, one by one."""
    request = urllib.request.Request(
        server.address + path,
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.strip():
                yield line.decode().removeprefix("data: ").strip()


def streamed(client, prompt=PROMPT, **options):
    """A completion's text, its chunks put together, and the last chunk of all."""
    text, chunk = "", None
    more = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in write(client, prompt, **options | more):
        text += "".join(choice.text for choice in chunk.choices)
    return text, chunk


def asked(server, body, path="/v1/completions", headers=None, method="POST"):
    """Status and body of an answer."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(server.address + path, data, method=method)
    for name, value in ({"content-type": "application/json"} | (headers or {})).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def refused(server, status, body, *words, **options):
    """The error of an answer, which must be in the one format."""
    code, told = asked(server, body, **options)
    assert code == status, told
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert all(word in told["error"]["message"] for word in words), told
    return told["error"]
