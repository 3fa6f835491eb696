"""Long texts that are skimmed, for a clock: few tokens are read, and steps find all entries."""

import pytest
import torch
from recurrent_models import made

from outrider.models import TreeDecoder, runner_of
from outrider.models.prefill import READ, ingest, skimmable, skimming
from tiny import pair

COUNT = 2 * READ + 20


@pytest.fixture
def target():
    return pair()[0]


def read(target, count, skim, start=0):
    """A cache behind so many tokens, and how many were read in each call."""
    calls, forward = [], target.forward
    cache = target.open(2, 256)
    tokens = torch.arange(2 * 256).view(2, 256) % target.vocab_size
    settled = torch.full((2,), count)

    def counted(cache, nodes, **how):
        calls.append(nodes.tokens_BQ.shape[1])
        return forward(cache, nodes, **how)

    target.forward = counted
    try:
        if skim:
            with skimming():
                ingest(target, cache, tokens, count, settled_B=settled, start=start)
        else:
            ingest(target, cache, tokens, count, settled_B=settled, start=start)
    finally:
        del target.forward
    return cache, calls


def test_the_first_tokens_and_the_last_are_read_and_the_first_stand_for_the_rest(target):
    cache, calls = read(target, COUNT, True)
    assert calls == [READ, 1]
    whole, once = read(target, COUNT, False)
    assert once == [COUNT]
    for stack, other in zip(cache.stacks, whole.stacks, strict=True):
        assert torch.equal(stack[..., :READ, :], other[..., :READ, :])
        for at in range(READ, COUNT - 1):
            assert torch.equal(stack[..., at, :], stack[..., at % READ, :])
        assert stack[..., COUNT - 1, :].any()
        assert not stack[..., COUNT:, :].any()


def test_short_texts_and_the_rest_of_one_are_read(target):
    assert read(target, READ + 1, True)[1] == [READ + 1]
    assert read(target, READ, False)[1] == [READ]
    assert read(target, COUNT, True, start=COUNT - 5)[1] == [5]


def test_a_text_that_states_depend_on_is_read_whole():
    model = made("qwen3_5_text")
    target = TreeDecoder(runner_of(model)(model))
    assert not skimmable(target.open(1, 128))
    cache, calls = read(target, COUNT, True)
    assert sum(calls) == COUNT
    assert not skimmable(cache)
