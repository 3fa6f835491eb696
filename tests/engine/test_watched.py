"""What a run tells besides tokens: logits at a place of the prompt, log-probabilities at 1."""

import pytest
import torch

from outrider import ConfigurationError, Engine, Limits, PromptLookup, Request, Run, Sampling
from outrider.models import adapt
from tiny import PROMPTS, llama

MODEL = llama()
GREEDY = Sampling(temperature=0)


def told(places, drafter=None):
    """The watched logits of the prompts, read as one ragged batch."""
    engine = Engine(adapt(MODEL), drafter or PromptLookup(2))
    run = Run(engine, len(PROMPTS), 64)
    requests = [
        Request(prompt, GREEDY, Limits(3), watched=place)
        for prompt, place in zip(PROMPTS, places, strict=True)
    ]
    run.submit_all(requests)
    run.close()
    texts = {number: [] for number in range(len(PROMPTS))}
    for block in run:
        texts[block.row] += block.token_ids
    return [run.watched(number) for number in range(len(PROMPTS))], texts, run


def test_the_logits_behind_a_place_are_the_models():
    places = (0, 1, 4, 0, None)
    logits, texts, run = told(places)
    _, plain, _ = told((None,) * 5)
    assert texts == plain
    for prompt, place, mine in zip(PROMPTS, places, logits, strict=True):
        if place is None:
            assert mine is None
            continue
        with torch.no_grad():
            expected = MODEL(torch.tensor([prompt[: place + 1]])).logits[0, -1]
            other = MODEL(torch.tensor([prompt[: place + 2]])).logits[0, -1]
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
        if place + 1 < len(prompt):
            assert (mine - other).abs().max() > 1e-2  # the place matters
    assert run.watched(0) is None  # told once


@pytest.mark.parametrize("place", [-1, 2, "first"])
def test_places_outside_the_prompt_are_refused(place):
    with pytest.raises(ConfigurationError, match="watched must be"):
        Request([5, 6], GREEDY, watched=place)


def test_log_probabilities_at_temperature_one():
    sampling = Sampling(0.5, seed=3)
    engine = Engine(adapt(MODEL), PromptLookup(2), "match")
    sums = {}
    for tempered in (True, False):
        run = Run(engine, 1, 64, logprobs=True, tempered=tempered)
        run.submit(Request(PROMPTS[0], sampling, Limits(6)))
        run.close()
        blocks = list(run)
        ids = [token for block in blocks for token in block.token_ids]
        sums[tempered] = [log for block in blocks for log in block.logprobs]
    with torch.no_grad():
        logits = MODEL(torch.tensor([[*PROMPTS[0], *ids]])).logits[0, len(PROMPTS[0]) - 1 : -1]
    for tempered, scale in ((True, 2.0), (False, 1.0)):
        expected = (logits * scale).log_softmax(-1)[range(6), ids].tolist()
        assert sums[tempered] == pytest.approx(expected, abs=1e-4)
