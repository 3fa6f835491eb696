"""Tools, thoughts and grammars change no text: plain or drafted, alone or in company, in pieces."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from served import serving
from test_tools import SCHEMA as WEATHER, TEMPLATE, THINKS, ask, calls, choice, closed, flowed

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": closed(WEATHER)}}
MUST = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
FREE = {"tools": openai.omit}
KINDS = {
    "tools that may be called": {"max_tokens": 40},
    "tools that must be called": MUST,
    "thoughts": FREE | {"messages": THINKS, "extra_body": THINKING, "max_tokens": 40},
    "thoughts and tools": MUST | {"messages": THINKS, "extra_body": THINKING},
    "thoughts and a schema": FREE
    | {"messages": THINKS, "extra_body": THINKING, "response_format": FORM, "max_tokens": 60},
    "a schema": FREE | {"response_format": FORM},
    "an expression": FREE | {"extra_body": {"guided_regex": "[a-f]{4,9}(-[0-9]{2,8}){1,3}"}},
    "a choice": FREE | {"extra_body": {"guided_choice": ["yes", "no", "not yet"]}},
}

FAST = ("tools that may be called", "thoughts and a schema")


@pytest.fixture(scope="module")
def client(shipped):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped.tokenizer, "chat_template", TEMPLATE)
        with serving(shipped, reasoning_parser="qwen3", max_model_len=512) as running:
            yield running.client()


def whole(client, **how):
    """Content, thoughts, calls and finish reason of an answer."""
    one = choice(ask(client, **how))
    thought = (one.message.model_extra or {}).get("reasoning_content", "")
    return one.message.content or "", thought, calls(one.message), one.finish_reason


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", [{}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_answers_are_those_of_plain_decoding_alone_and_beside_seven(client, kind, how):
    asked = KINDS[kind] | how
    plain = {"speculative_config": {"method": "none"}}
    alone = whole(client, **asked)
    assert any(alone[:3])
    more = asked.get("extra_body", {})
    assert whole(client, **asked | {"extra_body": more | plain}) == alone
    assert flowed(client, **asked) == alone
    with ThreadPoolExecutor(9) as pool:
        about = FREE | {"temperature": 1, "max_tokens": 24}
        others = [pool.submit(ask, client, seed=at, **about) for at in range(7)]
        beside = pool.submit(whole, client, **asked)
        streamed = pool.submit(flowed, client, **asked)
        assert all(other.result().choices for other in others)
    assert beside.result() == streamed.result() == alone
