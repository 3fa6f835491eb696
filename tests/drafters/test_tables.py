"""Drafters from counts and from nothing: the tree of an n-gram table, and random tokens."""

from functools import lru_cache

import pytest
import torch
from test_supports import inner_nodes

from outrider import Engine, SamplingParams, StopConditions, ops
from outrider.drafters.ngram_table import count
from outrider.engine import step
from outrider.errors import ConfigurationError, VocabularyMismatch
from outrider.testing import p_value, text_law
from outrider_lab.drafters.ngram_tree import NgramTree
from outrider_lab.drafters.random import Random
from tiny import PROMPTS, VOCAB, begun, decode, llama, pair

TEXT = [1, 2, 3, 4, 1, 2, 5, 4, 1, 3, 2, 2, 7, 1, 8, 2, 8, 1, 8, 2, 6, 5, 9] * 2
ROWS = [
    PROMPTS[0],
    PROMPTS[2],
    PROMPTS[3],
]  # the last is one token long: there is nothing in front of it
TOTAL, DEPTH, FEW = 9, 4, 3


def searched(table, prompt):
    """The best paths of a beam, one text at a time, by the log of their probability."""
    level, found = {(): 0.0}, {}
    for _ in range(DEPTH):
        grown = {}
        for path, score in level.items():
            text = [-1] * table.order + [*prompt, *path]
            best = table.probs(torch.tensor([text[-(table.order - 1) :]]))[0].log().topk(FEW)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                grown[(*path, token)] = score + value
        found |= grown
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[:FEW])
    return dict(sorted(found.items(), key=lambda item: -item[1])[:TOTAL])


@pytest.mark.parametrize("order", [2, 3, 4])
def test_the_most_probable_nodes_of_the_table_are_kept(order):
    table, target = count(TEXT, VOCAB, order), pair()[0]
    drafter = NgramTree(table, TOTAL, DEPTH, FEW)
    settings = [SamplingParams(0.0 if row % 2 else 1.0, seed=row) for row in range(3)]
    state = begun(target, drafter, ROWS, settings)
    draft = step.propose(drafter, state)
    for row, prompt in enumerate(ROWS):
        paths = searched(table, prompt)
        kept = {tuple(path) for _, path, _ in inner_nodes(draft, row) if path}
        assert len(kept) == TOTAL
        # equally probable paths may stand for each other
        least = min(paths.values())
        sure = {path for path, score in paths.items() if score > least + 1e-4}
        assert sure <= kept
        assert sure


def test_a_tree_of_the_table_keeps_more_than_its_chain():
    """The next token is more often among a few than the first."""
    target, _ = pair()
    texts, _ = decode(Engine(target, Random(VOCAB)), PROMPTS, limits=StopConditions(60))
    table = count([token for text in texts for token in text], VOCAB, 2)

    def accepted(few):
        drafter = NgramTree(table, 2 * few, 2, few)
        return decode(Engine(target, drafter), PROMPTS, limits=StopConditions(60))[1].stats.accepted

    assert accepted(6) > 1.2 * accepted(2) > 0


def test_sizes_and_tables_that_do_not_fit_are_refused():
    table = count(TEXT, VOCAB, 2)
    with pytest.raises(ConfigurationError, match="total_tokens must lie between depth, 3"):
        NgramTree(table, 2, 3, 2)
    with pytest.raises(VocabularyMismatch, match="table knows 32 tokens, the target 16"):
        NgramTree(table, vocab_size=16)


SMALL, LENGTH, PROMPT = 5, 2, (1, 3, 2)


@lru_cache
def law(temperature):
    return text_law(llama(vocab_size=SMALL), PROMPT, LENGTH, SamplingParams(temperature))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_random_tokens_are_kept_with_probability_of_the_overlap(temperature):
    """sum min(p, 1 / V) of the first token, and the text's law is the target's."""
    target, sampling = pair(0.4, SMALL)[0], SamplingParams(temperature)
    engine = Engine(target, Random(SMALL, 1))
    value, _ = p_value(engine, law(temperature), PROMPT, LENGTH, 3000, sampling)
    assert value > 1e-3
    first = law(temperature).view(SMALL, -1).sum(1)
    expected = float(first.clamp(max=1 / SMALL).sum())
    blocks = [
        engine.run([PROMPT], SamplingParams(temperature, seed=s), StopConditions(2))
        for s in range(600)
    ]
    kept = sum(next(iter(run)).accepted for run in blocks) / 600
    assert kept == pytest.approx(expected, abs=0.06)


def test_random_tokens_that_are_not_uniform_are_caught(monkeypatch):
    """Drawn from the lower half of the vocabulary and declared uniform."""
    several = ops.several

    def lower(laws, keys, most, *rest):
        tokens, there, whole = several(laws, keys, most, *rest)
        return tokens // 2, there, whole

    monkeypatch.setattr(ops, "several", lower)
    engine = Engine(pair(0.4, SMALL)[0], Random(SMALL, 1))
    assert p_value(engine, law(1.0), PROMPT, LENGTH, 2000)[0] < 1e-12


def test_random_tokens_of_greedy_rows_differ_from_place_to_place():
    target, seen = pair()[0], set()
    state = begun(target, Random(VOCAB, 8), PROMPTS, [SamplingParams(0)] * len(PROMPTS))
    for row in step.propose(Random(VOCAB, 8), state).tokens_BN[:, 1:].tolist():
        seen |= set(row)
    assert len(seen) > 10
