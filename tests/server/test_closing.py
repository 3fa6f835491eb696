"""A server that is ended while it answers: what is done in time is whole, the rest is told so."""

import json
import threading
import time

import pytest
from served import BODY, asked, events, far, serving


@pytest.mark.parametrize("opened", [serving, far], ids=["here", "across a pipe"])
def test_whoever_waits_is_told_that_the_server_closes(shipped, opened):
    long = BODY | {"ignore_eos": True, "temperature": 0, "speculative_config": {"method": "none"}}
    long["max_tokens"] = 480
    with opened(shipped, max_num_seqs=1, grace=0.2) as server:
        got = []
        stream = events(server, long | {"stream": True})
        assert "choices" in json.loads(next(stream))
        waits = [threading.Thread(target=lambda: got.append(asked(server, long))) for _ in "ab"]
        for each in waits:
            each.start()
        ends = time.monotonic() + 20
        while server.engine.load.waiting < 2:
            assert time.monotonic() < ends
            time.sleep(0.01)
        server.uvicorn.should_exit = True
        *_, last = stream
        for each in waits:
            each.join(20)
    assert json.loads(last)["error"]["code"] == "closing"
    assert [(code, told["error"]["code"]) for code, told in got] == [(503, "closing")] * 2
