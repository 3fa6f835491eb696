"""What goes wrong while texts are written is told to whom it concerns, and disturbs nobody else."""

import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from served import BODY, asked, events, far, idle, refused, serving, streamed, write

from outrider.engine.engine_run import EngineRun
from outrider.server.request_parsing import RequestParser
from outrider.types import Output


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

        def broken(run):
            raise RuntimeError("no memory")

        monkeypatch.setattr(EngineRun, "step", broken)
        other = BODY | {"speculative_config": {"method": "none"}}
        assert asked(server, other)[0] == 503
        left = list(stream)
        assert "[DONE]" not in left
        assert json.loads(left[-1])["error"]["code"] == "engine_stopped"
        while server.engine.fault is None:
            time.sleep(0.01)
        assert fault in str(server.engine.fault)
        assert asked(server, None, "/health", method="GET")[0] == 503
        assert asked(server, BODY)[0] == 503


class Broken:
    """What a model with bad weights says, from some place on."""

    def __init__(self, start, said):
        self.start, self.said = start, said

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] < self.start:
            return scores
        if self.said is None:
            raise ZeroDivisionError("of a text that nobody is told")
        return torch.full_like(scores, self.said)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("served_by", [serving, far], ids=["here", "across a pipe"])
@pytest.mark.parametrize(
    ("tokens", "value", "named"),
    [(0, -float("inf"), "NaN"), (30, float("nan"), "NaN"), (30, None, "ZeroDivisionError")],
)
def test_a_row_that_fails_is_the_servers_fault_and_nobody_elses(
    shipped, monkeypatch, served_by, tokens, value, named
):
    """At once or in mid-answer: 500 or an event of a stream, and its neighbour has its text."""
    sampling, bad, texts = RequestParser._sampling, BODY | {"seed": 13, "max_tokens": 200}, []

    def broken(orders, body, copy, ids, grammar):
        made = sampling(orders, body, copy, ids, grammar)
        processors = (Broken(len(ids) + tokens, value),) if body.seed == 13 else ()
        return replace(made, processors=processors)

    monkeypatch.setattr(RequestParser, "_sampling", broken)
    with served_by(shipped) as server:
        alone = write(server.client(), seed=5, max_tokens=80).choices[0].text
        beside = threading.Thread(
            target=lambda: texts.append(streamed(server.client(), seed=5, max_tokens=80)[0])
        )
        beside.start()
        error = refused(server, 500, bad, named)
        assert "nobody" not in error["message"]
        assert error["type"] == "server_error"
        assert error["code"] == "decoding_failed"
        if tokens:
            told = list(events(server, bad | {"stream": True}))
            assert "[DONE]" not in told
            assert len(told) > 1
            last = json.loads(told[-1])["error"]
            assert (last["type"], last["code"]) == (error["type"], error["code"])
        beside.join()
        assert texts == [alone]
        assert idle(server)
        assert server.engine.alive
