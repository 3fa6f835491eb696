"""Beams are those of transformers: widths, penalties, ways to stop, stop tokens, ragged rows."""

from itertools import product

import pytest
import torch

from outrider.drafters import ReferenceLookup
from outrider.engine.beam_search.lookahead import (
    DraftedCandidates,
    LookaheadDepth,
    OfferedCandidates,
)
from outrider.engine.beam_search.scorer import PrefixScorer
from outrider.engine.beam_search.search import BeamSearch
from outrider.engine.beam_search.step import Beams, Rules
from outrider.errors import ConfigurationError
from outrider.models import LlamaRunner, TreeDecoder
from tiny import VOCAB, llama, perturbed

PROMPTS = ([3, 9, 4, 3, 9], [5, 6], [11, 12, 13, 14, 11, 12])
STOPS = (7, 2)
BUDGET = 14


class Malicious:
    """Texts nobody will ask for, and some that they will."""

    depth = 2

    def __init__(self):
        self.random = torch.Generator().manual_seed(5)

    def ready(self):
        pass

    def propose(self, states, depth):
        proposed = {}
        for row, state in states.items():
            texts = []
            for text in dict.fromkeys(state.running):
                node = text
                for _ in range(2):
                    token = torch.randint(0, VOCAB, (), generator=self.random)
                    node = node.child(int(token))
                    texts.append(node)
            proposed[row] = texts
        return proposed


def references(prompts):
    wide = max(map(len, prompts))
    return torch.tensor([[*prompt, *[-1] * (wide - len(prompt))] for prompt in prompts])


def ours(model, prompts, beams, speculator=None, settle=False, stops=STOPS, capacity=128):
    """Finished beams of every row, and the counts."""
    rules = [Rules(beams, len(p), len(p) + BUDGET, frozenset(stops)) for p in prompts]
    oracle = PrefixScorer(model, prompts, capacity)
    if speculator == "draft":
        draft = TreeDecoder(LlamaRunner(perturbed(llama(), 0.05), False))
        speculator = DraftedCandidates(
            PrefixScorer(draft, prompts, capacity, roots=oracle.roots()), rules, 3
        )
    elif speculator == "reference":
        speculator = OfferedCandidates(ReferenceLookup(4, width=2), "cpu", references(prompts))
    elif speculator == "malicious":
        speculator = Malicious()
    pace = LookaheadDepth(speculator.depth if speculator else 0, adapts=False)
    search = BeamSearch(oracle, rules, speculator, settle, pace)
    return search.run(), search.counts


def theirs(network, prompt, beams, stops=STOPS, **more):
    out = network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=BUDGET,
        num_beams=beams.num_beams,
        num_return_sequences=beams.num_beams,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **more,
    )
    texts = []
    for line in out.sequences[:, len(prompt) :].tolist():
        end = next((at + 1 for at, token in enumerate(line) if token in stops), len(line))
        texts.append(line[:end])
    scores = out.sequences_scores if beams.num_beams > 1 else None
    return texts, scores


SPECULATORS = (None, "reference", "draft", "malicious")
#: Every width, penalty and way to end once; the rest are slow.
FEW = ((2, -1.0, True), (4, 0.0, "never"), (5, 2.0, False), (10, 1.0, False))
ALL = product((2, 4, 5, 10), (-1.0, 0.0, 1.0, 2.0), (False, True, "never"))
MORE = [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FEW]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("width", "penalty", "stopping"), [*FEW, *MORE])
def test_identical_to_transformers(width, penalty, stopping):
    network = llama()
    model = TreeDecoder(LlamaRunner(network, False))
    beams = Beams(width, penalty, stopping, width)
    expected = [theirs(network, prompt, beams) for prompt in PROMPTS]
    for speculator, settle in product(SPECULATORS, (False, True)):
        found, _ = ours(model, PROMPTS, beams, speculator, settle)
        for row, (texts, scores) in enumerate(expected):
            assert [one.token_ids for one in found[row]] == texts, (row, speculator, settle)
            mine = torch.tensor([one.score for one in found[row]])
            torch.testing.assert_close(mine, scores, rtol=1e-4, atol=1e-5)


def test_a_penalty_that_makes_scores_huge_loses_no_beam():
    """The score of no beam, -1e9, is better than these: a search ended with none at all."""
    model = TreeDecoder(LlamaRunner(llama(), False))
    found, _ = ours(model, PROMPTS, Beams(3, -12.0, False, 3), stops=())
    for row in found:
        scores = [one.score for one in row]
        assert len(row) == 3
        assert max(scores) < -1e9
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("penalty", [1e308, -1e308, 40.0])
def test_a_penalty_beyond_what_scores_hold_is_refused(penalty):
    with pytest.raises(ConfigurationError, match="to whose power 14 tokens are below"):
        Rules(Beams(2, penalty), 3, 3 + BUDGET)
    assert Rules(Beams(2, 20.0), 3, 3 + BUDGET).beams.length_penalty == 20
