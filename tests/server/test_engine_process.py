"""The loop at the other end of a pipe: the same texts, and an end for everybody if it breaks."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import openai
import pytest
from served import NAME, PROMPT, asked, events, far, idle, linked, streamed, write

from outrider import ConfigurationError
from outrider.server.engine_factory import EngineConfig

BODY = {"model": NAME, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.mark.exhaustive
def test_what_is_asked_across_a_pipe_is_answered_as_here(server, shipped):
    every = [
        {"seed": 5},
        {"seed": 5, "logprobs": 3, "n": 2},
        {"seed": 6, "extra_body": {"guided_regex": "[a-z]{4} = [0-9]{3}"}},
        {"seed": 7, "stop": ["\n"], "logit_bias": {"11": 2.0}},
        {"seed": 8, "extra_body": {"prediction": {"type": "content", "content": PROMPT}}},
    ]
    with far(shipped) as other:
        for options in every:
            mine = write(other.client(), **options)
            theirs = write(server.client(), **options)
            assert mine.choices == theirs.choices
            assert mine.system_fingerprint == theirs.system_fingerprint
            assert mine.model_extra["metrics"]["queue_time_ms"] >= 0
        assert streamed(other.client(), seed=5)[0] == write(server.client(), seed=5).choices[0].text
        with pytest.raises(openai.BadRequestError, match="layers to leave out"):
            write(other.client(), extra_body={"speculative_config": {"method": "layer_skip"}})
        assert idle(other)


def test_rows_and_the_queue_across_a_pipe(shipped):
    with far(shipped, max_num_seqs=1, max_queued_requests=1) as server:
        first, second = events(server, BODY), events(server, BODY | {"max_tokens": 8})
        next(first)
        waits = threading.Thread(target=lambda: [None for _ in second])
        waits.start()
        while server.engine.load.waiting < 1:
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="queue is full"):
            write(server.client())
        page = urllib.request.urlopen(server.address + "/metrics").read().decode()
        assert 'admission_rejections_total{model_name="pair"} 1.0' in page
        assert 'request_success_total{finished_reason="cancelled"' not in page
        first.close()
        waits.join()
        assert idle(server, 2)
        code, told = asked(server, BODY | {"stream": False, "timeout": 0.2})
        assert (code, told["error"]["code"]) == (504, "deadline")


def test_what_cannot_be_loaded_says_so_here(shipped):
    def load():
        raise ConfigurationError("no such model")

    with pytest.raises(ConfigurationError, match="no such model"):
        linked(load, EngineConfig())


# ---------------------------------------------------------------------- processes


class Process:
    """`outrider serve` as people start it."""

    def __init__(self, processes):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "outrider", "serve", "--port", str(self.port)]
        command += ["--max-num-seqs", "4", "--max-model-len", "512", "--threads", "1"]
        command += ["--processes", str(processes)]
        self.processes = processes
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.address = f"http://127.0.0.1:{self.port}"
        while "base_url" not in (line := self.process.stderr.readline()):
            assert line, "it has ended"
        while True:
            try:
                self.model = json.load(urllib.request.urlopen(self.address + "/v1/models"))
                break
            except OSError:
                time.sleep(0.05)
        self.body = BODY | {"model": self.model["data"][0]["id"], "seed": 3}

    @property
    def engines(self):
        """Processes that decode for it: one or none."""
        me = self.process.pid
        with open(f"/proc/{me}/task/{me}/children") as file:
            each = [int(one) for one in file.read().split()]
        return [one for one in each if b"spawn_main" in command(one)]  # multiprocessing has others


@pytest.fixture
def process(request):
    if not os.path.exists("/proc/self/task"):
        pytest.skip("needs /proc, to find the engine's process")
    process = Process(request.param)
    yield process
    process.process.kill()
    process.process.wait()
    process.process.stderr.close()


def command(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def gone(pid, seconds=10.0):
    ends = time.monotonic() + seconds
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < ends:
        time.sleep(0.02)
    return not os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
@pytest.mark.parametrize("process", [2], indirect=True)
def test_an_engine_that_is_killed_is_started_again_and_its_texts_go_on(process):
    def said(lines):
        return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])

    body = process.body | {"seed": 5, "temperature": 0.8}
    whole = said(list(events(process, body))[:-1])
    stream = events(process, body)
    first = next(stream)
    (engine,) = process.engines
    os.kill(engine, signal.SIGKILL)
    *left, done = stream
    assert done == "[DONE]"
    assert said([first, *left]) == whole
    assert asked(process, None, "/health", method="GET")[0] == 200
    process.process.send_signal(signal.SIGINT)
    assert process.process.wait(15) == 0
    assert "exit code -9; another one is started" in process.process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("process", [2], indirect=True)
def test_the_engine_ends_with_a_server_that_is_killed(process):
    next(events(process, process.body))
    (engine,) = process.engines
    process.process.kill()
    assert gone(engine)


@pytest.mark.slow
@pytest.mark.parametrize("process", [1, 2], indirect=True)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_asked_to_end_answers_who_waits(process, how):
    stream = events(process, process.body | {"max_tokens": 120})
    next(stream)
    engines = process.engines
    for each in [*engines, process.process.pid]:
        os.kill(each, how)  # a terminal's Ctrl-C and a service manager's SIGTERM go to all of them
    assert list(stream)[-1] == "[DONE]"
    assert process.process.wait(15) == 0
    assert len(engines) == process.processes - 1
    assert all(map(gone, engines))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_that_is_asked_to_end_while_it_reads_its_model_is_no_failure(processes):
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--threads", "1"]
    command += ["--processes", str(processes)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "reading outrider-pair\n"
        process.terminate()
        assert process.wait(15) == 0
        assert "Traceback" not in process.stderr.read()
