"""What clients of vLLM and llama.cpp ask for, under their names."""

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import BODY, NAME, PROMPT, asked, events, refused, serving

import outrider
from outrider.server.batch_runners import SCORES
from outrider.server.chat_prompts import infill_prompt
from outrider.server.errors import APIError
from outrider.server.protocol import ChatCompletionRequest

ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
SCORED = {"echo": True, "logprobs": 0, "max_tokens": 0}


def test_a_model_that_is_not_named_is_the_one_that_is_served(server):
    """vLLM's and llama.cpp's servers take such requests: they serve one model."""
    named = asked(server, ASKED | {"model": NAME})[1]
    for without in (ASKED, ASKED | {"model": None}, ASKED | {"model": ""}):
        code, told = asked(server, without)
        assert (code, told["model"]) == (200, NAME)
        assert told["choices"][0]["text"] == named["choices"][0]["text"]
        assert told["system_fingerprint"] == named["system_fingerprint"]
    refused(server, 404, ASKED | {"model": "other"}, "no model 'other'")


def test_a_response_tells_the_model_that_wrote_it(server, shipped, monkeypatch):
    monkeypatch.setattr(shipped.tokenizer, "chat_template", "{{ messages[0].content }}")
    told = asked(server, {"input": "x", "max_output_tokens": 4}, "/v1/responses")[1]
    assert told["model"] == NAME


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_is_a_look_at_its_health(server, method):
    data = b"" if method == "POST" else None
    assert asked(server, data, "/ping", method=method) == asked(
        server, None, "/health", None, "GET"
    )


def test_what_is_served_is_told(server):
    with urllib.request.urlopen(server.address + "/version") as answer:
        assert json.load(answer) == {"version": outrider.__version__}
    with urllib.request.urlopen(server.address + "/v1/models") as answer:
        told = json.load(answer)["data"][0]["max_model_len"]
    ids = [20] * (told - 8)  # what is told fits, and not a token more
    assert asked(server, ASKED | {"prompt": ids})[0] == 200
    refused(server, 400, ASKED | {"prompt": ids, "max_tokens": 9}, "ask for at most 8")


def test_a_ping_needs_no_key(shipped):
    with serving(shipped, keys=("secret",)) as server:
        assert asked(server, None, "/ping", method="GET")[0] == 200
        assert asked(server, None, "/version", method="GET")[0] == 401


def test_a_prompt_is_cut_where_it_is_asked(shipped, server):
    ids = list(range(20, 60))
    told = {"prompt": ids, "max_tokens": 4, "temperature": 0, "return_token_ids": True}

    def read(**more):
        choice = asked(server, told | more)[1]["choices"][0]
        return choice["prompt_token_ids"], choice["text"]

    assert read(truncate_prompt_tokens=5) == read(prompt=ids[-5:])
    assert read(truncate_prompt_tokens=5, truncation_side="right") == read(prompt=ids[:5])
    assert read(truncate_prompt_tokens=100) == read() == read(truncate_prompt_tokens=-1)
    long = (ids * 20)[:700]
    refused(server, 400, told | {"prompt": long}, "leave no room")
    kept, _ = read(prompt=long, truncate_prompt_tokens=-1, max_tokens=40)
    assert long[-len(kept) :] == kept
    refused(server, 400, told | {"prompt": kept, "max_tokens": 41}, "ask for at most 40")


TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_an_answer_goes_on_with_the_last_message(shipped, server, monkeypatch):
    """Or with nothing: the template's opening of a turn is left out."""
    monkeypatch.setattr(shipped.tokenizer, "chat_template", TEMPLATE)
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "def f("}]
    about = {"messages": turns, "temperature": 0, "max_tokens": 8, "return_token_ids": True}

    def read(**more):
        told = asked(server, about | more, "/v1/chat/completions")[1]
        return shipped.tokenizer.decode(told["prompt_token_ids"], skip_special_tokens=True)

    written = "<user>x</><assistant>def f("
    assert read() == written + "</><assistant>"
    assert read(add_generation_prompt=False) == written + "</>"
    assert read(continue_final_message=True) == written
    assert read(continue_final_message=True, add_generation_prompt=False) == written
    own = {"chat_template_kwargs": {"continue_final_message": True}}
    refused(server, 400, about | own, "is not for", path="/v1/chat/completions")


def test_a_chats_prompt_is_told_beside_its_choices(shipped, server, monkeypatch):
    """As vLLM tells it: of an answer, and with the chunk that opens each choice of a stream."""
    monkeypatch.setattr(shipped.tokenizer, "chat_template", TEMPLATE)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "n": 2, "seed": 3}
    path, ids = "/v1/chat/completions", {"return_token_ids": True}
    whole = asked(server, chat | ids, path)[1]
    prompt = shipped.tokenizer("<user>x</><assistant>", add_special_tokens=False)["input_ids"]
    assert whole["prompt_token_ids"] == prompt
    assert [sorted(one) for one in whole["choices"]] == 2 * [
        ["finish_reason", "index", "logprobs", "message", "token_ids"]
    ]
    *flow, _ = events(server, chat | ids | {"stream": True}, path)
    said = [json.loads(one) for one in flow]
    assert [one.get("prompt_token_ids") for one in said] == [prompt] * 2 + [None] * len(said[2:])
    parts = [piece for one in said for piece in one["choices"]]
    for choice in whole["choices"]:
        own = [piece for piece in parts if piece["index"] == choice["index"]]
        assert [token for one in own for token in one.get("token_ids", [])] == choice["token_ids"]
    assert not any("prompt_token_ids" in piece for piece in parts)
    assert "prompt_token_ids" not in asked(server, chat, path)[1]


def test_special_tokens_may_be_left_out(shipped, server, monkeypatch):
    """Of a prompt that has them already: a template that was written out by the client."""
    seen = []
    before = type(shipped.tokenizer).__call__

    def call(self, text, **options):
        seen.append(options.get("add_special_tokens"))
        return before(self, text, **options)

    monkeypatch.setattr(type(shipped.tokenizer), "__call__", call)
    assert asked(server, ASKED | {"add_special_tokens": False})[0] == 200
    assert seen[0] is False


def test_the_least_priority_has_the_next_row(shipped):
    """And of equals who came first; nobody who has a row loses it."""
    ended = []
    with serving(shipped, max_num_seqs=1) as server, ThreadPoolExecutor(6) as pool:

        def ask(name, **more):
            assert asked(server, ASKED | more)[0] == 200
            ended.append(name)

        def submit(name, **more):
            before = sum(server.engine.load[:2])
            going = pool.submit(ask, name, **more)
            while sum(server.engine.load[:2]) == before and not going.done():
                time.sleep(0.002)
            return going

        every = [submit("first", max_tokens=400, ignore_eos=True, priority=9)]
        for name, more in [
            ("late", {"priority": 5}),
            ("usual", {}),
            ("usual, later", {"priority": 0}),
            ("urgent", {"priority": -1}),
            ("urgent scores", SCORED | {"priority": -2}),
        ]:
            every.append(submit(name, **more))
        for one in every:
            one.result()
    assert ended == ["first", "urgent scores", "urgent", "usual", "usual, later", "late"]


@pytest.mark.parametrize("priority", [0, 3])
def test_a_prompts_scores_wait_as_its_answer_does(server, monkeypatch, priority):
    """From its arrival on, by its priority."""
    seen, stream = [], server.engine.stream

    def watched(requests):
        seen.extend(requests)
        return stream(requests)

    monkeypatch.setattr(server.engine, "stream", watched)
    assert asked(server, ASKED | {"prompt_logprobs": 0, "priority": priority})[0] == 200
    answer, scores = seen
    assert (scores.lane, scores.priority, scores.arrived) == (SCORES, priority, answer.arrived)
    assert answer.priority == priority


class Words:
    """A tokenizer, as far as names of tokens go; one that does not know a name calls it unknown."""

    def __init__(self, *names):
        self.names = ["<unk>", *names]

    def convert_tokens_to_ids(self, name):
        return self.names.index(name) if name in self.names else 0

    def convert_ids_to_tokens(self, token):
        return self.names[token]


def test_a_gap_is_filled_by_models_that_have_tokens_for_it():
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    text, ends = infill_prompt(Words(*marks, "<|file_sep|>"), "a = ", "\nb")
    assert text == "<|fim_prefix|>a = <|fim_suffix|>\nb<|fim_middle|>"
    assert ends == (1, 2, 3, 4)
    deepseek = Words(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    )
    assert infill_prompt(deepseek, "a", "b")[0].startswith("<\uff5cfim\u2581begin\uff5c>a")
    with pytest.raises(APIError, match="no fill-in-the-middle tokens"):
        infill_prompt(Words(*marks[:2]), "a", "b")


def test_a_suffix_goes_with_one_text(server):
    for more in ({"prompt": [1, 2]}, {"prompt": ["a", "b"]}, {"echo": True}):
        error = refused(server, 400, ASKED | {"suffix": "x"} | more, "one prompt that is text")
        assert error["param"] == "suffix"
    assert refused(server, 400, ASKED | {"suffix": "x"}, "fill-in-the-middle")["param"] == "suffix"
    empty = asked(server, ASKED | {"suffix": ""})[1]["choices"]  # nothing stands behind it
    assert empty == asked(server, ASKED)[1]["choices"]


def test_fields_that_ask_for_what_is_done_anyway_are_taken(server):
    """vLLM's clients write them out; any other value is refused with the field's name."""
    usual = {"skip_special_tokens": True, "include_stop_str_in_output": False}
    usual |= {"spaces_between_special_tokens": True, "use_beam_search": False}
    usual["cache_prompt"] = True
    assert asked(server, BODY | usual | {"length_penalty": 1.0})[0] == 200
    for name, value in usual.items():
        code, told = asked(server, BODY | {name: not value})
        assert (code, told["error"]["param"]) == (400, name)
    chat = {"echo": False, "include_reasoning": True, "modalities": ["text"], "top_logprobs": 0}
    chat |= {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
    assert ChatCompletionRequest.model_validate(chat | usual)
    code, told = asked(server, chat | {"modalities": ["audio"]}, "/v1/chat/completions")
    assert (code, told["error"]["param"]) == (400, "modalities.0")
