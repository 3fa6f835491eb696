"""A chunk of a long answer, and of one to a long prompt, takes no more than that of a short one."""

from unittest import mock

import pytest
import torch

from counts import lines_of
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Logprobs, Request
from outrider.server.grammar import Grammar, vocabulary
from outrider.server.model_info import TextOffsets, TokenFormatter
from outrider.server.protocol import StreamOptions
from outrider.server.request_parsing import ChoiceState, PredictionCounts
from outrider.server.response_builder import (
    ChatFormat,
    CompletionFormat,
    ResponseBuilder,
    append_output,
)
from outrider.server.serving import _chunks
from outrider.text.output_text import IncrementalText, Stop
from tokenizers_of import byte_level

LEVEL = byte_level(b" the")
OPTIONS = StreamOptions(include_obfuscation=False, continuous_usage_stats=True)


def streamed(form, prompt, tokens, per=2):
    """What each chunk of an answer of these tokens took, and the chunks: lines of Python, tokens
    that were decoded, bytes."""
    answer = IncrementalText(LEVEL, Stop(None, ("zzz",)), prompt)
    choice = ChoiceState(0, 0, "default", Request(prompt, logprobs=Logprobs(2)), answer)
    choice.tells_ids, choice.predicted = True, PredictionCounts(tokens[::3])
    writer = ResponseBuilder(form, "m", "f", TokenFormatter(LEVEL))
    costs, chunks, decoded, text = [], [], [0], TokenFormatter.text

    def counted(words, ids):
        decoded[0] += len(ids)
        return text(words, ids)

    with mock.patch.object(TokenFormatter, "text", counted):
        for at in range(0, len(tokens), per):
            ids, decoded[0] = tokens[at : at + per], 0
            likeliest = [[(token, -0.5), (1, -1.5)] for token in ids]
            block = StepOutput(0, ids, 1, None, 1, logprobs=[-0.5] * per, likeliest=likeliest)
            with lines_of("outrider/") as lines:
                said = append_output(choice, block)
                (chunk,) = _chunks(choice, said, [choice], writer, OPTIONS)
            costs.append((sum(lines.values()), decoded[0], len(chunk)))
            chunks.append(chunk)
    return costs, chunks


@pytest.mark.parametrize("form", [CompletionFormat(), ChatFormat()], ids=["completion", "chat"])
def test_a_chunk_costs_the_same_wherever_it_stands(form):
    tokens = [3 + at % 7 for at in range(2800)]
    prompt = list(range(3, 60)) * 20
    (_, *costs), _ = streamed(form, prompt, tokens)
    early, late = costs[14:63], costs[-63:-14]
    for what in (0, 1):
        assert max(cost[what] for cost in late) <= max(cost[what] for cost in early)
    assert max(size for _, _, size in costs) < len(prompt)


def test_bytes_that_are_no_character_are_not_decoded_again_and_again():
    """A client can ask for them (`logit_bias`): each of 2,000 decoded all those before it."""
    words = TokenFormatter(LEVEL)
    (half,) = [token for token in range(len(LEVEL)) if words.bytes_of(token) == b"\x80"]
    offsets, tokens, text = TextOffsets(words), [half] * 2000 + [3, 4], TokenFormatter.text
    with mock.patch.object(TokenFormatter, "text", autospec=True, side_effect=text) as read:
        told = [offsets.since(tokens, at, 1)[0] for at in range(len(tokens))]
    assert max(len(call.args[1]) for call in read.call_args_list) <= 8
    assert told[-2:] == [len(words.text(tokens[:-2])), len(words.text(tokens[:-1]))]


def test_a_prompts_tokens_are_told_once():
    """As vLLM tells them."""
    _, chunks = streamed(CompletionFormat(), [5, 6, 7], [8, 9, 10, 8])
    assert [b'"prompt_token_ids":[5,6,7]' in chunk for chunk in chunks] == [True, False]
    assert all(b'"token_ids":[' in chunk for chunk in chunks)


def test_a_grammar_reads_no_token_of_a_text_twice():
    words = vocabulary(LEVEL, len(LEVEL))
    took = {}
    for size in (20, 2000):
        grammar = Grammar(words, r'{"grammars": [{"lark_grammar": "start: /(?s:.*)/"}]}', 3)
        text = torch.tensor([[1, 1, 1] + [3 + at % 7 for at in range(size)]])
        nodes = torch.cat([text.repeat(4, 1), torch.tensor([[4], [5], [4], [6]])], 1)
        grammar(text, torch.zeros(1, len(LEVEL)))
        with lines_of("outrider/server/grammar") as lines:
            allowed = grammar(nodes, torch.zeros(4, len(LEVEL)))
        assert torch.equal(allowed[0], allowed[2])
        took[size] = lines
    assert took[20] == took[2000]
