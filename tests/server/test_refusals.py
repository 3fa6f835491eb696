"""What is refused, in OpenAI's format; what goes wrong disturbs nobody else."""

import json
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
from served import NAME, PROMPT, events, far, idle, serving, streamed, write

from outrider.server.bodies import CompletionBody
from outrider.server.lanes import Lanes
from outrider.types import Output


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


BODY = {"model": NAME, "prompt": PROMPT}
FIELDS = [
    ("tools", []),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("n", 0),
    ("max_tokens", 1.5),
    ("seed", "7"),
    ("logprobs", 21),
    ("stream_options.no_such", {"no_such": 1}),
    ("max_tokens", 4096),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 1e6}),
    ("logit_bias", {"999999": 1}),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop_token_ids", [10**7]),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", [10**7]),
    ("prompt", "x = 1\n" * 300),
    ("suffix", "x"),
    ("response_format.type", {"type": "xml"}),
]


@pytest.mark.parametrize(("param", "value"), FIELDS)
def test_a_field_that_cannot_be_honoured_is_named(server, param, value):
    name = param.split(".")[0]
    body = BODY | {name: value}
    if name == "stream_options":
        body["stream"] = True
    error = refused(server, 400, body)
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[0] in str(error["param"])


def test_null_is_a_field_that_is_left_out(server):
    free = [name for name, field in CompletionBody.model_fields.items() if not field.is_required()]
    asked_for = BODY | {"seed": 3, "max_tokens": 8}
    plain, nulls = (asked(server, more | asked_for)[1] for more in ({}, dict.fromkeys(free)))
    assert nulls["choices"] == plain["choices"]
    for name in ("model", "prompt"):
        assert refused(server, 400, asked_for | {name: None})["param"].startswith(name)
    refused(server, 400, BODY | {"no_such": None}, "not supported")


def test_bodies_that_contradict_themselves(server):
    refused(server, 400, BODY | {"stream_options": {}}, "stream_options are for streams")
    refused(server, 400, BODY | {"best_of": 3}, "best_of must equal n")
    refused(server, 400, BODY | {"echo": True, "logprobs": 1}, "echo with logprobs")
    refused(server, 400, BODY | {"n": 5}, "more than 4 rows")
    regex = {"guided_regex": "a", "response_format": {"type": "json_object"}}
    refused(server, 400, BODY | regex, "give one")
    for name, text in (("guided_regex", "(["), ("guided_grammar", "start: (((")):
        error = refused(server, 400, BODY | {name: text}, "does not compile")
        assert error["param"] == name
    refused(server, 400, BODY | {"guided_regex": "a" * 70_000}, "shorten")
    error = refused(server, 400, BODY | {"speculative_config": {"method": "magic"}}, "unknown")
    assert error["param"] == "speculative_config"
    refused(server, 400, BODY | {"speculative_config": {"model": "x"}}, "not supported")
    fits = refused(server, 400, BODY | {"max_tokens": 4096}, "ask for at most")["message"]
    most = int(fits.rsplit(" ", 1)[1])
    assert asked(server, BODY | {"max_tokens": most, "stop": "e"})[0] == 200
    refused(server, 400, BODY | {"max_tokens": most + 1}, "ask for at most")
    refused(server, 400, BODY | {"logit_bias": {"999999": 1}}, "999999")
    refused(server, 400, BODY | {"prompt": [10**7]}, "outside the vocabulary")
    refused(server, 400, BODY | {"resume": [{"token_ids": [10**7]}], "stream": True}, "outside")
    refused(server, 404, BODY | {"model": "other"}, "no model 'other'")
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    chat = {"model": NAME, "messages": [message]}
    refused(server, 400, chat, path="/v1/chat/completions")
    plain = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
    refused(server, 400, plain, "chat template", path="/v1/chat/completions")


def test_what_is_no_request_at_all(server):
    refused(server, 400, b"{")
    refused(server, 404, BODY, path="/v1/nothing")
    refused(server, 405, None, method="GET")
    refused(server, 413, b"x" * (1 << 20) + b"xx", "more than")
    refused(server, 400, b"[" * 40 + b"]" * 40, "nested")
    refused(server, 431, BODY, "headers", headers={"x-long": "x" * 17_000})
    assert write(server.client(), max_tokens=2).usage.completion_tokens == 2


def test_a_key_is_needed_where_there_are_keys(shipped):
    with serving(shipped, keys=("first", "second"), public=False) as server:
        for key in ("none", "firs", "firstx"):
            with pytest.raises(openai.AuthenticationError, match="no valid key"):
                write(server.client(key))
        assert write(server.client("second"), max_tokens=2).usage.completion_tokens == 2
        assert asked(server, None, "/health", method="GET")[0] == 200
        refused(server, 401, None, path="/metrics", method="GET")


def test_a_full_queue_says_when_to_come_back(shipped):
    with serving(shipped, rows=1, most_waiting=1) as server:
        client, texts = server.client(), []
        streams = [write(client, max_tokens=300, stream=True, seed=1)]
        next(iter(streams[0]))
        waiting = threading.Thread(target=lambda: texts.append(write(client, seed=2)))
        waiting.start()
        while server.loop.load.waiting < 1:
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
            write(client)
        assert caught.value.response.headers["retry-after"] == "1"
        streams[0].close()
        waiting.join()
        assert texts[0].usage.completion_tokens == 24
        page = urllib.request.urlopen(server.address + "/metrics").read().decode()
        assert 'admission_rejections_total{model_name="pair"} 1.0' in page


def test_a_deadline_counts_from_arrival(server):
    body = BODY | {"max_tokens": 400, "timeout": 0.3, "ignore_eos": True}
    error = refused(server, 504, body, "deadline")
    assert error["type"] == "server_error"
    assert idle(server, 5)
    told = list(events(server, body | {"stream": True, "timeout": 0.8}))
    assert "[DONE]" not in told
    assert json.loads(told[-1])["error"]["code"] == "deadline"


def test_a_row_of_nan_is_no_fault_of_its_request_and_disturbs_nobody(shipped, monkeypatch):
    target, poison = shipped.engine.target, 11
    sound = target.forward

    def forward(cache, nodes, **how):
        output = sound(cache, nodes, **how)
        bad = (nodes.tokens_BQ == poison).any(1)
        logits = output.logits_BQV.masked_fill(bad[:, None, None], float("nan"))
        return Output(logits, output.hidden)

    ask = BODY | {"prompt": [5, 6], "seed": 3, "max_tokens": 40, "logit_bias": {str(poison): -100}}
    ill = BODY | {"prompt": [5, poison], "max_tokens": 8}
    with serving(shipped) as server:
        alone = asked(server, ask)[1]["choices"]
        monkeypatch.setattr(target, "forward", forward)
        others = []
        beside = threading.Thread(target=lambda: others.append(asked(server, ask)))
        beside.start()
        error = refused(server, 500, ill, "NaN")
        assert error["type"] == "server_error"
        plain = {"method": "none"}  # a draft would have the token in the first step
        later = ask | {"logit_bias": {str(poison): 100}, "stream": True}
        later["speculative_config"] = plain
        told = list(events(server, later))
        assert len(told) > 1
        assert "[DONE]" not in told
        assert json.loads(told[-1])["error"]["type"] == "server_error"
        beside.join()
        assert others[0][1]["choices"] == alone
        assert idle(server)


@pytest.mark.parametrize(
    ("served_by", "fault"), [(serving, "no memory"), (far, "has ended; got exit code")]
)
def test_a_dead_engine_is_told_to_everybody(shipped, monkeypatch, served_by, fault):
    """Here, and at the other end of a pipe."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with served_by(shipped) as server:
        stream = events(server, BODY | {"max_tokens": 400, "stream": True, "ignore_eos": True})
        next(stream)

        def broken(lanes, name):
            raise RuntimeError("no memory")

        monkeypatch.setattr(Lanes, "__getitem__", broken)
        other = BODY | {"speculative_config": {"method": "none"}}
        assert asked(server, other)[0] == 503
        left = list(stream)
        assert "[DONE]" not in left
        assert json.loads(left[-1])["error"]["code"] == "engine_stopped"
        while server.loop.fault is None:
            time.sleep(0.01)
        assert fault in str(server.loop.fault)
        assert asked(server, None, "/health", method="GET")[0] == 503
        assert asked(server, BODY)[0] == 503


def test_a_text_is_the_same_after_what_was_refused(server):
    before = write(server.client(), seed=3).choices[0].text
    refused(server, 400, BODY | {"logit_bias": {"999999": 1}})
    assert streamed(server.client(), seed=3)[0] == before
