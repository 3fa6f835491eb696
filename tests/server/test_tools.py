"""Tools and thoughts over HTTP, asked by OpenAI's own client."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from served import NAME, serving

from outrider.server.grammar import closed

TEMPLATE = (
    "{% if tools %}# {{ tools | tojson }} arguments: <tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>\n{% endfor %}{% endfor %}"
    "{% if enable_thinking %}<think>\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
ASKED = [{"role": "user", "content": "the weather in Paris"}]


@pytest.fixture(scope="module")
def server(shipped):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped.tokenizer, "chat_template", TEMPLATE)
        with serving(shipped, reasoning_parser="qwen3", max_model_len=512) as running:
            yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def ask(client, messages=ASKED, **options):
    more = {"model": NAME, "max_tokens": 60, "tools": TOOLS, "temperature": 0} | options
    return client.chat.completions.create(messages=messages, **more)


def choice(answer):
    return answer.choices[0]


def calls(message):
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def flowed(client, **options):
    """A stream's message, put together as clients do: content, thoughts, calls, finish reason."""
    content, thoughts, called, reason = "", "", [], None
    for chunk in ask(client, stream=True, **options):
        for one in chunk.choices:
            content += one.delta.content or ""
            thoughts += (one.delta.model_extra or {}).get("reasoning_content", "")
            reason = one.finish_reason or reason
            for call in one.delta.tool_calls or []:
                if call.id is not None:
                    assert call.type == "function"
                    assert call.index == len(called)
                    called.append([call.function.name, ""])
                called[call.index][1] += call.function.arguments or ""
    return content, thoughts, [tuple(call) for call in called], reason


def fits(arguments):
    given = json.loads(arguments)
    return len(given["city"]) <= 8 and given["unit"] in ("C", "F") and len(given) == 2


HOW = [{}, {"temperature": 1, "seed": 5}, {"temperature": 1, "seed": 6}]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("how", HOW)
def test_calls_are_those_of_plain_decoding_at_any_load(client, how):
    """Drafted or not, alone or beside others, whole or in pieces; and they fit their schema."""
    asked = {"tool_choice": {"type": "function", "function": {"name": "weather"}}} | how
    plain = {"extra_body": {"speculative_config": {"method": "none"}}}
    whole = ask(client, **asked)
    called = calls(choice(whole).message)
    assert [name for name, _ in called] == ["weather"]
    assert fits(called[0][1])
    assert whole.choices[0].message.content is None
    assert called[0][1] == calls(choice(ask(client, **asked | plain)).message)[0][1]
    assert flowed(client, **asked) == ("", "", called, "stop")
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, client, seed=at, temperature=1) for at in range(7)]
        beside = pool.submit(ask, client, **asked).result()
        assert all(other.result().choices for other in others)
    assert calls(choice(beside).message) == called
    each = {"extra_body": {"stream_options": {"chunk_tokens": 1}}}
    assert flowed(client, **asked | each) == ("", "", called, "stop")


def test_an_answer_calls_what_it_must_and_no_more(client):
    several = ask(client, tool_choice="required", max_tokens=200)
    names = [name for name, _ in calls(choice(several).message)]
    assert names
    assert set(names) <= {"weather", "now"}
    one = choice(ask(client, tool_choice="required", parallel_tool_calls=False, max_tokens=200))
    assert len(calls(one.message)) == 1
    assert one.finish_reason == "tool_calls"
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    among = {"type": "allowed_tools", "allowed_tools": only}
    chosen = ask(client, tool_choice=among, max_tokens=200)
    assert set(calls(choice(chosen).message)) == {("now", "{}")}


def test_a_stop_string_within_a_call_ends_an_answer_that_has_called_nothing_whole(client):
    weather = [tool for tool in TOOLS if tool["function"]["name"] == "weather"]
    asked = {"tools": weather, "tool_choice": "required", "parallel_tool_calls": False}
    whole = choice(ask(client, max_tokens=200, **asked))
    assert whole.finish_reason == "tool_calls"
    asked |= {"stop": '"unit"', "max_tokens": 200}
    cut = choice(ask(client, **asked))
    assert cut.finish_reason == "stop"
    ((name, arguments),) = calls(cut.message)
    assert name == "weather"
    assert calls(whole.message)[0][1].startswith(arguments + '"unit"')
    assert flowed(client, **asked)[2:] == ([("weather", arguments)], "stop")


def test_an_answer_without_a_call_is_text(shipped, client):
    """`auto` leaves it to the model, `none` forbids it; the text is the one without a grammar."""
    free = choice(ask(client))
    assert (free.message.tool_calls, free.finish_reason) == (None, "length")
    prompt = shipped.tokenizer.apply_chat_template(ASKED, tools=TOOLS, return_dict=False)
    bare = client.completions.create(model=NAME, prompt=prompt, max_tokens=60, temperature=0)
    assert free.message.content == bare.choices[0].text
    untold = choice(ask(client, tool_choice="none")).message.content
    without = choice(ask(client, tools=openai.omit)).message.content
    assert untold == without
    assert flowed(client) == (free.message.content, "", [], "length")


def test_a_turn_of_a_tool_is_read(client):
    """Calls and their answers come back, with all that the server and its clients write."""
    first = choice(ask(client, tool_choice="required", parallel_tool_calls=False)).message
    turn = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "17 degrees"}
    given = first.model_dump() | {"annotations": [], "audio": None}
    answer = ask(client, [*ASKED, given, turn])
    name, arguments = calls(first)[0]
    called = {"id": "x", "function": {"name": name, "arguments": arguments}}
    bare = {"role": "assistant", "tool_calls": [called]}
    parts = turn | {
        "content": [{"type": "text", "text": "17 "}, {"type": "text", "text": "degrees"}]
    }
    again = ask(client, [*ASKED, bare, parts | {"tool_call_id": "x"}])
    assert choice(answer).message.content == choice(again).message.content
    assert choice(answer).message.content != choice(ask(client)).message.content
    assert answer.usage.prompt_tokens == again.usage.prompt_tokens


#: What a small model goes on with.
THINKS = [{"role": "user", "content": "x = 1  # </think> y = 2\n" * 6 + "x = 1"}]


def test_a_thought_is_apart_and_what_is_asked_for_is_behind_it(client):
    """Stop strings, schemas and calls."""
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    plain = {"tools": openai.omit, "messages": THINKS, "max_tokens": 40, "extra_body": thinks}
    whole = choice(ask(client, **plain)).message
    thought, said = whole.reasoning_content, whole.content
    assert thought
    assert said.lstrip() == said != ""
    assert flowed(client, **plain)[:2] == (said, thought)
    stop = next(word for word in said.split() if word in thought)
    stopped = choice(ask(client, **plain, stop=stop))
    assert stopped.finish_reason == "stop"
    assert stopped.message.reasoning_content == thought
    assert said.startswith(stopped.message.content)
    assert stop not in stopped.message.content
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": closed(SCHEMA)}}
    follows = choice(ask(client, **plain | {"max_tokens": 90}, response_format=form)).message
    assert follows.reasoning_content == thought
    assert json.loads(follows.content)["unit"] in "CF"
    must = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    calling = choice(ask(client, **plain | must | {"max_tokens": 120}))
    assert calling.message.reasoning_content
    assert calling.finish_reason == "tool_calls"
    assert flowed(client, **plain | must | {"max_tokens": 120})[1:] == (
        calling.message.reasoning_content,
        calls(calling.message),
        "tool_calls",
    )
    quiet = choice(ask(client, **plain | {"extra_body": {}}, reasoning_effort="none")).message
    assert "reasoning_content" not in quiet.model_extra


def odd(schema):
    return {"type": "function", "function": {"name": "a", "parameters": schema}}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "'no'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "one name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [odd({"type": 3})]}, "schema of 'a' does not compile: [^\n]*$"),
        (
            {"tools": [TOOLS[0], odd({"type": "strin"})]},
            "schema of 'a' does not compile: Invalid type: strin$",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id is missing"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "role 'user'"),
        ({"messages": [{"role": "assistant"}]}, "content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "assistant's"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "chat_template_kwargs"),
    ],
)
def test_what_is_wrong_with_tools_is_named(client, options, word):
    with pytest.raises(openai.BadRequestError, match=word):
        ask(client, **options)


def test_tools_need_a_template_that_tells_of_them(shipped, server, monkeypatch):
    with serving(shipped, tool_call_parser="none", max_num_seqs=1) as other:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            ask(other.client())
