"""Answers under schemas that nobody has written by hand: every one is valid, drafted or not."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import write

jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="needs jsonschema_rs")

WORDS = ("name", "age", "kind", "open", "items", "at", "née", 'say "x"')


def schema(draws, depth=2):
    """One whose answers cannot be long."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"]
    kind = draws.choice(kinds + (["object", "array", "anyOf"] * 2 if depth else []))
    if kind == "string":
        least = draws.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + draws.randrange(8)}
    if kind == "integer":
        least = draws.randrange(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + draws.randrange(1000)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": draws.sample(["a", "b c", 1, 2.5, None, True, "ü"], draws.randrange(1, 5))}
    if kind == "const":
        return {"const": draws.choice(["fixed", 7, False, {"a": [1]}])}
    if kind == "pattern":
        return {"type": "string", "pattern": draws.choice([r"^[a-f]{2,6}$", r"^\d{4}-\d{2}$"])}
    if kind == "anyOf":
        return {"anyOf": [schema(draws, depth - 1) for _ in range(draws.randrange(1, 4))]}
    if kind == "array":
        least = draws.randrange(2)
        most = least + draws.randrange(3)
        items = schema(draws, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": most}
    names = draws.sample(WORDS, draws.randrange(4))
    return {
        "type": "object",
        "properties": {name: schema(draws, depth - 1) for name in names},
        "required": [name for name in names if draws.random() < 0.7],
        "additionalProperties": False,
    }


def valid(client, seed):
    """Whether the answer to a random schema is over and valid."""
    draws = random.Random(seed)
    asked = schema(draws)
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": asked}}
    method = draws.choice(["default", "coupled", "none", "prompt_lookup"])
    body = {"response_format": wanted, "speculative_config": {"method": method}}
    answer = write(client, "# JSON:\n", seed=seed, max_tokens=400, extra_body=body).choices[0]
    assert answer.finish_reason == "stop", (asked, answer.text)
    assert jsonschema_rs.is_valid(asked, json.loads(answer.text)), (asked, method, answer.text)


def test_answers_are_valid(client):
    for seed in range(12):
        valid(client, seed)


@pytest.mark.slow
def test_a_thousand_answers_are_valid(client):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: valid(client, seed), range(1000)))
