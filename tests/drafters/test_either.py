"""Copies or the draft model: who drafts follows from what was kept, and both are ready for it."""

from functools import lru_cache

import pytest
import torch

from outrider import DraftModel, Engine, Root, SamplingParams, verifiers
from outrider.drafters import DrafterParts, Either, Recall, either, make
from outrider.drafters.deterministic_tree import HostTree
from outrider.drafters.either import SourceStats, followed
from outrider.engine import step
from outrider.testing import p_value, text_law
from outrider.types import DrawKind
from tiny import PROMPTS, Mislabelled, begun, decode, llama, pair
from tiny_heads import driven

CHAIN = HostTree([5, 6, 7, 8], [-1, 0, 1, 2])


def test_a_row_goes_to_copies_where_they_are_right_and_back_where_they_are_not():
    sides = SourceStats.new(0)
    assert not sides.copies(3)
    for _ in range(4):
        sides.observe_copies(CHAIN, [6, 7, 8])
    assert sides.copies(3)
    for _ in range(4):
        sides.observe_copies(CHAIN, [9])
    assert not sides.copies(3)


def test_a_row_leaves_a_model_that_is_refused_and_keeps_one_that_is_not():
    bad, good = SourceStats.new(0), SourceStats.new(0)
    for _ in range(30):
        for sides, kept in ((bad, 0), (good, 3)):
            sides.observe_model(3, kept)
            sides.observe_copies(
                HostTree([5, 6, 7], [-1, 0, 0]), [7, 4]
            )  # one token at every place
    assert bad.copies(3)
    assert not good.copies(3)


def test_what_is_believed_of_copies_is_no_part_of_the_choice():
    """The scores of matches say how large a tree is; two rows that kept alike choose alike."""
    first, second = SourceStats.new(0), SourceStats.new(0)
    for sides, tree in ((first, CHAIN), (second, HostTree([5, 6, 7, 8, 3], [-1, 0, 1, 2, 0]))):
        sides.observe_copies(tree, [6, 7, 8])
    assert first.streak == second.streak == 3
    assert first.copies(2) == second.copies(2)


def test_what_was_followed_of_a_tree():
    tree = HostTree([5, 6, 7, 8], [-1, 0, 0, 2])
    assert followed(tree, [7, 8]) == (2, True)
    assert followed(tree, [7]) == (1, True)
    assert followed(tree, [6, 1]) == (1, True)  # nothing was said of what comes behind it
    assert followed(tree, [1]) == (0, False)
    assert followed(tree.first(0), [1]) == (0, True)


def turns(monkeypatch, copied=1, period=2):
    """So many steps of every period are for copies, the others for the model."""
    seen = {}

    def copies(self, depth):
        return seen.get(id(self), 0) % period < copied

    def observe(self, tree, tokens):
        seen[id(self)] = seen.get(id(self), 0) + 1

    monkeypatch.setattr(SourceStats, "copies", copies)
    monkeypatch.setattr(SourceStats, "observe_copies", observe)


@pytest.mark.parametrize("reads", ["text", "states"])
@pytest.mark.parametrize("late", [False, True], ids=["", "nothing is read on"])
def test_the_model_drafts_behind_copies_what_it_drafts_alone(monkeypatch, reads, late):
    """Step by step the same proposals as by a drafter that begins anew with the whole text."""
    target, small = pair(0.4)
    model = driven() if reads == "states" else small
    drafter, alone = Either(Recall(6), DraftModel(model, (1, 1, 1))), DraftModel(model, (1, 1, 1))
    turns(monkeypatch, 6, 8)
    if late:
        monkeypatch.setattr(
            SourceStats, "unread", property(lambda self: 0, lambda self, count: None)
        )
    batch = begun(target, drafter, PROMPTS[:1], [SamplingParams(0)])
    rule, wrong, compared = verifiers.default(drafter.kinds), 0, 0
    for number in range(24):
        draft = step.propose(drafter, batch)
        if number % 8 >= 6:
            text = batch.context.tokens_BL[0, : batch.context.length_B[0]].tolist()
            fresh = begun(target, alone, [text], [SamplingParams(0)])
            expected = step.propose(alone, fresh).tokens_BN
            wrong += not torch.equal(draft.tokens_BN, expected)
            compared += 1
        scores = step.score(target, batch, draft, drafter.aux_layers)
        verdict = step.verify(rule, batch, draft, scores)
        batch, _ = step.commit(target, drafter, batch, draft, scores, verdict)
    assert compared == 6
    assert bool(wrong) == late


def test_rows_of_one_batch_may_be_copied_and_drafted():
    target, small = pair(0.4)
    drafter = Either(Recall(6), DraftModel(small, (1, 1)))
    settings = [SamplingParams(1.0, seed=row) for row in range(2)]
    batch = begun(target, drafter, PROMPTS[:2], settings)
    for _ in range(6):
        batch.memory.sides.rows[0].observe_copies(CHAIN, [6, 7, 8])
    draft = step.propose(drafter, batch)
    there = draft.draws_BNK >= 0
    assert (draft.kind_BNK[0][there[0]] == DrawKind.FIXED).all()
    assert (draft.kind_BNK[1][there[1]] == DrawKind.WITHOUT).all()
    assert draft.row_BNK[1][there[1]].tolist() == [0, 1]
    assert (draft.row_BNK[0] == -1).all()


VOCAB, LENGTH, PROMPT = 5, 3, (1, 3, 2, 1, 3)


@lru_cache
def law():
    return text_law(llama(vocab_size=VOCAB), PROMPT, LENGTH)


def drawn(monkeypatch, wrong):
    turns(monkeypatch)
    target, small = pair(0.5, VOCAB)
    model = DraftModel(small, (1, 1))
    drafter = Either(Recall(4), Mislabelled(model) if wrong else model)
    rule = verifiers.default(drafter.kinds)
    assert rule.name == "traversal"
    engine = Engine(target, drafter, rule)
    return p_value(engine, law(), PROMPT, LENGTH, 1500)[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrong", [False, True])
def test_the_law_of_a_text_is_the_targets(monkeypatch, wrong):
    p = drawn(monkeypatch, wrong)
    assert (p < 1e-6) if wrong else (p > 1e-3)


def test_greedy_texts_are_plain_decodings():
    target, small = pair(0.4)
    drafter = Either(Recall(8), DraftModel(small, (1,) * 3))
    texts = [decode(Engine(target, one), PROMPTS)[0] for one in (drafter, Root())]
    assert texts[0] == texts[1]


def test_by_name():
    target, small = pair(0.4)
    made = make("either", DrafterParts((small,), target=target))
    assert made.copies.total_tokens == 8
    assert made.shapes == made.copies.shapes
    assert made.drafted.shapes[0].max_depth == either.DEPTH
