"""Penalties, bans and processors act in a beam search as they do in transformers."""

import pytest
import torch
from transformers import LogitsProcessorList

from outrider import PromptLookup, SamplingParams
from outrider.engine.beam_search.lookahead import LookaheadDepth, OfferedCandidates
from outrider.engine.beam_search.scorer import PrefixScorer
from outrider.engine.beam_search.search import BeamSearch, shaper
from outrider.engine.beam_search.step import Beams, Rules
from outrider.models import LlamaRunner, TreeDecoder
from outrider.sampling import logits_processors
from tiny import VOCAB, llama

PROMPTS = ([3, 9, 4, 3, 9], [5, 6], [11, 12, 13, 14, 11, 12])
STOPS = [7, 2]
BUDGET = 14


def odd(input_ids, scores):
    """A processor: tokens as odd as the last one are likelier."""
    scores = scores.clone()
    scores[:, 1::2] += (input_ids[:, -1:] % 2) * 0.7
    return scores


ASKED = {
    "repetition": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "n-gram ban": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "least length": ({"min_new_tokens": 6}, {"min_new_tokens": 6}),
    "bias": ({"logit_bias": {4: 1.5, 9: -2.0}}, {"sequence_bias": {(4,): 1.5, (9,): -2.0}}),
    "processor": ({"processors": (odd,)}, {"logits_processor": LogitsProcessorList([odd])}),
    "several": (
        {"repetition_penalty": 0.8, "min_new_tokens": 3, "no_repeat_ngram_size": 3},
        {"repetition_penalty": 0.8, "min_new_tokens": 3, "no_repeat_ngram_size": 3},
    ),
}


def ours(settings, beams, proposer, seed=None):
    model = TreeDecoder(LlamaRunner(llama(), False))
    rules, shapers = [], []
    settings = SamplingParams(**settings)
    for prompt in PROMPTS:
        admitted = logits_processors.validate([settings], [prompt], [STOPS], VOCAB, "cpu")[0]
        drawn = None if seed is None else torch.Generator().manual_seed(seed)
        rules.append(Rules(beams, len(prompt), len(prompt) + BUDGET, frozenset(STOPS), drawn=drawn))
        shapers.append(shaper(admitted, prompt, STOPS, VOCAB, "cpu", len(prompt) + BUDGET))
    oracle = PrefixScorer(model, PROMPTS, 256, shapers=shapers)
    ahead = OfferedCandidates(PromptLookup(3), "cpu") if proposer else None
    return BeamSearch(
        oracle, rules, ahead, settle=True, pace=LookaheadDepth(3 if proposer else 0, adapts=False)
    ).run()


def theirs(prompt, beams, more, seed=0):
    network = llama()
    torch.manual_seed(seed)
    out = network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=BUDGET,
        num_beams=beams.num_beams,
        num_return_sequences=beams.num_beams,
        eos_token_id=STOPS,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **more,
    )
    texts = []
    for line in out.sequences[:, len(prompt) :].tolist():
        end = next((at + 1 for at, token in enumerate(line) if token in STOPS), len(line))
        texts.append(line[:end])
    return texts, out.sequences_scores


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("width", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_identical_with_processors(name, width):
    mine, more = ASKED[name]
    beams = Beams(width)
    plain = ours({"temperature": 0}, beams, False)
    for proposer in (False, True):
        found = ours({"temperature": 0} | mine, beams, proposer)
        for row, prompt in enumerate(PROMPTS):
            texts, scores = theirs(prompt, beams, more | {"do_sample": False})
            assert [one.token_ids for one in found[row]] == texts
            mine_scores = torch.tensor([one.score for one in found[row]])
            torch.testing.assert_close(mine_scores, scores, rtol=1e-4, atol=1e-5)
    assert [[one.token_ids for one in row] for row in found] != [
        [one.token_ids for one in row] for row in plain
    ]


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
@pytest.mark.parametrize("proposer", [False, True])
def test_drawn_beams_are_transformers_for_the_same_stream(filters, proposer):
    beams, how = Beams(4), {"temperature": 0.7} | filters
    found = ours(how, beams, proposer, seed=11)
    more = {"do_sample": True, "top_k": 0} | how
    for row, prompt in enumerate(PROMPTS):
        texts, _ = theirs(prompt, beams, more, seed=11)
        assert [one.token_ids for one in found[row]] == texts
