"""`/v1/responses`, by OpenAI's own client: text, turns that are kept, events, tools, thoughts."""

import json

import openai
import pytest
from served import NAME, serving
from test_tools import SCHEMA, TEMPLATE, THINKS

from outrider.errors import OutriderError
from outrider.server.errors import APIError
from outrider.server.responses_api import ResponseStore
from outrider.server.responses_bodies import ResponsesBody

WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def client(shipped):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped.tokenizer, "chat_template", TEMPLATE)
        with serving(shipped, reasoning_parser="qwen3", max_model_len=512) as running:
            yield running.client()


def ask(client, **options):
    about = {"model": NAME, "temperature": 0, "max_output_tokens": 20} | options
    return client.responses.create(**about)


def chat(client, *messages, **options):
    about = {"model": NAME, "temperature": 0, "max_tokens": 20} | options
    return client.chat.completions.create(messages=list(messages), **about).choices[0].message


def user(text):
    return {"role": "user", "content": text}


def test_a_response_is_the_chats_answer_and_is_gone_on_from(client):
    first = ask(client, input="def f(x):", instructions="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert first.output_text == chat(client, system, user("def f(x):")).content
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert first.usage.output_tokens == 20
    again = ask(client, input="import os", previous_response_id=first.id)
    said = {"role": "assistant", "content": first.output_text}
    assert again.output_text == chat(client, user("def f(x):"), said, user("import os")).content
    by_hand = [user("def f(x):"), *(one.model_dump() for one in first.output), user("import os")]
    assert ask(client, input=by_hand).output_text == again.output_text
    assert client.responses.retrieve(again.id).output_text == again.output_text
    client.responses.delete(first.id)
    forgotten = ask(client, input="x", store=False).id
    for gone in (first.id, forgotten):
        with pytest.raises(openai.NotFoundError, match=gone):
            ask(client, input="import os", previous_response_id=gone)


def test_events_tell_of_the_whole_response(client):
    whole = ask(client, input="def f(x):")
    with client.responses.stream(
        model=NAME, input="def f(x):", temperature=0, max_output_tokens=20
    ) as stream:
        events = list(stream)
    last = events[-1].response  # the client's own "final" one is one that was not cut
    assert last.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]


def test_a_call_is_an_item_and_its_answer_another(client):
    asked = {"tools": [WEATHER], "max_output_tokens": 80}
    choice = {"tool_choice": {"type": "function", "name": "weather"}}
    whole = ask(client, input="the weather in Paris", **asked, **choice)
    (call,) = whole.output
    assert (whole.status, call.type, call.name) == ("completed", "function_call", "weather")
    assert json.loads(call.arguments)["unit"] in "CF"
    flowed = list(ask(client, input="the weather in Paris", stream=True, **asked, **choice))
    parts = [e.delta for e in flowed if e.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == call.arguments
    assert flowed[-1].response.output[0].arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "17"}
    behind = ask(client, input=[output], previous_response_id=whole.id, **asked)
    given = [user("the weather in Paris"), call.model_dump(), output]
    assert ask(client, input=given, **asked).output_text == behind.output_text
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    follows = ask(client, input="Paris", text=form, max_output_tokens=40).output
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    same = chat(client, user("Paris"), response_format=schema, max_tokens=40)
    thought = same.model_extra.get("reasoning_content")
    assert [one.content[0].text for one in follows] == [thought or same.content]


def test_thoughts_are_items_too(client):
    body = {"input": THINKS, "max_output_tokens": 40}
    whole = ask(client, **body, reasoning={"effort": "low"})
    thought, said = whole.output
    assert (thought.type, said.type) == ("reasoning", "message")
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    events = list(ask(client, **body, reasoning={"effort": "low"}, stream=True))
    parts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(parts) == thought.content[0].text
    assert events[-1].response.output_text == whole.output_text
    assert len(ask(client, **body, reasoning={"effort": "none"}).output) == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"input": []}, "input"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "extra_body": {"no_such": 1}}, "no_such"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice needs tools"),
    ],
)
def test_what_is_wrong_is_named(client, options, word):
    with pytest.raises(openai.BadRequestError, match=word):
        ask(client, **options)


def test_turns_are_those_of_a_chat():
    """Calls in a row are one turn; a thought belongs to what comes behind it."""
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "output": [{"type": "input_text", "text": "1"}]}
    items = [
        user("a"),
        {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
        call | {"call_id": "x"},
        call | {"call_id": "y"},
        output | {"call_id": "x"},
        output | {"call_id": "y"},
        {"type": "message", "role": "assistant", "content": "b"},
        user("c"),
    ]
    turns = ResponsesBody(model="m", input=items).turns()
    assert [turn["role"] for turn in turns] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    assert [one["id"] for one in turns[1]["tool_calls"]] == ["x", "y"]
    assert turns[1]["reasoning_content"] == "hm"
    assert (turns[2]["content"], turns[4]["content"]) == ("1", "b")


def test_what_is_kept_is_bounded():
    store = ResponseStore(most=3, most_bytes=400)
    for number in range(5):
        store.keep({"id": f"resp_{number}"}, [])
    assert len(store) == 3
    store.keep({"id": "large"}, [{"content": "x" * 300}])
    assert len(store) <= 3
    assert store.find("large", "id").turns
    store.keep({"id": "too large"}, [{"content": "x" * 500}])
    with pytest.raises(APIError, match="too large"):
        store.find("too large", "id")
    store.forget("large")
    with pytest.raises(APIError):
        store.forget("large")
    assert not issubclass(APIError, OutriderError)
