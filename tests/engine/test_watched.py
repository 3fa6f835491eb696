"""What a run tells besides tokens: logits at a place of the prompt, log-probabilities."""

import pytest
import torch

from outrider import (
    ConfigurationError,
    Engine,
    EngineRun,
    PromptLookup,
    Request,
    SamplingParams,
    StopConditions,
    UnknownName,
)
from outrider.engine.request import Logprobs
from outrider.models import adapt
from tiny import PROMPTS, llama

MODEL = llama()
GREEDY = SamplingParams(temperature=0)


def told(places, drafter=None):
    """The watched logits of the prompts, read as one ragged batch."""
    engine = Engine(adapt(MODEL), drafter or PromptLookup(2))
    run = EngineRun(engine, len(PROMPTS), 64)
    requests = [
        Request(prompt, GREEDY, StopConditions(3), watched=place)
        for prompt, place in zip(PROMPTS, places, strict=True)
    ]
    run.submit_all(requests)
    run.close()
    texts = {number: [] for number in range(len(PROMPTS))}
    for block in run:
        texts[block.request_id] += block.token_ids
    return [run.prompt_logits(number) for number in range(len(PROMPTS))], texts, run


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
    assert run.prompt_logits(0) is None  # told once


@pytest.mark.parametrize("place", [-1, 2, "first"])
def test_places_outside_the_prompt_are_refused(place):
    with pytest.raises(ConfigurationError, match="watched must be"):
        Request([5, 6], GREEDY, watched=place)


def expected_logs(ids, scale=1.0, bias=None):
    with torch.no_grad():
        logits = MODEL(torch.tensor([[*PROMPTS[0], *ids]])).logits[0, len(PROMPTS[0]) - 1 : -1]
    for token, add in (bias or {}).items():
        logits[:, token] += add
    return (logits * scale).log_softmax(-1)


def test_each_request_is_told_of_the_law_it_asks_for():
    bias = {7: 3.0}
    sampling = SamplingParams(0.5, seed=3, logit_bias=bias)
    run = EngineRun(Engine(adapt(MODEL), PromptLookup(2), "match"), 4, 64)
    wanted = [None, Logprobs(), Logprobs(3, "shaped"), Logprobs(4, "raw")]
    run.submit_all([Request(PROMPTS[0], sampling, StopConditions(6), logprobs=w) for w in wanted])
    run.close()
    said = [([], [], []) for _ in wanted]
    for block in run:
        ids, logs, tops = said[block.request_id]
        ids += block.token_ids
        logs += block.logprobs or []
        tops += block.likeliest or []
    ids = said[0][0]
    assert all(other[0] == ids for other in said)
    laws = [
        expected_logs(ids, 2.0, bias),
        expected_logs(ids, bias=bias),
        expected_logs(ids),
    ]
    assert said[0][1:] == ([], [])
    for (_, logs, tops), law, asked in zip(said[1:], laws, wanted[1:], strict=True):
        assert logs == pytest.approx(law[range(6), ids].tolist(), abs=1e-4)
        best = law.topk(asked.top, -1)
        assert [[token for token, _ in place] for place in tops] == (
            best.indices.tolist() if asked.top else []
        )
        found = [log for place in tops for _, log in place]
        assert found == pytest.approx(best.values.flatten().tolist(), abs=1e-4)


def test_log_probabilities_of_no_mode_are_refused():
    with pytest.raises(UnknownName, match="mode of log-probabilities"):
        Logprobs(mode="target")
    with pytest.raises(ConfigurationError, match="top must be"):
        Logprobs(-1)
