"""Texts that loop, written and the model's own, and the losses that lead out of them."""

import numpy as np
import pytest
import torch
from training.model import Llama, Shape
from training.own_loops import LENGTH, PROMPT, first_copies, own_loops
from training.unloop import SEEN, distinct_share, unlikelihood, written_loops


def text_after_a_prompt(*parts):
    row = [*range(1000, 1000 + PROMPT), *range(100, 110), *(t for part in parts for t in part)]
    return np.array([*row, *range(200, 200 + LENGTH)][:LENGTH])


def test_the_second_and_third_copy_are_marked():
    line = list(range(1, 11))
    # Ten tokens of lead, then the line; its copies from the third token by which they show.
    begun = PROMPT + 10 + 10
    marks = first_copies(text_after_a_prompt(line * 3 + line[:5]))
    assert np.flatnonzero(marks).tolist() == list(range(begun + SEEN, begun + SEEN + 20))
    short = np.flatnonzero(first_copies(text_after_a_prompt([1, 2] * 10)))
    # Four times two tokens may be a list; twice four of them make a copy, too.
    assert short[0] == PROMPT + 10 + 8
    assert short[-1] < PROMPT + 10 + 20


def test_what_comes_twice_or_in_the_prompt_is_no_loop():
    line = list(range(1, 11))
    assert not first_copies(text_after_a_prompt(line * 2)).any()
    assert not first_copies(text_after_a_prompt([1, 2] * 4)).any()
    text = np.arange(LENGTH)
    text[:PROMPT] = np.resize(line, PROMPT)
    assert not first_copies(text).any()


def test_a_corpus_without_lines_is_refused():
    model = Llama(Shape(layers=1, width=32, heads=2, inner=48, vocabulary=61, context=300))
    for corpus in (np.zeros(900, dtype=np.uint16), np.full(40, 3, dtype=np.uint16)):
        with pytest.raises(SystemExit, match="no line to write on from"):
            own_loops(model, corpus, np.array([3]), 2, 0)


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


def test_written_loops_repeat_a_block_and_go_on():
    assert distinct_share(list(range(50))) == 1
    # No token comes twice in the corpus, so a text shows where each of its tokens is from.
    corpus = np.arange(4000).astype(np.uint16)
    newlines = corpus[::9]
    found, again = (written_loops(corpus, newlines, rows=12, length=160, seed=3) for _ in "ab")
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
    assert [p % 9 for p in periods[1::2]] == [0] * 6


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
