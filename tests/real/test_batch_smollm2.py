"""Conversations in a file, answered in two runs, and a stream that goes on elsewhere."""

import json

import pytest
from served import serving

import outrider
from outrider.server import batch_file
from outrider.server.batch_file import BatchResults, requests

pytestmark = pytest.mark.real

QUESTIONS = ["Name a planet.", "What is 2 + 2?", "Say hello.", "Name a colour.", "Who are you?"]


@pytest.fixture(scope="module")
def speculator(smollm2):
    return outrider.load(smollm2, dtype="bfloat16", threads=1, pack_weights=True)


def body(at):
    asked = {"model": "pair", "messages": [{"role": "user", "content": QUESTIONS[at]}]}
    return asked | {"max_tokens": 16, "temperature": 0.7, "seed": at}


def test_a_file_in_two_runs_says_what_the_server_says(speculator, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    url = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [{"custom_id": f"{at}", "body": body(at)} | url for at in range(len(QUESTIONS))]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for most in (2, None):
        with BatchResults(out) as file:
            left = [one for one in requests(source) if one.name not in file.names]
            rows = batch_file.answers(speculator, "pair", 2, 512, left)
            for at, row in enumerate(rows, start=1):
                file.write(row)
                if at == most:
                    rows.close()
    found = {}
    for row in map(json.loads, out.read_text().splitlines()):
        (choice,) = row["response"]["body"]["choices"]
        found[int(row["custom_id"])] = choice["message"]["content"]
    assert sorted(found) == list(range(len(QUESTIONS)))
    assert len(out.read_text().splitlines()) == len(QUESTIONS)
    with serving(speculator, max_num_seqs=4) as server:
        client = server.client()
        for at, said in found.items():
            answer = client.chat.completions.create(**body(at))
            assert answer.choices[0].message.content == said
        chunks = client.chat.completions.create(
            **body(0), stream=True, extra_body={"return_token_ids": True}
        )
        text, ids = "", []
        for chunk in chunks:
            for choice in chunk.choices:
                text += choice.delta.content
                ids += (choice.model_extra or {}).get("token_ids", [])
            if len(ids) > 5:
                chunks.close()
                break
        held = [{"token_ids": ids, "characters": len(text)}]
        rest = client.chat.completions.create(**body(0), stream=True, extra_body={"resume": held})
        for chunk in rest:
            text += "".join(choice.delta.content for choice in chunk.choices)
        assert text == found[0]
