"""What reference lookup and prompt lookup copy from where."""

import itertools

import pytest
import torch

from outrider import (
    Engine,
    PromptLookup,
    ReferenceLookup,
    Root,
    SamplingParams,
    StopConditions,
    verifiers,
)
from outrider.drafters import prompt_lookup
from outrider.errors import ConfigurationError
from outrider.sampling import sampling_params
from outrider.testing import p_value, text_law
from outrider.types import Context, Verdict
from tiny import PROMPTS, decode, llama, pair

REFERENCE = [11, 12, 13, 14, 15, 16, 17, 18, 19]


def context(texts, references):
    """Rows of these texts, with these references (empty: none)."""

    def padded(rows, value):
        width = max(map(len, rows))
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])

    lengths = torch.tensor([len(text) for text in texts])
    rows = sampling_params.rows([SamplingParams(0)] * len(texts), torch.device("cpu"))
    given = padded(references, -1) if references and any(references) else None
    return Context(padded(texts, 0), lengths, int(lengths.max()), rows, None, given)


def proposed(drafter, text, reference=(), memory=None):
    """The chain that a row alone is offered."""
    rows = context([text], [list(reference)])
    memory = drafter.open(rows, 64) if memory is None else memory
    return drafter.propose(memory, rows, drafter.shapes[0]).tokens_BN[0, 1:].tolist()


def test_no_run_is_looked_for_where_the_last_token_stands_nowhere_else(monkeypatch):
    """All pairs of texts of up to four of two tokens, side by side: drafts stay as they are."""
    texts = [list(t) for n in range(1, 5) for t in itertools.product((1, 2), repeat=n)]
    drafter, told = PromptLookup(3), []

    def drafts():
        each = []
        for pair_of in itertools.product(texts, repeat=2):
            rows = context(pair_of, [])
            draft = drafter.propose(drafter.open(rows, 64), rows, drafter.shapes[0])
            each.append((draft.tokens_BN.tolist(), draft.draws_BNK.tolist()))
            told.append(prompt_lookup.repeats(rows))
        return each

    quick = drafts()
    assert len(set(told)) == 2
    monkeypatch.setattr(prompt_lookup, "repeats", lambda rows: True)
    assert drafts() == quick


def written(text, reference, drafter, start=0):
    """Steps in which a model that writes `text` has written it, and each step's offer."""
    done, offers = [start], []
    memory = drafter.open(context([done], [reference]), 64)
    while len(done) <= len(text):
        rows = context([done], [reference])
        draft = drafter.propose(memory, rows, drafter.shapes[0])
        offer = draft.tokens_BN[0, 1:].tolist()
        rest = text[len(done) - 1 :]
        kept = next((n for n, (a, b) in enumerate(zip(offer, rest, strict=False)) if a != b), None)
        kept = min(len(offer), len(rest) - 1) if kept is None else kept
        path = [*range(1, kept + 1), *[-1] * (draft.tree.max_depth - kept)]
        verdict = Verdict(
            torch.tensor([path]).view(1, -1).long(),
            torch.tensor([kept]),
            torch.tensor([rest[kept]]),
        )
        drafter.commit(memory, rows, draft, verdict, None)
        offers.append(offer)
        done += rest[: kept + 1]
    return offers


def test_the_start_of_the_reference_comes_first():
    assert proposed(ReferenceLookup(4), [0], REFERENCE) == [11, 12, 13, 14]
    assert proposed(ReferenceLookup(4), [0]) == []


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (REFERENCE, 2),
        ([11, 12, 1, 14, 15, 16, 17, 18, 19], 2),  # another token: the next step goes on behind it
        ([11, 12, 1, 13, 14, 15, 16, 17, 18], 3),  # one more: what follows it says so
        ([11, 12, 14, 15, 16, 17, 18, 19], 2),  # one less: what is written says where it is
    ],
)
def test_after_a_fix_the_copying_goes_on(text, steps):
    assert len(written(text, REFERENCE, ReferenceLookup(5))) == steps


def test_a_match_close_by_goes_before_one_far_away():
    reference = [1, 2, 3, 4, *range(11, 31), 5, 2, 6, 7]
    offers = written([1, 9, 2, 3, 4], reference, ReferenceLookup(3))
    assert offers[2] == [3, 4, 11]  # behind the first 2, though the last one stands later


def test_the_longest_match_wins_and_the_reference_before_the_text():
    assert proposed(ReferenceLookup(2), [4, 5, 6, 1, 5, 6], [5, 6, 7, 1, 5, 6, 8]) == [8]
    assert proposed(ReferenceLookup(2), [4, 5, 6, 9, 4, 5, 6], [6, 7, 8]) == [9, 4]
    assert proposed(ReferenceLookup(2), [6, 9, 5, 6], [6, 7, 8]) == [7, 8]


def test_what_separates_is_neither_matched_nor_copied():
    drafter, two = ReferenceLookup(4), [5, 6, -1, 7, 8]
    assert proposed(drafter, [0, 5], two) == [6]
    assert proposed(drafter, [0, 7], two) == [8]
    rows = context([[0, 6], [0, 3]], [[5, 6], [3, 7, 8, 9]])
    draft = drafter.propose(drafter.open(rows, 64), rows, drafter.shapes[0])
    there = (draft.draws_BNK >= 0).sum((1, 2)).tolist()
    # the first row's reference ends with its match; the other one's goes on
    assert there == [2, 3]
    assert draft.tokens_BN[1].tolist() == [3, 7, 8, 9]
    assert draft.tokens_BN.min() >= 0


def test_two_copies_begin_with_different_tokens():
    drafter = ReferenceLookup(2, width=2)
    draft_of = context([[0, 5]], [[5, 6, 1, 5, 6, 2, 5, 7, 3]])
    draft = drafter.propose(drafter.open(draft_of, 64), draft_of, drafter.shapes[0])
    assert draft.tokens_BN[0].tolist() == [5, 6, 7, 1, 3]
    assert draft.tree.parent_BN[0].tolist() == [-1, 0, 0, 1, 2]


def test_without_a_reference_the_text_is_the_only_one():
    for text in ([1, 2, 3, 1, 2], [4, 4, 4, 4], [7], [1, 2, 3]):
        assert proposed(ReferenceLookup(3), text) == proposed(PromptLookup(3), text)


@pytest.mark.parametrize("settings", [{"width": 0}, {"least_ngram": 3, "most_ngram": 2}])
def test_refused(settings):
    with pytest.raises(ConfigurationError, match=f"{next(iter(settings))}|most_ngram"):
        ReferenceLookup(**settings)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_good_reference_saves_steps_and_leaves_the_text(temperature, width):
    target, match = pair()[0], verifiers.get("match")
    settings = [SamplingParams(temperature, seed=row) for row in range(len(PROMPTS))]
    end = StopConditions(20)
    plain, _ = decode(Engine(target, Root(), match), PROMPTS, settings, end)
    references = [[*text[:7], (text[7] + 1) % 32, *text[8:]] for text in plain]
    engine = Engine(target, ReferenceLookup(5, width=width), match)
    texts, run = decode(engine, PROMPTS, settings, end, references=references)
    assert texts == plain
    assert run.stats.mean_acceptance_length > 3.2
    others = [references[-1], *references[:-1]]
    texts, run = decode(engine, PROMPTS, settings, end, references=others)
    assert texts == plain
    assert run.stats.mean_acceptance_length < 2.5


def test_the_law_is_the_targets():
    """A reference that says 5 5: what is copied is kept as often as the target writes it."""
    target = pair()[0]
    law = text_law(llama(vocab_size=32), (1, 3, 2), 2)
    best = divmod(int(law.argmax()), 32)
    for rule, fits in ((None, True), (verifiers.get("typical"), False)):
        engine = Engine(target, ReferenceLookup(2), rule)
        chance, run = p_value(engine, law, (1, 3, 2), 2, 2000, reference=best)
        assert (chance > 1e-4) == fits
        assert run.stats.accepted > 100
