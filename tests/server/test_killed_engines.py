"""Streams with images or sound, and of models that keep states, whose engine is killed go on."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import image_folder
import pytest
import recurrent_models
import sound_folder
from served import NAME, far, serving
from test_engine_process import command

import outrider
from outrider.costs import Costs

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant] "


def _hybrid(place):
    """A folder of a model of convolutions and attention."""
    recurrent_models.made("lfm2", vocab_size=128).save_pretrained(place)
    tokenizer = image_folder.words()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    return place


def _image():
    data = image_folder.url(image_folder.png(image_folder.picture(3)))
    return {"type": "image_url", "image_url": {"url": data}}


def _sound():
    data = image_folder.url(sound_folder.wav(sound_folder.samples(3))).partition(",")[2]
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


#: How a model's folder is made, and what stands in a prompt beside the text.
KINDS = {
    **{
        kind: (functools.partial(image_folder.saved, kind=kind), _image)
        for kind in image_folder.PROCESSORS
        if kind not in ("git", "paligemma")  # which are not asked in conversations
    },
    "sound": (sound_folder.saved, _sound),
    "states": (_hybrid, None),
}


COUNT = 220  #: tokens of a stream whose engine is killed


def asked(kind, count, name=NAME):
    """The body of a stream."""
    text = {"type": "text", "text": "w20 w21 w22 w20 w21"}
    media = KINDS[kind][1]
    return {
        "model": name,
        "messages": [{"role": "user", "content": [text] if media is None else [media(), text]}],
        "max_tokens": count,
        "temperature": 0.8,
        "seed": 5,
        "return_token_ids": True,
        "ignore_eos": True,
        "stream": True,
    }


def stream(address, body):
    """The events of a chat, one by one."""
    request = urllib.request.Request(
        address + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.strip():
                yield line.decode().removeprefix("data: ").strip()


def ids(events):
    """The tokens that they tell."""
    told = [json.loads(one) for one in events if one.startswith("{")]
    choices = [choice for one in told for choice in one["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or []]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_at_another_server(kind, tmp_path):
    model = outrider.load(
        str(KINDS[kind][0](tmp_path)),
        drafter="prompt_lookup",
        dtype="float32",
        threads=1,
        pack_weights=False,
        device="cpu",
        step_costs=Costs.of({1: 1.0, 2: 1.1, 8: 1.5}),
    )
    body = asked(kind, 24)
    with serving(model, max_model_len=200) as one, far(model, max_model_len=200) as other:
        whole = ids(stream(one.address, body))
        assert len(whole) == 24
        for cut in (1, 9, 23):
            sent = [{"token_ids": whole[:cut], "finish_reason": None}]
            assert ids(stream(other.address, body | {"resume": sent})) == whole[cut:]


@pytest.fixture
def process(request, tmp_path):
    """`outrider serve` with an engine in a process of its own: its address, process and kind."""
    if not os.path.exists("/proc/self/task"):
        pytest.skip("needs /proc, to find the engine's process")
    folder = KINDS[request.param][0](tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "-m", str(folder), "--served-model-name", NAME, "--port", str(port)]
    words += ["--processes", "2", "--threads", "1", "--dtype", "float32", "--max-model-len", "400"]
    words += ["--drafter", "prompt_lookup"]
    with subprocess.Popen(
        [sys.executable, "-m", "outrider", *words], stderr=subprocess.PIPE, text=True
    ) as started:
        while "base_url" not in (line := started.stderr.readline()):
            assert line, "it has ended"
        yield f"http://127.0.0.1:{port}", started, request.param
        started.kill()


def engine_of(process):
    """The process that decodes for it."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        each = [int(one) for one in file.read().split()]
    (engine,) = [one for one in each if b"spawn_main" in command(one)]
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("process", KINDS, indirect=True)
def test_a_stream_whose_engine_is_killed_is_the_same(process):
    """kill -9 in mid stream: the engine is stopped first, so that it is known to be in one."""
    address, server, kind = process
    body = asked(kind, COUNT)
    whole = ids(stream(address, body))
    assert len(whole) == COUNT
    events = []

    def read():
        for one in stream(address, body):
            events.append(one)

    reader = threading.Thread(target=read)
    engine = engine_of(server)
    reader.start()
    while not ids(list(events)):
        time.sleep(0.001)
    os.kill(engine, signal.SIGSTOP)
    seen = -1
    while seen != len(events):  # until nothing more is under way
        seen = len(events)
        time.sleep(0.5)
    before = len(ids(list(events)))
    assert 0 < before < COUNT
    os.kill(engine, signal.SIGKILL)
    reader.join(60)
    assert not reader.is_alive()
    assert events[-1] == "[DONE]"
    assert ids(events) == whole
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    assert "exit code -9; another one is started" in server.stderr.read()
