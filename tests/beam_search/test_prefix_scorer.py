"""Texts score as the model's own forward scores them, wherever their slots lie."""

import random

import pytest
import torch

from outrider.engine.beam_search.scorer import NARROW, PrefixScorer
from outrider.errors import CapacityError
from outrider.models import LlamaRunner, TreeDecoder
from tiny import VOCAB, llama


def own(text):
    """Log-probabilities behind a text by the model's own forward."""
    with torch.inference_mode():
        return torch.log_softmax(llama()(torch.tensor([text.tokens()])).logits[0, -1], -1)


def oracle(size, capacity):
    prompt = [(7 * at + 3) % VOCAB for at in range(size)]
    made = PrefixScorer(TreeDecoder(LlamaRunner(llama(), False)), [prompt], capacity)
    return made, made.rows[0].root


def test_slots_that_were_freed_in_front_of_those_that_are_read():
    """The call writes below slot 128 and reads behind it: the width is what it reads."""
    scorer, root = oracle(100, 256)
    scorer.ask([[root]])
    scorer.ask([[root.child(token) for token in range(VOCAB)]])
    kept = root.child(VOCAB - 1)
    assert scorer.rows[0].scored[kept].slot >= 128
    scorer.prune(0, [kept])
    fresh = [kept.child(token) for token in (5, 9)]
    scorer.ask([fresh])
    assert max(scorer.rows[0].scored[text].slot for text in fresh) < 128
    for text in fresh:
        torch.testing.assert_close(scorer.logs(0, text), own(text), atol=1e-4, rtol=1e-4)


def test_rows_that_ask_for_less_than_others():
    prompts = [[3, 9, 4], [5, 6, 7, 8, 9, 10], [11]]
    scorer = PrefixScorer(TreeDecoder(LlamaRunner(llama(), False)), prompts, 64)
    roots = scorer.roots()
    scorer.ask([[root] for root in roots])
    wanted = [[roots[0].child(t) for t in range(7)], [], [roots[2].child(4)]]
    scorer.ask(wanted)
    scorer.ask([[], [roots[1].child(2), roots[1].child(2).child(3)], []])
    assert scorer.calls == 3
    assert scorer.nodes == 13
    for row, texts in enumerate([wanted[0], [roots[1].child(2).child(3)], wanted[2]]):
        for text in texts:
            torch.testing.assert_close(scorer.logs(row, text), own(text), atol=1e-4, rtol=1e-4)


def test_what_is_known_is_not_scored_again():
    scorer, root = oracle(5, 64)
    scorer.ask([[root]])
    scorer.ask([[root]])
    assert (scorer.calls, scorer.nodes) == (1, 1)


def test_no_slot_left():
    scorer, root = oracle(8, 8 + NARROW)
    scorer.ask([[root]])
    with pytest.raises(CapacityError, match=r"more than its 12 slots.*raise capacity"):
        scorer.ask([[root.child(token) for token in range(9)]])


@pytest.mark.parametrize("seed", range(4))
def test_slots_belong_to_what_beams_begin_with_and_to_what_lies_below_them(seed):
    """Beams that go on, fall away or take up what was scored ahead: nothing else keeps a slot."""
    draws, (scorer, root) = random.Random(seed), oracle(6, 96)
    scorer.ask([[root]])
    here, running = scorer.rows[0], [root]
    for _ in range(14):
        grown = [text.child(draws.randrange(4)) for text in draws.choices(running, k=3)]
        if draws.random() < 0.3:  # a step further than anybody has scored
            grown = [text.child(draws.randrange(4)) for text in grown]
        before = set(here.scored)
        running = list(dict.fromkeys(grown))
        scorer.prune(0, running)
        kept = {above for text in running for above in text.upwards()} & before
        kept |= {text for text in before if any(above in running for above in text.upwards())}
        assert set(here.scored) == kept
        taken = {one.slot for one in here.scored.values()}
        assert taken | set(here.free_slots) == set(range(5, 96))
        assert len(taken) + len(here.free_slots) == 91
        assert here.logits.keys() <= kept
        ahead = [text.child(draws.randrange(4)) for text in running]
        missing = [above for text in running for above in [*text.upwards()][1::-1]]
        scorer.ask([[t for t in missing if t not in here.scored] + ahead])
