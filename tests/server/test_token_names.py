"""Tokens as clients read them: bytes by the tokenizer's decoder, a name of its own for each."""

import pytest

from outrider.cli import console
from outrider.server.model_info import TokenFormatter
from outrider.server.response_builder import ChatFormat, CompletionFormat
from tokenizers_of import EMOJI, byte_fallback, byte_level, word_pieces

LEVEL = byte_level(b" " + EMOJI[:2], b" the")
FALLBACK = byte_fallback("▁the", "▁▁")


@pytest.mark.parametrize(
    ("tokenizer", "token", "data"),
    [
        (FALLBACK, "é", "é".encode()),
        (FALLBACK, "<0xF0>", b"\xf0"),
        (FALLBACK, "▁the", b" the"),
        (FALLBACK, "▁▁", b"  "),
        (FALLBACK, "<|im_end|>", b"<|im_end|>"),
        (LEVEL, "Ġthe", b" the"),
        (LEVEL, "Ã", b"\xc3"),
        (LEVEL, "</s>", b"</s>"),
        (word_pieces(), "the", b" the"),
        (word_pieces(), "##re", b"re"),
    ],
)
def test_bytes_are_those_that_the_decoder_writes(tokenizer, token, data):
    entry = TokenFormatter(tokenizer).entry(tokenizer.convert_tokens_to_ids(token), -1.0)
    assert bytes(entry["bytes"]) == data
    assert entry["token"] == data.decode("utf-8", "replace")


def test_an_id_that_names_no_token_has_no_bytes():
    assert TokenFormatter(LEVEL).entry(9999, -1.0)["bytes"] == []


def test_traces_show_the_space_ahead_of_a_word_and_no_special_token():
    written = [
        console.written(FALLBACK, FALLBACK.convert_tokens_to_ids(token))
        for token in ("▁the", "<0x41>", "</s>")
    ]
    assert written == [" the", "A", ""]


def entries(tokenizer, *tokens):
    words = TokenFormatter(tokenizer)
    told = [words.entry(tokenizer.convert_tokens_to_ids(t), -1.0 - n) for n, t in enumerate(tokens)]
    return [told[0] | {"top_logprobs": told}]


HALVES = ["ð", "Ã", "Ł"]


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "named"),
    [
        (LEVEL, HALVES, [f"token_id:{LEVEL.convert_tokens_to_ids(t)}" for t in HALVES]),
        (FALLBACK, ["a", "<0x61>"], ["a", f"token_id:{0x61}"]),
        (FALLBACK, ["<0x61>", "a", "b"], ["a", f"token_id:{256 + 1}", "b"]),
        (LEVEL, ["a", "Ġthe", "</s>"], ["a", " the", "</s>"]),
    ],
)
def test_completions_name_each_candidate_apart(tokenizer, tokens, named):
    logs = CompletionFormat().logs(entries(tokenizer, *tokens), lambda: [0], len(tokens))
    assert logs["top_logprobs"] == [{name: -1.0 - n for n, name in enumerate(named)}]
    assert logs["tokens"] == named[:1]


def test_chats_have_openai_s_fields_alone():
    logs = ChatFormat().logs(entries(LEVEL, *HALVES), lambda: [0], 3)
    first = logs["content"][0]
    assert set(first) == {"token", "logprob", "bytes", "top_logprobs"}
    assert [set(one) for one in first["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 3
    assert [one["bytes"] for one in first["top_logprobs"]] == [[0xF0], [0xC3], [0x9F]]


def test_a_server_names_as_many_candidates_as_were_asked_for(client):
    done = client.completions.create(
        model="pair", prompt="def f", max_tokens=6, logprobs=5, temperature=0
    )
    logs = done.choices[0].logprobs
    assert [len(top) for top in logs.top_logprobs] == [5] * 6  # the token is among them
    for token, top in zip(logs.tokens, logs.top_logprobs, strict=True):
        assert max(top, key=top.get) == token
