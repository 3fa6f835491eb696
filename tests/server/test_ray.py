"""A fleet without Ray: what is kept of a stream, and a server that is asked without a socket.

With Ray, where it is installed: marked slow.
"""

import asyncio
import importlib.util
import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from served import NAME, PROMPT

import scripts
from outrider.server.app import COMPLETIONS, ServerConfig, build_app
from outrider.server.protocol import CompletionRequest
from outrider.server.serving import running
from outrider_ray.requests import StreamState, asked, key, ranked

NO_RAY = "Ray is not installed: pip install outrider-ray"
BODY = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 5}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


async def told(app, body, most=None):
    """Status of an answer, and the events of its stream; the client leaves after `most`."""
    headers = [(b"content-type", b"application/json")]
    status, text = 0, b""
    messages = asked(app, "POST", COMPLETIONS, headers, json.dumps(body).encode())
    async for message in messages:
        status = message.get("status", status)
        text += message.get("body", b"")
        if most is not None and text.count(b"\n\n") >= most:
            break
    await messages.aclose()
    events = [one.removeprefix(b"data: ") for one in text.split(b"\n\n")[:-1]]
    return status, events if events else text


def serve(speculator, work):
    """Run `work` with an application whose loop runs."""
    site = build_app(speculator, ServerConfig((NAME,), 4, 512))

    async def main():
        async with running(site.engine):
            return await work(site)

    return asyncio.run(main())


def client_has(chunks):
    """The text that a client puts together, and what surrounds it."""
    text = "".join(piece["text"] for chunk in chunks for piece in chunk["choices"])
    return text, {(chunk["id"], chunk["created"]) for chunk in chunks}


def test_a_server_is_asked_in_its_own_process(shipped):
    async def work(site):
        whole = await told(site.app, BODY)
        wrong = await told(site.app, BODY | {"nonsense": 1})
        streamed = await told(site.app, BODY | STREAM, most=2)
        for _ in range(200):
            if site.engine.load[:2] == (0, 0):
                break
            await asyncio.sleep(0.02)
        return whole, wrong, streamed, site.engine.load

    (status, text), wrong, streamed, load = serve(shipped, work)
    assert status == 200
    assert json.loads(text)["usage"]["completion_tokens"] == 24
    assert wrong[0] == 400
    assert streamed[0] == 200
    assert load[:2] == (0, 0), "who stops listening frees the row"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ids", [False, True])
def test_a_stream_from_several_replicas_is_one_stream(shipped, ids):
    body = BODY | STREAM | ({"return_token_ids": True} if ids else {})

    async def work(site):
        _, undisturbed = await told(site.app, body)
        going, chunks = StreamState(body, CompletionRequest.model_validate(body)), []
        for most in (2, 1, None):  # two replicas die
            _, events = await told(site.app, going.body(), most)
            for one in events[:most]:
                if one != b"[DONE]":
                    chunks.append(going.append(json.loads(one)))
        return [json.loads(one) for one in undisturbed[:-1]], chunks

    whole, chunks = serve(shipped, work)
    assert None not in chunks
    text, names = client_has(chunks)
    assert text == client_has(whole)[0]
    assert len(names) == 1, "one id, one time"
    assert len(chunks) > 4
    assert all(("token_ids" in p) == ids for chunk in chunks for p in chunk["choices"])
    counts = chunks[-1]["usage"]
    assert counts["completion_tokens"] == whole[-1]["usage"]["completion_tokens"]


def test_what_opens_a_choice_is_told_once():
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "stream": True}
    from outrider.server.protocol import ChatCompletionRequest

    going = StreamState(body, ChatCompletionRequest.model_validate(body))
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    said = {"index": 0, "delta": {"content": "é"}, "finish_reason": None, "token_ids": [7]}
    ids = {"prompt_token_ids": [5, 6]}  # asked for by the ingress, not by its client
    made = [{"id": f"{n}", "created": n, "choices": [dict(opening)]} | ids for n in (1, 2)]
    assert going.append(made[0]) == {"id": "1", "created": 1, "choices": [opening]}
    assert "resume" in going.body()
    assert going.append(made[1]) is None
    shown = going.append({"id": "2", "created": 2, "choices": [said]})
    assert (shown["id"], shown["created"]) == ("1", 1)
    assert going.body()["resume"] == [{"token_ids": [7], "characters": 1, "finish_reason": None}]


@pytest.fixture(scope="session")
def fleet():
    """Runs the benchmark's script where Ray is."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip(NO_RAY)
    return partial(scripts.run, sys.executable, "fleet.py")


@pytest.mark.slow
def test_streams_outlive_their_replica(fleet):
    found = fleet("streams")
    assert found["replicas"] == 2
    assert found["same_texts"] == 8
    assert max(found["longest_gaps"]) > 0.5, "somebody waited for another replica"


@pytest.mark.slow
def test_a_file_of_requests_outlives_a_worker(fleet):
    found = fleet("batch", "--after", 8)
    assert found["workers_killed"] == 1
    assert found["rows"] == found["different"] == found["same_texts_as_without_ray"] == 200


def test_like_prompts_meet_and_others_stay_where_they_are():
    names = [f"replica {n}" for n in range(5)]
    keys = [key({"prompt": f"{n} {'x' * 2000} {tail}"}) for n in range(50) for tail in "ab"]
    firsts = [ranked(one, names)[0] for one in keys]
    assert firsts[::2] == firsts[1::2]
    assert len(set(firsts)) == 5
    left = [ranked(one, names[1:])[0] for one in keys]
    moved = [a != b for a, b in zip(firsts, left, strict=True)]
    assert moved == [first == names[0] for first in firsts]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, as it is imported
def test_replicas_are_told_the_text_of_a_chat_template(tmp_path):
    pytest.importorskip("ray", reason=NO_RAY)
    from outrider_ray.replicas import ReplicaConfig

    (file := tmp_path / "own.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert ReplicaConfig().chat_template is None
    told = ReplicaConfig(chat_template=file).chat_template
    assert told == ReplicaConfig(chat_template=told).chat_template == "{{ messages[0].content }}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, as it is imported
def test_serve_asks_replicas_in_the_order_of_the_key():
    pytest.importorskip("ray", reason=NO_RAY)
    from ray.serve.request_router import PendingRequest

    from outrider_ray.replicas import PrefixRouter

    some = [SimpleNamespace(replica_id=f"replica {n}") for n in range(4)]

    async def choose(replicas, word):
        pending = PendingRequest([], {"key": word} if word else {}, SimpleNamespace())
        return await PrefixRouter.choose_replicas(None, replicas, pending)

    def order(replicas, word):
        chosen = asyncio.run(choose(replicas, word))
        assert all(len(rank) == 1 for rank in chosen)
        return [rank[0].replica_id for rank in chosen]

    orders = {word: order(some, word) for word in "abcdefgh"}
    assert all(order(some[::-1], word) == first for word, first in orders.items())
    assert len({first[0] for first in orders.values()}) > 1, "the key decides"
    assert order(some, None) == order(some, None) == ranked("", [one.replica_id for one in some])
