"""A stream that broke off goes on from another server with the text it would have had."""

import json
import urllib.error

import pytest
from served import NAME, PROMPT, events, serving

from outrider import Request, Stop, StopConditions
from outrider.engine.outputs import StepOutput
from outrider.errors import ConfigurationError
from outrider.server.request_parsing import ChoiceState
from outrider.server.response_builder import append_output, metrics
from outrider.text.output_text import IncrementalText


def chunks(server, **body):
    """What a stream tells, as JSON."""
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 20, "temperature": 0.8, "seed": 5} | body
    options = {"include_usage": True, "include_obfuscation": False}
    body |= {"stream": True, "stream_options": options, "return_token_ids": True}
    *told, last = events(server, body)
    assert last == "[DONE]"
    return [json.loads(one) for one in told]


def held(chunks, count):
    """What a client has of each choice after some chunks: its text, and what it says of it."""
    texts = [""] * count
    sent = [{"token_ids": [], "characters": 0, "finish_reason": None} for _ in range(count)]
    for chunk in chunks:
        for one in chunk["choices"]:
            mine = sent[one["index"]]
            texts[one["index"]] += one["text"]
            mine["token_ids"] += one["token_ids"]
            mine["characters"] += len(one["text"])
            mine["finish_reason"] = one["finish_reason"]
    return texts, sent


ASKED = {
    "seeded": {},
    "two of two": {"prompt": [PROMPT, "import os\n"], "n": 2, "max_tokens": 8},
    "accents": {"prompt": "# naïve café, Übergröße, 日本語\n# naïve", "temperature": 1.5},
    "stop string": {"stop": ["\n"], "max_tokens": 30},
    "penalties": {"frequency_penalty": 50, "presence_penalty": 9, "repetition_penalty": 1.3},
    "least": {"min_tokens": 12, "stop_token_ids": list(range(5, 4096, 9))},
    "regex": {"guided_regex": "[a-z]{4} = [0-9]{3}, [0-9]{3}"},
    "greedy": {"temperature": 0, "max_tokens": 12},
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ASKED)
def test_a_stream_goes_on_wherever_it_broke_off(server, name):
    asked = ASKED[name]
    whole = chunks(server, **asked)
    count = 4 if name == "two of two" else 1
    texts, ended = held(whole, count)
    assert all(one["finish_reason"] for one in ended)
    body = whole[:-1]
    for cut in sorted({1, len(body) // 2, len(body) - 1, len(body)} - {0}):
        before, sent = held(body[:cut], count)
        rest = chunks(server, **asked, resume=sent)
        after, _ = held(rest, count)
        assert [one + more for one, more in zip(before, after, strict=True)] == texts
        assert rest[-1]["usage"] == whole[-1]["usage"] | {
            "prompt_tokens_details": rest[-1]["usage"]["prompt_tokens_details"]
        }


def test_times_are_of_what_this_server_writes(server):
    """They were those of the first choice, which may be over, and counted what the client sent."""
    _, sent = held(chunks(server, n=2), 2)
    sent[1] |= {"token_ids": sent[1]["token_ids"][:12], "finish_reason": None}
    told = chunks(server, n=2, resume=sent)[-1]["metrics"]
    assert told["time_to_first_token_ms"] > 0
    assert told["tokens_per_second"] == pytest.approx(8e3 / told["generation_time_ms"])


def test_times_reach_to_the_last_token_of_any_choice():
    choices = [
        ChoiceState(at, 0, "", Request([1]), IncrementalText(None, Stop(), [1])) for at in range(2)
    ]
    for row, reason in [(0, None), (1, "stop"), (0, "length")]:
        append_output(choices[row], StepOutput(row, [5], 0, reason))
    spent = choices[0].last - choices[0].arrived
    assert metrics(choices)["generation_time_ms"] == pytest.approx(1e3 * spent)
    assert metrics(choices)["mean_itl_ms"] >= 0


def test_without_what_was_sent_penalties_would_begin_anew(server):
    """Why a resumed stream says which of its tokens are the answer's."""
    asked = ASKED["penalties"] | {"max_tokens": 32}
    texts, _ = held(chunks(server, **asked), 1)
    some = chunks(server, **asked | {"max_tokens": 16})
    before, sent = held(some, 1)
    prompt = some[0]["choices"][0]["prompt_token_ids"] + sent[0]["token_ids"]
    after, _ = held(chunks(server, **asked | {"prompt": prompt, "max_tokens": 16}), 1)
    assert before[0] + after[0] != texts[0]


def test_another_server_goes_on(server, shipped):
    whole, _ = held(chunks(server), 1)
    before, sent = held(chunks(server)[:2], 1)
    with serving(shipped, max_num_seqs=2) as another:
        after, _ = held(chunks(another, resume=sent), 1)
    assert before[0] + after[0] == whole[0]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"resume": []}, "resume says of 0 choices what is there; got 1"),
        ({"resume": [{}, {}]}, "resume says of 2 choices what is there; got 1"),
        ({"resume": [{"token_ids": [5] * 20}]}, "choice 0 has all of its tokens already"),
        ({"resume": [{"token_ids": [-1]}]}, "resume"),
        ({"resume": [{"token_ids": [10**9]}]}, "outside the vocabulary"),
        ({"resume": [{}], "stream": False}, "resume is for streams"),
    ],
)
def test_what_cannot_be_resumed_is_refused(server, body, part):
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 20, "stream": True} | body
    with pytest.raises(urllib.error.HTTPError) as caught:
        next(events(server, body))
    assert caught.value.code == 400
    assert part in json.loads(caught.value.read())["error"]["message"]


def test_an_engine_refuses_an_answer_without_a_prompt():
    with pytest.raises(ConfigurationError, match="less than the prompt's 2 tokens"):
        Request([1, 2], limits=StopConditions(4), written=2)
    assert Request([1, 2, 3], written=2).asked == (1,)
