"""Four rows, four tree shapes, one batch: the text of each row is the text of that row alone."""

import pytest

from outrider import Engine, Root, SamplingParams, StopConditions, verifiers
from outrider.drafters import Beam, DynamicTree
from tiny import decode

TOKENS = 24
MATCH = verifiers.get("match")
SETTINGS = [
    SamplingParams(1.0, seed=11),
    SamplingParams(0.8, seed=12, repetition_penalty=1.1),
    SamplingParams(1.0, top_p=0.95, seed=13),
    SamplingParams(0.6, top_k=50, seed=14),
]
DRAFTERS = {
    "coupled dynamic tree": lambda small: DynamicTree(small, 12, 5, 4, shared_noise=True),
    "dynamic tree": lambda small: DynamicTree(small, 12, 5, 4),
    "beam": lambda small: Beam(small, 4, 4),
}


@pytest.fixture(scope="module")
def batch(shipped, held_out):
    """Target, draft model, four prompts of four lengths, and their text in plain decoding."""
    target, small = shipped.engine.target, shipped.engine.drafter.model
    ids = [shipped.tokenizer.encode(text) for text in held_out]
    prompts = [ids[i][-cut:] for i, cut in enumerate((9, 70, 23, 41))]
    assert len({len(p) for p in prompts}) == 4
    root = Engine(target, Root(), MATCH)
    plain = [
        decode(root, [p], s, StopConditions(TOKENS))[0][0]
        for p, s in zip(prompts, SETTINGS, strict=True)
    ]
    return target, small, prompts, plain


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_of_a_ragged_batch_is_that_of_its_rows(batch, name):
    target, small, prompts, plain = batch
    engine = Engine(target, DRAFTERS[name](small), MATCH)
    shapes, counts = [], []

    def observe(draft, scores, verdict, block, requests):
        if len(requests) == 4:  # rows leave when they have ended
            shapes.append({tuple(row) for row in draft.tree.parent_BN.tolist()})
            counts.append(tuple(verdict.count_B.tolist()))

    together, run = decode(engine, prompts, SETTINGS, StopConditions(TOKENS), observe=observe)
    assert together == plain
    assert sum(len(found) > 1 for found in shapes) > 0.9 * len(shapes)
    assert max(map(len, shapes)) == 4  # all four rows have trees of their own
    assert any(len(set(found)) > 1 for found in counts)  # and advance by different lengths
    assert run.stats.mean_acceptance_length > 1.3
    for prompt, how, text in zip(prompts, SETTINGS, plain, strict=True):
        alone, one = decode(engine, [prompt], how, StopConditions(TOKENS))
        assert alone == [text]
        assert one.stats.mean_acceptance_length > 1.3
