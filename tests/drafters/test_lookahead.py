"""Lookahead decoding: what the window finds, and what of it is tried."""

import pytest
import torch
from test_supports import inner_nodes

from outrider import ConfigurationError, Engine, SamplingParams, StopConditions, verifiers
from outrider.engine import step
from outrider.models.prefill import causal
from outrider_lab.drafters.lookahead import Lookahead
from tiny import PROMPTS, begun, decode, pair

ROWS = PROMPTS[:3]


def said(model, text):
    """The target's own next token."""
    at = torch.arange(len(text))[None]
    nodes = causal(torch.tensor([text]), at, 128)
    return int(model.forward(model.open(1, 128), nodes, last=1).logits_BQV.argmax())


def stepped(drafter, state, target):
    draft = step.propose(drafter, state)
    scores = step.score(target, state, draft)
    verdict = step.verify(verifiers.get("match"), state, draft, scores)
    return draft, verdict, step.commit(target, drafter, state, draft, scores, verdict)[0]


@pytest.mark.parametrize("order", [2, 3, 4])
def test_every_column_brings_the_n_gram_that_the_target_goes_on_with(order):
    target, _ = pair()
    drafter = Lookahead(4, order, 2)
    state = begun(target, drafter, ROWS, [SamplingParams(0)] * 3)
    for _ in range(5):
        lengths = state.context.length_B.tolist()
        texts = [state.context.tokens_BL[row, :n].tolist() for row, n in enumerate(lengths)]
        windows = state.memory.window_BRW.clone()
        begins = state.memory.next_B.tolist()
        _, verdict, state = stepped(drafter, state, target)
        for row, text in enumerate(texts):
            new = []
            for column in range(4):
                first = windows[row, 0, : column + 1].tolist()
                below = windows[row, 1:, column].tolist()
                new.append(said(target, [*text, *first, *below]))
                cell = (begins[row] + column) % drafter.kept
                gram = state.memory.pool_BPn[row, cell].tolist()
                assert gram == [first[-1], *below, new[-1]]
            kept = int(verdict.count_B[row])
            rows = [*windows[row, 1:].tolist(), new]
            moved = [[line[min(kept + w, 3)] for w in range(4)] for line in rows]
            assert state.memory.window_BRW[row].tolist() == moved


def test_what_is_known_of_the_pending_token_is_tried_and_siblings_differ():
    target, _ = pair()
    drafter = Lookahead(3, 3, 2)
    state = begun(target, drafter, ROWS, [SamplingParams(0)] * 3)
    pending = int(state.context.tokens_BL[0, state.context.length_B[0] - 1])
    grams = [[pending, 7, 8], [pending, 7, 9], [pending, 11, 12], [1, 2, 3]]
    with torch.inference_mode():
        state.memory.pool_BPn[0, : len(grams)] = torch.tensor(grams)
        state.memory.next_B[0] = len(grams)
    draft = step.propose(drafter, state)
    tried = {tuple(path) for _, path, _ in inner_nodes(draft, 0) if len(path) == 2}
    assert {(11, 12), (7, 9)} <= tried
    assert (7, 8) not in tried
    for row in range(3):
        for _, _, kids in inner_nodes(draft, row):
            tokens = draft.tokens_BN[row, kids].tolist()
            assert len(set(tokens)) == len(tokens)


def test_some_of_what_is_found_is_kept():
    """Random weights repeat themselves seldom: it is the target's own text in full below."""
    target, _ = pair()
    _, run = decode(Engine(target, Lookahead(6, 3, 3)), PROMPTS, limits=StopConditions(200))
    assert run.stats.accepted > 0.05 * run.stats.steps


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ConfigurationError, match="order must be a whole number of at least 2"):
        Lookahead(order=1)
    with pytest.raises(ConfigurationError, match="kept must be a whole number of at least 9"):
        Lookahead(9, kept=4)
