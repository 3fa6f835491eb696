"""Log-probabilities of prompts, tokens of texts, and how many answers a request may ask for."""

import json
import urllib.error
import urllib.request

import openai
import pytest
from served import NAME, PROMPT, serving, write
from test_routes import said, teacher_forced

from outrider.errors import NumericalError
from outrider.server import app


def post(server, path, body, kind="application/json"):
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(server.address + path, data, {"content-type": kind})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_an_echoed_prompt_is_scored_as_evaluations_ask_for_it(shipped, client):
    """The first token has no log-probability; the others have the model's own, answer included."""
    ids = shipped.tokenizer(PROMPT)["input_ids"]
    answer = write(client, ids, temperature=0, max_tokens=1, echo=True, logprobs=2).choices[0]
    logs = answer.logprobs
    written = shipped.tokenizer(answer.text, add_special_tokens=False)["input_ids"][-1]
    law = teacher_forced(shipped, ids[:1], [*ids[1:], written])
    assert logs.token_logprobs[0] is None
    assert logs.top_logprobs[0] is None
    expected = law[range(len(ids)), [*ids[1:], written]].tolist()
    assert logs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    best = [max(place.values()) for place in logs.top_logprobs[1:]]
    assert best == pytest.approx(law.max(-1).values.tolist(), abs=1e-3)
    for token, log, place in list(
        zip(logs.tokens, logs.token_logprobs, logs.top_logprobs, strict=True)
    )[1:]:
        assert place[token] == log  # OpenAI's: up to one more than was asked for
        assert len(place) in (2, 3)
    assert "".join(logs.tokens[1:]) == answer.text  # behind the token that begins a text
    assert len(logs.text_offset) == len(logs.tokens)
    scored = write(client, [PROMPT, "import os"], max_tokens=0, echo=True, logprobs=1)
    assert said(scored) == [PROMPT, "import os"]
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs == logs.token_logprobs[:-1]


def test_prompt_logprobs_are_vllms(client):
    whole = write(client, max_tokens=1, extra_body={"prompt_logprobs": 2}).choices[0]
    first, *places = whole.model_extra["prompt_logprobs"]
    assert first is None
    assert all(2 <= len(place) <= 3 for place in places)
    ranks = [sorted(one["rank"] or 9 for one in place.values()) for place in places]
    assert all(rank[:2] == [1, 2] for rank in ranks)
    echoed = write(client, max_tokens=1, echo=True, logprobs=2).choices[0].logprobs
    for place, log in zip(places, echoed.token_logprobs[1:], strict=False):
        assert log in [one["logprob"] for one in place.values()]


def test_tokens_of_texts_and_texts_of_tokens(shipped, server):
    ids = shipped.tokenizer(PROMPT)["input_ids"]
    status, told = post(server, "/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert (status, told["tokens"], told["count"]) == (200, ids, len(ids))
    assert told["token_strs"] == shipped.tokenizer.convert_ids_to_tokens(ids)
    text = shipped.tokenizer.decode(ids)
    told = {"prompt": text, "content": text}
    assert post(server, "/detokenize", {"model": NAME, "tokens": ids})[1] == told
    for more, kept in [  # llama.cpp's names, and vLLM's beside them
        ({}, ids[1:]),
        ({"add_special": True}, ids),
        ({"add_special": False}, ids[1:]),
        ({"add_special": None, "prompt": None, "add_special_tokens": None}, ids[1:]),
        ({"add_special_tokens": True}, ids),
        ({"add_special_tokens": True, "add_special": None}, ids),
        ({"add_special_tokens": False}, ids[1:]),
    ]:
        assert post(server, "/tokenize", {"content": PROMPT} | more)[1].get("tokens") == kept, more
    with urllib.request.urlopen(server.address + "/tokenizer_info") as answer:
        assert json.load(answer)["eos_token"] == shipped.tokenizer.eos_token
    assert post(server, "/tokenize", {"prompt": "", "add_special_tokens": False})[1]["count"] == 0
    for path, body, word in [
        ("/tokenize", {}, "prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt or messages"),
        ("/tokenize", {"content": None}, "prompt or messages"),
        ("/tokenize", {"content": "x", "prompt": "x"}, "content"),
        (
            "/tokenize",
            {"content": "x", "add_special": True, "add_special_tokens": True},
            "give one",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, "chat template"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "\ud800", "add_special_tokens": False}, "half a character"),
        ("/detokenize", {"tokens": [10**6]}, "outside the vocabulary"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "'other'"),
    ]:
        status, told = post(server, path, body)
        assert 400 <= status < 500, (path, body)
        assert word in told["error"]["message"]


def test_answers_beyond_the_rows_wait(client, server):
    """And `best_of` tells the likeliest of them."""
    rows = server.engine.rows
    seeded = {"seed": 3, "max_tokens": 6}
    many = write(client, n=3 * rows, **seeded)
    assert len(many.choices) == 3 * rows
    last = write(client, seed=3 + 3 * rows - 1, max_tokens=6)
    assert many.choices[-1].text == last.choices[0].text
    logs = write(client, n=2 * rows, logprobs=0, **seeded).choices
    means = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in logs}
    best = write(client, n=2, best_of=2 * rows, **seeded)
    assert said(best) == sorted(means, key=means.get, reverse=True)[:2]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == 6 * 2 * rows
    with pytest.raises(openai.BadRequestError, match="room for"):
        write(client, n=1000)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"prompt": ["x"] * 65}, "at most 64 prompts"),
        ({"prompt": [[1]] * 65}, "at most 64 prompts"),
        ({"stream": "yes"}, "boolean"),
        ({"stream": 1}, "boolean"),
        ({"echo": "true"}, "boolean"),
        ({"stop": ["x"] * 65}, "64"),
        ({"max_tokens": 0}, "echo"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "whole answers"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "exclude each other"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one of"),
        ({"store": True}, "store"),
    ],
)
def test_what_a_body_may_not_say_is_named(server, body, word):
    status, told = post(server, "/v1/completions", {"model": NAME, "prompt": "x"} | body)
    assert status == 400
    assert word in json.dumps(told)


def test_a_body_that_is_not_said_to_be_json_says_so(server):
    body = json.dumps({"model": NAME, "prompt": "x"}).encode()
    status, told = post(server, "/v1/completions", body, "application/x-www-form-urlencoded")
    assert status == 400
    assert "content-type: application/json" in told["error"]["message"]


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_json": {"enum": ["ab", "cd"]}},
        {"guided_json": '{"enum": ["ab", "cd"]}'},
        {"structured_outputs": {"json": {"enum": ["ab", "cd"]}}},
        {"guided_choice": ['"ab"', '"cd"']},
        {"structured_outputs": {"choice": ['"ab"', '"cd"']}},
        {"structured_outputs": {"regex": '"(ab|cd)"'}},
        {"structured_outputs": {"grammar": 'start: "\\"ab\\"" | "\\"cd\\""'}},
    ],
)
def test_vllms_names_for_grammars(client, asked):
    assert json.loads(said(write(client, seed=3, extra_body=asked))[0]) in ("ab", "cd")


def test_many_stop_strings(client):
    whole = said(write(client, seed=3))[0]
    stops = [f"never{number}" for number in range(20)] + [whole[5:8]]
    assert said(write(client, seed=3, stop=stops))[0] == whole[: whole.index(whole[5:8])]


def test_a_loop_that_is_full_says_so(shipped):
    with serving(shipped, max_num_seqs=1, max_queued_requests=1) as server:
        with pytest.raises(openai.BadRequestError, match="room for 2"):
            write(server.client(), n=3)
        assert len(write(server.client(), n=2, max_tokens=2).choices) == 2
        scored = {"echo": True, "logprobs": 0, "max_tokens": 2}
        assert write(server.client(), **scored).choices[0].logprobs
        with pytest.raises(openai.BadRequestError, match=r"and their scores.* room for 2"):
            write(server.client(), ["a b", "c d"], **scored)  # whoever else is there
        alone = scored | {"max_tokens": 0}  # nothing is written, and scores are all that waits
        assert len(write(server.client(), ["a b", "c d"], **alone).choices) == 2
        with pytest.raises(openai.BadRequestError, match=r"3 completions of 1 prompts; .* room"):
            write(server.client(), n=3, **alone)


def test_a_fault_of_ours_is_an_answer_and_a_line_of_the_log(server, monkeypatch, caplog):
    def broken(*_):
        raise NumericalError("NaN in a layer")

    monkeypatch.setattr(app, "tokenized", broken)
    status, told = post(server, "/tokenize", {"prompt": PROMPT})
    assert status == 500
    assert "NaN in a layer" in told["error"]["message"]
    (line,) = [one for one in caplog.records if one.name == "outrider.server"]
    assert line.getMessage() == "POST /tokenize"
    assert line.exc_info[0] is NumericalError
