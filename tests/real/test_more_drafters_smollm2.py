"""SmolLM2-135M-Instruct in float32: its own layers as a draft, lookahead, and cascades of it.

The folder `smollm2` of OUTRIDER_MODELS. Budgets are short: a minute on one core.
"""

from unittest import mock

import pytest

import outrider
from outrider import DraftModel, SamplingParams, StopConditions, verifiers
from outrider.testing import decode
from outrider_lab.drafters.cascade import Cascade
from outrider_lab.drafters.layer_skip import LayerSkip, part
from outrider_lab.drafters.lookahead import Lookahead
from outrider_lab.drafters.random import Random

pytestmark = pytest.mark.real

PROMPTS = ["def add(a, b):\n    return", "red apples, green apples, red apples,"]
LEFT = [number for number in range(30) if number not in (3, 4, 5)]  # outrider bench layers


@pytest.fixture(scope="module")
def plain(smollm2):
    return outrider.load(smollm2, drafter="none", dtype="float32", threads=1, pack_weights=False)


def texts(plain, drafter, sampling, tokens=20, of=PROMPTS):
    prompts = [plain.tokenizer(text)["input_ids"] for text in of]
    rule = None if sampling.temperature == 0 else verifiers.get("match")
    engine = outrider.Engine(plain.engine.target, drafter, rule)
    return decode(engine, prompts, sampling, StopConditions(tokens))


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0), SamplingParams(0.7, seed=5)], ids=["greedy", "drawn"]
)
def test_texts_are_plain_decodings(plain, sampling):
    target = plain.engine.target
    expected, _ = texts(plain, outrider.Root(), sampling)
    layers = LayerSkip(part(target, LEFT), (1, 1))
    for drafter in (layers, Lookahead(), Random(target.vocab_size, 2)):
        assert texts(plain, drafter, sampling)[0] == expected


def test_a_draft_without_three_layers_agrees_as_its_search_says(plain):
    """alpha 0.92 at T = 0 on prompts of code."""
    drafter = LayerSkip(part(plain.engine.target, LEFT), (1,))
    _, run = texts(plain, drafter, SamplingParams(0), 40)
    assert run.stats.accepted / run.stats.drafted > 0.75


def test_a_cascade_drafts_the_chain_of_its_model(plain):
    """A draft that is the target itself: all of it is kept, in fewer calls than tokens."""
    model = plain.engine.target
    forward = type(model).forward
    with mock.patch.object(type(model), "forward", autospec=True, side_effect=forward) as calls:
        alone, one = texts(plain, DraftModel(model, (1,) * 4), SamplingParams(0), 40, PROMPTS[1:])
        by_chain = calls.call_count
        cascade = Cascade(model, num_speculative_tokens=4)
        together, other = texts(plain, cascade, SamplingParams(0), 40, PROMPTS[1:])
        by_cascade = calls.call_count - by_chain
    assert together == alone
    assert other.stats.accepted == one.stats.accepted
    assert by_cascade < by_chain
