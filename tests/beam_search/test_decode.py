"""Requests in, finished beams out, with every drafter that a search can use."""

import pytest
import torch

from outrider import (
    Beams,
    DraftModel,
    Engine,
    PromptLookup,
    Root,
    SamplingParams,
    StopConditions,
)
from outrider.drafters import Beam as BeamDrafter, Recall, ReferenceLookup, Suffix
from outrider.drafters.ngram_table import NgramTable, count
from outrider.engine.beam_search.lookahead import LookaheadDepth
from outrider.engine.beam_search.search import search
from outrider.engine.request import Request
from outrider.errors import ConfigurationError, PromptError
from tiny import VOCAB, pair

PROMPTS = ([3, 9, 4, 3, 9], [5, 6], [11, 12, 13, 14, 11, 12])
DRAFTERS = {
    "root": lambda small: Root(),
    "prompt_lookup": lambda small: PromptLookup(4),
    "suffix": lambda small: Suffix(4),
    "recall": lambda small: Recall(6),
    "reference": lambda small: ReferenceLookup(4),
    "n-gram table": lambda small: NgramTable(count(list(range(VOCAB)) * 3, VOCAB), 3),
    "draft model": lambda small: DraftModel(small, (1, 1, 1)),
}


GREEDY, END = SamplingParams(0), StopConditions(16, (7,))


def requests(sampling=GREEDY):
    return [Request(prompt, sampling, END) for prompt in PROMPTS]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("sampling", [SamplingParams(0), SamplingParams(0.8, seed=3, top_k=9)])
def test_every_drafter_leaves_the_beams_as_they_are(name, sampling):
    target, small = pair()
    beams = Beams(4, num_return_sequences=3)
    plain = search(target, Root(), requests(sampling), beams)
    found = search(target, DRAFTERS[name](small), requests(sampling), beams)
    for mine, theirs in zip(found.hypotheses, plain.hypotheses, strict=True):
        assert [one.token_ids for one in mine] == [one.token_ids for one in theirs]
        assert len(mine) == 3
    assert found.counts.steps == plain.counts.steps


def test_a_good_draft_saves_calls():
    target, _ = pair()
    plain = search(target, Root(), requests(), Beams(3), settle=False)
    pace = LookaheadDepth(3, adapts=False)
    same = search(target, DraftModel(target, (1, 1, 1)), requests(), Beams(3), False, pace)
    assert same.counts.calls < 0.5 * plain.counts.calls


def test_one_beam_is_greedy():
    target, _ = pair()
    beams = search(target, PromptLookup(4), requests(), Beams(1))
    texts = [[], [], []]
    run = Engine(target, Root()).run(PROMPTS, SamplingParams(0), END)
    for block in run:
        texts[block.request_id] += block.token_ids
    assert [row[0].token_ids for row in beams.hypotheses] == texts


def test_a_drafter_that_grows_trees_with_a_model_is_refused_by_name():
    target, small = pair()
    with pytest.raises(ConfigurationError, match=r"'beam'; use the drafter 'draft_model'"):
        search(target, BeamDrafter(small, 3, 3), requests(), Beams(2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 0}, "num_beams must be a whole number of at least 1"),
        ({"num_beams": 2, "num_return_sequences": 3}, "no more sequences can be returned"),
        ({"num_beams": 2, "early_stopping": "always"}, "early_stopping must be True, False"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty must be a finite"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        Beams(**settings)


def test_a_prompt_outside_the_vocabulary_is_refused_before_any_work():
    target, _ = pair()
    with pytest.raises(PromptError, match="outside the vocabulary"):
        search(
            target, Root(), [Request([VOCAB + 1], SamplingParams(0), StopConditions(4))], Beams(2)
        )


def test_beams_of_unequal_texts_share_one_cache_row():
    target, _ = pair()
    found = search(target, Root(), requests(), Beams(8))
    assert found.counts.nodes < 8 * found.counts.steps
    assert torch.isfinite(torch.tensor(found.counts.margin)).all()
