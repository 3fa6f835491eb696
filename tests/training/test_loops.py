"""Texts that loop, written and the model's own, and the losses that lead out of them."""

import numpy as np
import pytest
import torch
from training.model import Llama, Shape
from training.own_loops import LENGTH, PROMPT, certainty, least_certain, own_loops, repeated
from training.unloop import SEEN, anchored, distinct_share, unlikelihood, written_loops


def test_repeated_is_what_was_written_before():
    prompt, line = [*range(100, 100 + PROMPT)], [1, 2, 3, 4, 5, 6]
    marks = repeated(prompt + line + [9] + line + line)
    # A 4-gram is known again from its fourth token on.
    second, third = PROMPT + 7, PROMPT + 13
    places = [*range(second + 3, second + 6), *range(third + 3, third + 6)]
    assert [i for i, mark in enumerate(marks) if mark] == places
    # To say what the prompt said is no loop.
    assert not any(repeated(prompt + prompt))


def test_the_least_certain_of_the_marked_are_pushed_down():
    certain = torch.tensor([[0.1, 0.9, 0.5, 0.99, 0.7, 0.2], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]])
    marks = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    found = marks & least_certain(certain, marks)
    assert found.tolist() == [[False, False, True, False, True, False], [True, True] + [False] * 4]


def test_a_corpus_without_lines_is_refused():
    model = Llama(Shape(layers=1, width=32, heads=2, inner=48, vocabulary=61, context=300))
    for corpus in (np.zeros(900, dtype=np.uint16), np.full(40, 3, dtype=np.uint16)):
        with pytest.raises(SystemExit, match="no line to write on from"):
            own_loops(model, corpus, np.array([3]), 2, 0)


def test_there_may_be_no_own_loops(monkeypatch):
    model = Llama(Shape(layers=1, width=32, heads=2, inner=48, vocabulary=61, context=300))
    monkeypatch.setattr("training.own_loops.loops", lambda row: False)
    found = own_loops(model, np.full(900, 3, dtype=np.uint16), np.array([3]), 2, 0)
    assert found.texts.shape == found.marks.shape == (0, LENGTH)


def test_own_loops_are_greedy_texts_and_repeat_with_their_seed():
    torch.manual_seed(0)
    model = Llama(Shape(layers=1, width=32, heads=2, inner=48, vocabulary=61, context=300))
    corpus = np.random.default_rng(1).integers(0, 61, 9000).astype(np.uint16)
    first, again, other = (own_loops(model, corpus, np.array([3]), 12, s) for s in (1, 1, 2))
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    # An untrained model says one token for ever.
    assert 0 < len(first.texts) <= 12
    assert not torch.equal(first.texts[:1, :PROMPT], other.texts[:1, :PROMPT])
    assert (first.texts[:, PROMPT - 1] == 3).all()
    assert first.marks.any(1).all()
    with torch.no_grad():
        greedy = model(first.texts)[:, PROMPT - 1].argmax(-1)
    assert (first.texts[:, PROMPT] == greedy).all()
    with torch.no_grad():
        probs = model(first.texts).softmax(-1)
    found = certainty(model, first.texts)
    assert (found[:, 0] == 1).all()
    torch.testing.assert_close(found[2, 7], probs[2, 6, first.texts[2, 7]])


def test_written_loops_repeat_a_block_and_go_on():
    assert distinct_share(list(range(50))) == 1
    # No token comes twice in the corpus, so a text shows where each of its tokens is from.
    corpus = np.arange(4000).astype(np.uint16)
    newlines = corpus[::9]
    found, again = (written_loops(corpus, newlines, rows=40, length=160, seed=3) for _ in "ab")
    assert all((x == y).all() for x, y in zip(found, again, strict=True))
    periods, marked = [], 0
    for text, mark in zip(*found, strict=True):
        places = text - text[0]
        end = int((places != torch.arange(160)).nonzero()[0])
        period = end - int(places[end])
        onward = (places[end:] >= end).nonzero()
        out = end + int(onward[0]) if len(onward) else 160
        assert out - end >= 8
        assert (places[end:out] == end - period + torch.arange(out - end) % period).all()
        assert (places[out:] == end + torch.arange(160 - out)).all()
        assert not mark[: end + SEEN].any()
        assert mark[end + 8 : out].all()
        assert not mark[out:].any()
        periods.append(period)
        marked += int(mark.sum())
    assert marked
    assert min(periods) < 5
    assert [p % 9 for p in periods[1::2]] == [0] * 20


def test_unlikelihood_pushes_marked_tokens_down():
    logits = torch.zeros(1, 3, 5, requires_grad=True)
    texts = torch.tensor([[0, 1, 2, 3]])
    marks = torch.tensor([[False, False, True, False]])
    unlikelihood(logits, texts, marks).backward()
    slope = logits.grad[0]
    assert slope[1, 2] > 0
    assert slope[[0, 2]].abs().sum() == 0
    assert unlikelihood(logits, texts, torch.zeros_like(marks)).item() == 0


def test_unlikelihood_still_pushes_where_a_loop_is_certain():
    logits = torch.zeros(1, 1, 5)
    logits[0, 0, 2] = 30.0
    logits.requires_grad_()
    loss = unlikelihood(logits, torch.tensor([[0, 2]]), torch.tensor([[False, True]]))
    loss.backward()
    assert loss.item() == pytest.approx(30 - torch.tensor(4.0).log().item(), rel=1e-5)
    assert logits.grad[0, 0, 2] == pytest.approx(1, abs=1e-5)


def test_what_comes_instead_is_what_the_reference_would_say():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    reference = torch.randn(1, 4, 5)
    texts = torch.tensor([[0, 1, 2, 3, 4]])
    marks = torch.tensor([[False, False, False, True, False]])
    loss = anchored(logits, reference, texts, marks)
    probs, without = logits.softmax(-1)[0, 2], (2 * reference).softmax(-1)[0, 2]
    without[3] = 0
    without /= without.sum()
    kept = torch.arange(5) != 3
    expected = (without[kept] * (without[kept] / probs[kept]).log()).sum()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logits.grad[0, 2, 3] > 0
    assert logits.grad[0, [0, 1, 3]].abs().sum() == 0
    at_goal = 2 * reference
    at_goal[0, 2, 3] = -1e9
    assert anchored(at_goal, reference, texts, marks).item() == pytest.approx(0, abs=1e-6)
