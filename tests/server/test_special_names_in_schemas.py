"""What a grammar forces is text: the name of a special token is spelled in ordinary tokens."""

import json

import llguidance.numpy
import pytest
import torch

from outrider.server.grammar import Grammar, grammar_of, unwritten, vocabulary
from outrider.server.protocol import CompletionRequest
from tokenizers_of import byte_fallback, byte_level

NAMES = ("<|im_end|>", "<|im_start|>", "[INST]")
TOKENIZERS = {
    "level": byte_level(b'{"', b'":', special=NAMES),
    "fallback": byte_fallback(special=NAMES),
}


def grammar(tokenizer, **asked):
    body = CompletionRequest(model="m", prompt="x", **asked)
    return Grammar(vocabulary(tokenizer, len(tokenizer)), grammar_of(body), 0)


def written(tokenizer, grammar, most=80):
    """The text of the grammar's only way, or of its longest tokens; special tokens are none."""
    special, ids = set(tokenizer.all_special_ids), []
    while len(ids) < most:
        scores = grammar(torch.tensor([ids], dtype=torch.long), torch.zeros(1, len(tokenizer)))
        allowed = [n for n, score in enumerate(scores[0].tolist()) if score == 0]
        if set(allowed) & special:
            assert set(allowed) & special == {tokenizer.eos_token_id}
            break
        ids.append(max(allowed, key=lambda n: len(tokenizer.decode([n]))))
    return tokenizer.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"const": "<|im_end|>"}, "<|im_end|>"),
        ({"const": "</s>"}, "</s>"),
        ({"enum": ["a<|im_start|>b[INST]"]}, "a<|im_start|>b[INST]"),
        (
            {
                "type": "object",
                "properties": {"<|im_end|>": {"const": "[INST]"}},
                "required": ["<|im_end|>"],
                "additionalProperties": False,
            },
            {"<|im_end|>": "[INST]"},
        ),
    ],
)
def test_schemas_write_the_name(kind, schema, value):
    tokenizer = TOKENIZERS[kind]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = written(tokenizer, grammar(tokenizer, response_format=form))
    assert json.loads(text) == value


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    "asked",
    [
        {"guided_regex": r"a<\|im_end\|>b"},
        {"guided_grammar": 'start: "a" "<|im_end|>" "b"'},
        {"structured_outputs": {"grammar": 'root ::= "a" end "b"\nend ::= "<|im_end|>"'}},
    ],
)
def test_expressions_and_grammars_write_it_too(kind, asked):
    tokenizer = TOKENIZERS[kind]
    assert written(tokenizer, grammar(tokenizer, **asked)) == "a<|im_end|>b"


def test_vocabularies_may_be_larger_than_a_plane_of_unicode():
    """Qwen's special tokens lie behind 151,643 others."""
    special = [{"id": 151643 + n, "content": name, "special": True} for n, name in enumerate("ab")]
    said = {"added_tokens": special, "model": {"vocab": {"a": 151643, "x": 0}}}
    names = [one["content"] for one in unwritten(said)["added_tokens"]]
    assert len(set(names)) == 2
    assert unwritten(said)["model"]["vocab"] == {names[0]: 151643, "x": 0}


def test_strings_that_are_free_have_no_special_tokens_either():
    tokenizer = TOKENIZERS["level"]
    made = grammar(tokenizer, response_format={"type": "json_object"})
    ids = tokenizer('{"a":"')["input_ids"]
    scores = made(torch.tensor([ids]), torch.zeros(1, len(tokenizer)))
    assert all(scores[0, n] != 0 for n in tokenizer.all_special_ids)
    assert llguidance.numpy is not None
