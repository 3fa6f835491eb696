"""A chat model served to OpenAI's client: a talk with history, a schema, an edit by prediction."""

import json

import pytest
from served import serving

import outrider

pytestmark = pytest.mark.real

CODE = '''def area(width, height):
    """The area of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("negative")
    result = width * height
    return result


def volume(width, height, depth):
    """The volume of a box."""
    result = area(width, height) * depth
    return result
'''


@pytest.fixture(scope="module")
def speculator(smollm2):
    return outrider.load(smollm2, dtype="bfloat16", threads=1, pack_weights=True)


@pytest.fixture(scope="module")
def client(speculator):
    with serving(speculator, max_model_len=1024) as server:
        yield server.client()


def talk(client, *messages, **options):
    """The next turn; the user's and the model's messages take turns."""
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)]
    options = {"model": "pair", "temperature": 0, "max_tokens": 40} | options
    return client.chat.completions.create(messages=said, **options)


def text(answer):
    return answer.choices[0].message.content


def test_a_talk_has_a_history(client):
    first = "Name the largest planet of the solar system."
    answer = text(talk(client, first))
    assert "planet" in answer
    again = talk(client, first, answer, "And the smallest?")
    assert "smallest" in text(again)
    assert text(again) != text(talk(client, "And the smallest?"))


def test_a_talk_is_copied_from_turn_to_turn(speculator, client):
    """The second turn reads what is new; its text is the one of a server that keeps nothing."""
    first = "List three colours. Answer in one line, and give a reason for each of them, please."
    answer = talk(client, first, seed=3, temperature=0.7)
    again = talk(client, first, text(answer), "And three fruits?", seed=4, temperature=0.7)
    assert again.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 8
    with serving(speculator, max_model_len=1024, prefix_cache_bytes=0) as server:
        bare = server.client()
        other = talk(bare, first, text(answer), "And three fruits?", seed=4, temperature=0.7)
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert text(other) == text(again)


def test_an_answer_follows_a_schema(client):
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "inhabitants": {"type": "integer"},
        },
        "required": ["city", "inhabitants"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    ask = "Tell me about Paris as JSON with city and inhabitants."
    answer = talk(client, ask, max_tokens=80, response_format=wanted)
    thing = json.loads(text(answer))
    assert isinstance(thing["inhabitants"], int)
    assert thing["city"].lower() == "paris"


def test_an_edit_by_prediction_takes_a_quarter_of_the_calls(client):
    ask = f"Repeat this Python code exactly, without any change:\n\n```python\n{CODE}```"
    plain = {"speculative_config": {"method": "none"}}
    copied = {"prediction": {"type": "content", "content": f"```python\n{CODE}```"}}
    answers = [talk(client, ask, max_tokens=120, extra_body=body) for body in (plain, copied)]
    assert text(answers[0]) == text(answers[1])
    steps = [a.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] for a in answers]
    assert steps[1] <= steps[0] / 4
    assert answers[1].usage.completion_tokens_details.accepted_prediction_tokens > 60
