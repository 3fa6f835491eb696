"""Engines that die or stand still: texts go on in another, deadlines are answered, health says."""

import multiprocessing
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import openai
import pytest
from served import Server, _service, _until_the_end, serving

from outrider.server.app import ServerConfig, build_app_for
from outrider.server.engine_client import EngineClient, InProcessClient
from outrider.server.engine_loop import (
    AbortRequest,
    Broken,
    EngineLoop,
    EngineRequest,
    EngineStoppedError,
)
from outrider.server.engine_process import ProcessClient, run_engine_process
from outrider.server.errors import to_response


def begun(load, room, lives):
    """An engine behind a pipe, in a thread in place of a process, that can be killed."""
    here, there = multiprocessing.Pipe()

    def end():
        with suppress(OSError):  # as with a process that has ended
            with socket.socket(fileno=os.dup(there.fileno())) as both:
                both.shutdown(socket.SHUT_RDWR)

    def run():
        try:
            run_engine_process(there, load, room)
        finally:  # not closed: its number would be another file's, while somebody reads yet
            end()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    lives.append(end)
    return here, SimpleNamespace(join=thread.join, exitcode=-9, kill=end)


@contextmanager
def mortal(speculator, starts=9, still=120.0):
    """A server whose engine is started again, and what ends each of its engines."""
    service, lives = _service({}), []

    def begin():
        if len(lives) > starts:
            raise OSError("no more processes")
        return begun(lambda: speculator, service.engine_config, lives)

    engine = ProcessClient(*begin(), service.engine_config, begin, still)
    with _until_the_end(Server(build_app_for(engine, service))) as server:
        yield server, lives


ASK = {"model": "pair", "prompt": "def f(x):\n", "max_tokens": 60, "temperature": 0.8, "seed": 7}


def until(true, seconds=60.0):
    """Wait for it, as long as a busy machine may take; whether it came."""
    ends = time.monotonic() + seconds
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)
    return true()


def chunks(client, **more):
    return client.completions.create(**ASK | more, stream=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"stop": ["return"]}])
def test_a_text_goes_on_where_its_engine_was_killed(shipped, more):
    with mortal(shipped) as (server, lives):
        client = server.client()
        whole = client.completions.create(**ASK | more)
        text, reason, count = "", None, 0
        for chunk in chunks(client, **more):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
            count += 1
            if count in (2, 4):
                lives[-1]()
                again = 1 + count // 2
                assert until(lambda again=again: len(lives) == again and server.engine.alive)
        assert (text, reason) == (whole.choices[0].text, whole.choices[0].finish_reason)
        assert count > 2


def test_an_engine_that_cannot_come_back_says_so_and_ends_its_server(shipped):
    with mortal(shipped, starts=0) as (server, lives):
        stream = chunks(server.client(), max_tokens=400, extra_body={"ignore_eos": True})
        next(stream)
        lives[-1]()
        with pytest.raises(openai.APIError, match="engine has stopped"):
            list(stream)
        assert health(server)[0] == 503
        assert server.engine.fault is not None
        server.uvicorn._ends = True
        server.thread.join(60)
        assert not server.thread.is_alive()


def health(server):
    try:
        with urllib.request.urlopen(server.address + "/health", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_no_sign_of_life_is_a_503(shipped, monkeypatch):
    with mortal(shipped, still=1e9) as (server, _):
        assert health(server)[0] == 200
        monkeypatch.setattr(EngineLoop, "still", 1000.0)  # what the engine's next beats tell
        assert until(lambda: health(server)[0] == 503)
        assert '"still"' in health(server)[1]
        monkeypatch.undo()
        assert until(lambda: health(server)[0] == 200)


def test_no_sign_of_life_brings_another_engine(shipped, monkeypatch):
    with mortal(shipped, still=500.0) as (server, lives):
        whole = server.client().completions.create(**ASK).choices[0].text
        first_alone = property(lambda loop: 1000.0 if len(lives) < 2 else 0.0)
        monkeypatch.setattr(EngineLoop, "still", first_alone)
        assert until(lambda: len(lives) == 2 and server.engine.alive)
        assert server.client().completions.create(**ASK).choices[0].text == whole
        assert len(lives) == 2


class Deaf(EngineClient):
    """An engine that takes all and says nothing."""

    fault, alive, still = None, True, 1000.0

    def __init__(self, *about):
        super().__init__(*about)
        self.orders = []

    def start(self):
        pass

    def join(self, timeout=None):
        return True

    def _send(self, order):
        self.orders.append(order)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_answered_whatever_the_engine_does(shipped, stream):
    service = ServerConfig(("pair",), max_num_seqs=4, max_model_len=512, public=True)
    deaf = Deaf(InProcessClient(shipped, service.engine_config).known, 4, 4)
    with _until_the_end(Server(build_app_for(deaf, service))) as server:
        began = time.monotonic()
        client, more = server.client(), {"stream": stream, "extra_body": {"timeout": 0.3}}
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(**ASK | more)
        assert refused.value.status_code == 504
        assert time.monotonic() - began < 20
        (asked,), aborted = deaf.orders
        assert aborted == AbortRequest(asked.key, "cancelled")
        status, said = health(server)
        assert status == 503
        assert '"still"' in said


def test_a_loop_that_waits_for_work_turns(shipped):
    with serving(shipped) as server:
        for _ in range(3):  # of a loop that does not turn it only grows
            assert until(lambda: server.engine.still > 0.2)
            assert until(lambda: server.engine.still < 0.2)


class Endless:
    """A lane's run that ends no step before it is told to."""

    done, errors = False, {}

    def __init__(self):
        self.begun, self.ends = threading.Event(), threading.Event()

    def submit(self, request):
        return 0

    def step(self):
        self.begun.set()
        self.ends.wait()
        return []


def test_a_loop_that_no_process_can_bring_back_gives_up(monkeypatch):
    """Who waits hears it, once; the server ends, as there is no thread to be started again."""
    heard, run = [], Endless()
    loop = EngineLoop(lambda lane: run, 1, heard.extend, most_still=500.0)
    loop.start()
    loop.submit([EngineRequest("a", None), EngineRequest("a", None)])
    assert run.begun.wait(60)
    assert loop.alive
    monkeypatch.setattr(EngineLoop, "still", 1000.0)
    assert until(lambda: len(heard) == 2)
    assert not loop.alive
    assert all(isinstance(event.error, Broken) and event.over for event in heard)
    assert to_response(loop.fault)[1]["error"]["code"] == "engine_stopped"
    with pytest.raises(EngineStoppedError):
        loop.submit([EngineRequest("a", None)])
    run.ends.set()
    loop.join(60)
    assert len(heard) == 2
