"""What is refused, in OpenAI's format."""

import copy
import json
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
from served import BODY, NAME, PROMPT, asked, events, idle, refused, serving, streamed, write

from outrider.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResumeState,
    SpeculativeConfig,
    StreamOptions,
)
from outrider.server.request_parsing import RequestParser

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
    ("stop", ["a"] * 65),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop_token_ids", [10**7]),
    ("logit_bias", {"1" * 5000: 1}),
    ("logit_bias", {"\u0664": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": -1e6}),
    ("logit_bias", {"5": 1e300}),
    ("logit_bias", {"5": float("nan")}),
    ("temperature", float("nan")),
    ("timeout", float("inf")),
    ("max_tokens", 505),
    ("max_tokens", 10**9),
    ("prompt", [7] * 512),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", [10**7]),
    ("prompt", "x = 1\n" * 300),
    ("suffix", "x"),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncation_side", "middle"),
    ("priority", "high"),
    ("priority", 2**63),
    ("use_beam_search", True),
    ("length_penalty", 2),
    ("response_format.type", {"type": "xml"}),
    ("speculative_config", {"method": "magic"}),
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


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("stop", {"stop": 3}),
        ("stop.0", {"stop": [None]}),
        ("top_k", {"top_k": 10**30}),
        ("repetition_penalty", {"repetition_penalty": 1e-300}),
        ("resume", {"stream": True, "resume": [{"token_ids": [10**6]}]}),
        (None, {"prompt": "\ud800"}),
    ],
)
def test_the_field_at_fault_is_one_that_was_sent(server, param, more):
    """Not a kind that it was tried as, nor a penalty so small that the model's numbers overflow."""
    assert refused(server, 400, BODY | more)["param"] == param


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "asked_for",
    [
        {"num_speculative_tokens": 0},
        {"method": "none"},
        {"method": "default"},
        {"method": "suffix"},
    ],
)
def test_a_prediction_that_would_not_be_drafted_from_is_refused(server, asked_for):
    prediction = {"type": "content", "content": "x = 1"}
    body = BODY | {"prediction": prediction, "speculative_config": asked_for}
    assert refused(server, 400, body, "method 'prediction'")["param"] == "prediction"
    for method in ("prediction", "reference_lookup"):
        code, _ = asked(server, body | {"speculative_config": {"method": method}})
        assert code == 200, method


def test_a_mode_of_log_probabilities_needs_them(chatty):
    mode = {"logprobs_mode": "processed_logprobs"}
    refused(chatty, 400, BODY | mode, "logprobs_mode needs logprobs")
    turn = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    chat = {"path": "/v1/chat/completions"}
    refused(chatty, 400, turn | mode | {"logprobs": False}, "logprobs_mode needs", **chat)
    assert asked(chatty, BODY | mode | {"logprobs": 0})[0] == 200
    assert asked(chatty, turn | mode | {"logprobs": True}, **chat)[0] == 200


def test_a_prompt_is_cut_by_a_number_and_not_between_the_marks_of_a_suffix(chatty):
    """The first mark is the prompt's first token, and the last one its last."""
    cut, side = {"truncate_prompt_tokens": 3}, {"truncation_side": "left"}
    error = refused(chatty, 400, BODY | cut | {"suffix": "x"}, "marks of a suffix")
    assert error["param"] == "truncate_prompt_tokens"
    refused(chatty, 400, BODY | {"suffix": "x"}, "fill-in-the-middle")
    assert asked(chatty, BODY | cut | {"suffix": ""})[0] == 200
    turn = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for body, path in ((BODY, "/v1/completions"), (turn, "/v1/chat/completions")):
        error = refused(chatty, 400, body | side, "needs truncate_prompt_tokens", path=path)
        assert error["param"] == "truncation_side"
        assert asked(chatty, body | side | cut, path)[0] == 200


class Bare:
    """What `outrider.types.Tokenizer` asks for, and nothing else."""

    def __init__(self, inner):
        self.inner, self.decode, self.get_vocab = inner, inner.decode, inner.get_vocab

    def __call__(self, text):
        return {"input_ids": self.inner(text)["input_ids"]}


def test_what_a_tokenizer_cannot_do_is_refused(shipped, server):
    """One that is not transformers': fields were dropped without a word, or were a 500."""
    ids = shipped.tokenizer(PROMPT)["input_ids"]
    bare, tokenize = copy.copy(shipped), {"path": "/tokenize"}
    bare.tokenizer = Bare(shipped.tokenizer)
    body = BODY | {"max_tokens": 4, "temperature": 0}
    with serving(bare) as other:
        for param, given in [
            ("add_special_tokens", False),
            ("suffix", "x"),
            ("prediction", {"type": "content", "content": "x"}),
            ("guided_regex", "a"),
        ]:
            error = refused(other, 400, body | {param: given}, param, "tokenizer of transformers")
            assert error["param"] == param
        for param, told in [
            ("add_special_tokens", {"content": "x"}),
            ("return_token_strs", {"prompt": "x", "return_token_strs": True}),
        ]:
            assert refused(other, 400, told, "of transformers", **tokenize)["param"] == param
        same = [body, body | {"add_special_tokens": True}]
        same.append(body | {"prompt": ids, "add_special_tokens": False})  # nothing is added to ids
        for each in same:
            assert asked(other, each)[1]["choices"] == asked(server, each)[1]["choices"]
        for each in ({"prompt": PROMPT}, {"prompt": ""}, {"content": PROMPT, "add_special": True}):
            assert asked(other, each, **tokenize) == asked(server, each, **tokenize)


def test_a_body_that_is_no_json_blames_no_field(server):
    assert refused(server, 400, b"\xff\xfe", "JSON")["param"] is None
    assert refused(server, 400, b"", "the body is empty")["param"] is None
    assert (
        refused(server, 400, b'{"a": }', "no JSON: Expecting value, at character 6")["param"]
        is None
    )


def test_what_has_no_room_says_which_field_is_too_long(server):
    """The prompt alone, or what is asked for beside it; the default of 16 is as many as fit."""
    for param, more in (
        ("prompt", {"prompt": [7] * 512, "max_tokens": 1}),
        ("max_tokens", {"prompt": [7] * 498, "max_tokens": 40}),
    ):
        error = refused(server, 400, BODY | more)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded"), more
    for more in ({"max_tokens": 5}, {}):
        told = asked(server, BODY | {"prompt": [7] * 498, "ignore_eos": True} | more)
        assert 0 < told[1]["usage"]["completion_tokens"] < 16


@pytest.fixture
def chatty(server, shipped, monkeypatch):
    """The server of a model that can chat."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", template)
    return server


def required(kind):
    return {name for name, field in kind.model_fields.items() if field.is_required()}


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatCompletionRequest)],
)
def test_null_is_a_field_left_out(chatty, path, kind):
    """Every field of the body and of what is in it, and a text is the one without them."""
    message = {"role": "user", "content": "x"}
    needed = {"model": NAME, "prompt": "x", "messages": [message | {"name": None}]}
    body = {name: needed[name] for name in required(kind)} | {"temperature": 0, "max_tokens": 8}
    nulls = dict.fromkeys(kind.model_fields)
    inner = {"stream": True, "resume": [dict.fromkeys(ResumeState.model_fields)]}
    inner["stream_options"] = dict.fromkeys(StreamOptions.model_fields)
    inner["speculative_config"] = dict.fromkeys(SpeculativeConfig.model_fields)

    def text(told):
        choice = told["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    plain = asked(chatty, body, path)
    assert plain[0] == 200, plain
    assert text(asked(chatty, nulls | body, path)[1]) == text(plain[1])
    assert kind.model_validate(body | inner).stream_options == StreamOptions()
    for name in required(kind):
        refused(chatty, 400, nulls | body | {name: None}, name, path=path)


def test_null_is_a_field_that_is_left_out(server):
    free = [
        name for name, field in CompletionRequest.model_fields.items() if not field.is_required()
    ]
    asked_for = BODY | {"seed": 3, "max_tokens": 8}
    plain, nulls = (asked(server, more | asked_for)[1] for more in ({}, dict.fromkeys(free)))
    assert nulls["choices"] == plain["choices"]
    assert refused(server, 400, asked_for | {"prompt": None})["param"].startswith("prompt")
    nothing = {"tools": None, "no_such": None}
    assert asked(server, asked_for | nothing)[1]["choices"] == plain["choices"]


def test_an_answer_is_given_back_as_it_came(chatty):
    """With the fields that the server and its clients write beside the text."""
    client, about = chatty.client(), {"model": NAME, "max_tokens": 8, "temperature": 0}
    said = [{"role": "user", "content": "x"}]
    first = client.chat.completions.create(messages=said, **about).choices[0].message
    assert first.model_dump()["refusal"] is None
    said += [first.model_dump(), {"role": "user", "content": "y"}]
    again = client.chat.completions.create(messages=said, **about)
    said[1] = {"role": "assistant", "content": first.content}
    bare = client.chat.completions.create(messages=said, **about)
    assert again.choices[0].message.content == bare.choices[0].message.content


@pytest.mark.parametrize("number", ["1e309", "NaN", "-Infinity"])
def test_numbers_that_json_does_not_have_are_the_schemas_fault(server, number):
    schema = {"type": "number", "maximum": 0.125}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = json.dumps(BODY | {"response_format": form}).replace("0.125", number)
    assert refused(server, 400, body.encode())["param"] == "response_format"


def test_a_grammar_that_is_too_large_says_so(server):
    refused(server, 400, BODY | {"guided_regex": "(a{1000}){1000}{1000}"}, "too large")


def test_a_fault_of_our_own_is_told_as_one(server, monkeypatch):
    """And not as an engine that has stopped, which clients try again."""

    def choices(self, body):
        raise LookupError("nobody has foreseen this")

    with monkeypatch.context() as patch:
        patch.setattr(RequestParser, "completions", choices)
        error = refused(server, 500, BODY)
        assert error["message"] == "internal error: LookupError"  # its words may quote a text
        assert error["code"] == "internal_error"
    assert asked(server, BODY | {"max_tokens": 2})[0] == 200


def test_bodies_that_contradict_themselves(server):
    refused(server, 400, BODY | {"stream_options": {}}, "stream_options are for streams")
    refused(server, 400, BODY | {"best_of": 1, "n": 3}, "best_of is less than n")
    refused(server, 400, BODY | {"n": 5000}, "there is room for")
    regex = {"guided_regex": "a", "response_format": {"type": "json_object"}}
    refused(server, 400, BODY | regex, "give one")
    for text in ("root ::= (", "a ::= b", "root ::= " + "(" * 20_000):
        error = refused(server, 400, BODY | {"guided_grammar": text}, "from GBNF to Lark")
        assert error["param"] == "guided_grammar"
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
    refused(server, 404, BODY, "no vectors", "embedding model", path="/v1/embeddings")
    refused(server, 404, BODY, "ask /v1/completions", path="/completion")
    refused(server, 405, None, method="GET")
    refused(server, 413, b"x" * (1 << 20) + b"xx", "more than")
    refused(server, 400, b"[" * 40 + b"]" * 40, "nested")
    refused(server, 431, BODY, "headers", headers={"x-long": "x" * 17_000})
    assert write(server.client(), max_tokens=2, seed=1).usage.completion_tokens == 2


def test_a_key_is_needed_where_there_are_keys(shipped):
    with serving(shipped, keys=("first", "second"), public=False) as server:
        for key in ("none", "firs", "firstx"):
            with pytest.raises(openai.AuthenticationError, match="no valid key"):
                write(server.client(key))
        assert write(server.client("second"), max_tokens=2, seed=1).usage.completion_tokens == 2
        assert asked(server, None, "/health", method="GET")[0] == 200
        refused(server, 401, None, path="/metrics", method="GET")


def preflight(server, origin):
    """What a browser is told when it asks whether a page may ask."""
    request = urllib.request.Request(server.address + "/v1/completions", method="OPTIONS")
    request.add_header("Origin", origin)
    request.add_header("Access-Control-Request-Method", "POST")
    request.add_header("Access-Control-Request-Headers", "authorization,x-stainless-arch")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers)


def test_pages_of_named_sites_may_ask_with_a_key(shipped):
    site = "https://example.org"
    with serving(shipped, keys=("first",), origins=(site,)) as server:
        status, headers = preflight(server, site)
        assert status == 200
        assert headers["access-control-allow-origin"] == site
        assert "x-stainless-arch" in headers["access-control-allow-headers"].lower()
        assert preflight(server, "https://example.com")[0] == 400
        request = urllib.request.Request(server.address + "/v1/models", headers={"Origin": site})
        with pytest.raises(urllib.error.HTTPError) as raised:  # a page can read why
            urllib.request.urlopen(request, timeout=30)
        assert raised.value.code == 401
        assert raised.value.headers["access-control-allow-origin"] == site
        raised.value.close()
        request.add_header("authorization", "bearer first")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200


def test_a_full_queue_says_when_to_come_back(shipped):
    with serving(shipped, max_num_seqs=1, max_queued_requests=1) as server:
        client, texts = server.client(), []
        streams = [write(client, max_tokens=300, stream=True, seed=1)]
        next(iter(streams[0]))
        waiting = threading.Thread(target=lambda: texts.append(write(client, seed=2)))
        waiting.start()
        while server.engine.load.waiting < 1:
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


def test_a_text_is_the_same_after_what_was_refused(server):
    before = write(server.client(), seed=3).choices[0].text
    refused(server, 400, BODY | {"logit_bias": {"999999": 1}})
    assert streamed(server.client(), seed=3)[0] == before


TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema"}


@pytest.mark.parametrize(
    ("path", "more", "param", "word"),
    [
        ("completions", {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens=8; got 9"),
        ("completions", {"min_tokens": 17}, "min_tokens", "max_tokens=16; got 17"),
        ("completions", {"n": 3, "best_of": 2}, "best_of", "less than n"),
        ("completions", {"stop": 5}, "stop", "text or a list is wanted"),
        ("completions", {"logit_bias": [5]}, "logit_bias", "an object is wanted"),
        ("completions", {"stream_options": {}}, "stream_options", "set stream"),
        ("completions", {"response_format": "json"}, "response_format", "an object is wanted"),
        ("completions", {"response_format": {}}, "response_format.type", "required"),
        ("completions", {"response_format": SCHEMA}, "response_format.json_schema", "without it"),
        (
            "completions",
            {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
            "response_format.json_schema",
            "got type 'text'; leave it out",
        ),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice", "needs tools"),
        ("chat/completions", {"tools": [TOOL, TOOL]}, "tools", "one name"),
        (
            "chat/completions",
            {"tools": [TOOL], "tool_choice": {"type": "function"}},
            "tool_choice.function",
            "required",
        ),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (
            "chat/completions",
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
        ),
        ("responses", {"text": {"format": SCHEMA}}, "text.format.schema", "without it"),
    ],
)
def test_what_does_not_go_together_names_its_field(server, path, more, param, word):
    """Such errors named none, or said what nobody had sent: `min_tokens` over `max_tokens` was
    taken."""
    body = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(
        path, {"messages": [{"role": "user", "content": "x"}]}
    )
    code, told = asked(server, {"model": NAME, **body, **more}, f"/v1/{path}")
    assert (code, told["error"]["param"]) == (400, param)
    assert word in told["error"]["message"]
