"""Every width, penalty and way to end, with and without processors, of four families: transformers'
own beams, whatever is scored ahead.

    pytest -m slow -s tests/beam_search/test_grid.py        prints how many cases were compared

A case is one search of one row: four rows of unlike length, or three sources, side by side in a
batch. Each is run with nothing ahead, with texts that nobody asks for, and with copies, each with
and without leaving beams that cannot win unscored.

A score is a sum: what it is off by is compared with the sizes of its terms. That is the score's
own size, unless a processor makes some of the terms positive: then a score may lie near 0, and in
float32 it is no more exact there than its terms are: transformers' own differs from itself by as
much with its other kernel of attention. In float64 the scores are equal to the last bit: what
differs is the order of sums within the model, not the search.
"""

from copy import deepcopy
from itertools import cycle, product

import pytest
import test_encoder_decoders as pairs
import test_identity as decoders
import torch
from transformers import LogitsProcessorList

from outrider import Request, SamplingParams, StopConditions
from outrider.drafters import ReferenceLookup
from outrider.engine.beam_search.lookahead import LookaheadDepth, OfferedCandidates
from outrider.engine.beam_search.search import BeamSearch, prepared
from outrider.engine.beam_search.step import Beams
from outrider.models import LlamaRunner, TreeDecoder, adapt
from tiny import llama

WIDTHS, PENALTIES, ENDS = (2, 4, 5, 10), (-1.0, 0.0, 1.0, 2.0), (False, True, "never")
PROMPTS = (*decoders.PROMPTS, [8, 8, 21])


def odd(input_ids, scores):
    """A processor: tokens as odd as the last one are likelier."""
    scores = scores.clone()
    scores[:, 1::2] += (input_ids[:, -1:] % 2) * 0.7
    return scores


#: Settings of ours, and what transformers calls them.
SHAPES = (
    ({}, {}),
    ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
    ({"no_repeat_ngram_size": 2, "min_new_tokens": 4},) * 2,
    ({"processors": (odd,)}, {"logits_processor": LogitsProcessorList([odd])}),
)


def found(target, requests, beams, ahead, settle):
    """Finished beams of every row."""
    ready = prepared(target, requests, beams, 8 * beams.num_beams)
    proposer = None
    if ahead == "malicious":
        proposer = decoders.Malicious()
    elif ahead == "copies":
        proposer = OfferedCandidates(
            ReferenceLookup(3, width=2), "cpu", torch.tensor([[5, 6, 7, 8, 9]] * 4)
        )
    pace = LookaheadDepth(proposer.depth if proposer else 0, adapts=False)
    return BeamSearch(ready.oracle, ready.rules, proposer, settle, pace).run()


def terms(one, beams):
    """Of a score: the sum of its terms' sizes."""
    return sum(map(abs, one.logprobs)) / len(one.logprobs) ** beams.length_penalty


def off(row, scores, beams):
    """How far a row's scores are from others, beside the sizes of their terms."""
    return max(
        abs(one.score - score) / terms(one, beams)
        for one, score in zip(row, scores.tolist(), strict=True)
    )


def of_llama():
    """A target, its rows' requests by settings, and transformers' texts of a row."""
    network = llama()

    def requests(mine):
        limits = StopConditions(decoders.BUDGET, decoders.STOPS)
        return [Request(prompt, SamplingParams(0, **mine), limits) for prompt in PROMPTS]

    def expected(row, beams, more):
        return decoders.theirs(network, PROMPTS[row], beams, **more)

    return TreeDecoder(LlamaRunner(network, False)), requests, expected


def of_pair(family, dtype=torch.float32):
    inputs = pairs.sources(family)
    network = deepcopy(pairs.network(family)).to(dtype)

    def requests(mine):
        limits = StopConditions(pairs.BUDGET, (pairs.STOP,))
        each = (inputs.take([row]) for row in range(len(pairs.LENGTHS)))
        return [Request([2], SamplingParams(0, **mine), limits, one) for one in each]

    def expected(row, beams, more):
        return pairs.theirs(network, inputs, row, beams, **more)

    return adapt(network), requests, expected


def by_processor(dtype):
    """Of T5, the row that a processor brings nearest to 0: its beams, transformers' scores."""
    target, requests, expected = of_pair("t5", dtype)
    (mine, more), beams = SHAPES[3], Beams(10, 0.0, False, 10)
    texts, scores = expected(2, beams, more)
    (row,) = found(target, requests(mine)[2:], beams, None, False)
    assert [one.token_ids for one in row] == texts
    return row, scores, beams


@torch.inference_mode()
def test_scores_near_0_are_as_exact_as_their_terms():
    row, scores, beams = by_processor(torch.float64)
    assert min(abs(one.score) / terms(one, beams) for one in row) < 0.05  # its terms cancel
    torch.testing.assert_close(torch.tensor([one.score for one in row]), scores, rtol=1e-6, atol=0)
    row, scores, beams = by_processor(torch.float32)
    assert off(row, scores, beams) < 1e-4
    assert off(row, scores + 1e-3 * terms(row[0], beams), beams) > 1e-4  # another sum is noticed


@pytest.mark.slow
@torch.inference_mode()
def test_scores_near_0_are_as_far_from_transformers_as_it_is_from_itself():
    """Of itself with its other kernel of attention, and of its own float64."""
    inputs, (mine, more) = pairs.sources("t5"), SHAPES[3]
    network = pairs.network("t5")
    double, eager = deepcopy(network).double(), deepcopy(network)
    eager.set_attn_implementation("eager")
    assert network.config._attn_implementation == "sdpa"
    target, requests, expected = of_pair("t5")
    apart = {"ours": [], "its eager": [], "its float64": []}
    for width, row in product((4, 5, 10), range(3)):
        beams = Beams(width, 0.0, False, width)
        scores = expected(row, beams, more)[1]
        (found_row,) = found(target, [requests(mine)[row]], beams, None, False)
        others = [torch.tensor([one.score for one in found_row])]
        others += [pairs.theirs(one, inputs, row, beams, **more)[1] for one in (eager, double)]
        for into, other in zip(apart.values(), others, strict=True):
            into.append(float(((other - scores).abs() / scores.abs()).max()))
    print("\nof a score at most, beside transformers in float32:")
    for name, each in apart.items():
        more_so = sum(one > 1e-4 for one in each)
        print(f"  {name:12s} {max(each):.1e}, above 1e-4 in {more_so} of {len(each)} rows")
    assert max(apart["ours"]) < 2 * max(*apart["its eager"], *apart["its float64"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *pairs.MAKERS])
@torch.inference_mode()
def test_identical_to_transformers(family):
    target, requests, expected = of_llama() if family == "llama" else of_pair(family)
    cases = searches = 0
    worst = 0.0
    settings = zip(product(WIDTHS, PENALTIES, ENDS), cycle(SHAPES), strict=False)
    # one beam is greedy there, and its processors see logits
    for (width, penalty, end), (mine, more) in [((1, 1.0, True), SHAPES[0]), *settings]:
        beams = Beams(width, penalty, end, width)
        rows = requests(mine)
        theirs = [expected(row, beams, more) for row in range(len(rows))]
        cases += len(rows)
        for ahead, settle in product((None, "malicious", "copies"), (False, True)):
            every = found(target, rows, beams, ahead, settle)
            for row, (texts, scores) in enumerate(theirs):
                searches += 1
                where = (width, penalty, end, mine, row, ahead, settle)
                assert [one.token_ids for one in every[row]] == texts, where
                if scores is not None:  # transformers has none for one beam
                    worst = max(worst, off(every[row], scores, beams))
                    assert worst < 1e-4, where
    print(f"\n{family}: {cases} cases, {searches} searches, all equal, scores within {worst:.1e}")


@pytest.mark.slow
def test_another_penalty_is_noticed():
    target, requests, expected = of_llama()
    beams = Beams(4, 2.0, False, 4)
    texts = expected(0, Beams(4, -1.0, False, 4), {})[0]
    assert [one.token_ids for one in found(target, requests({}), beams, None, True)[0]] != texts
