"""Beams from text to text, as users ask for them."""

import pytest
import torch

import outrider
from outrider import Beams, Request, SamplingParams, Stop, StopConditions
from outrider.engine.beam_search.lookahead import LookaheadDepth
from outrider.engine.beam_search.search import search
from outrider.errors import ConfigurationError
from outrider.models.prefill import causal
from outrider.text import speculator

PROMPT = "def add(first, second):\n    return"


@pytest.fixture(scope="module")
def pair(shipped):
    return shipped


def test_beams_are_transformers(pair):
    from transformers import AutoModelForCausalLM

    from outrider.shipped import shipped

    network = AutoModelForCausalLM.from_pretrained(str(shipped("target")), dtype=torch.float32)
    ids = pair.tokenizer(PROMPT, return_tensors="pt")
    expected = network.generate(
        **ids,
        num_beams=4,
        num_return_sequences=3,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = pair.generate(PROMPT, stop=Stop(12), beams=Beams(4, num_return_sequences=3))
    start = ids["input_ids"].shape[1]
    for one, line, score in zip(
        found.completions,
        expected.sequences[:, start:].tolist(),
        expected.sequences_scores.tolist(),
        strict=True,
    ):
        assert one.token_ids == line[: len(one.token_ids)]
        assert one.score == pytest.approx(score, rel=1e-4)
        assert one.text == pair.tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert found.stats.steps <= 12
    request = Request(ids["input_ids"][0].tolist(), SamplingParams(0), StopConditions(12))
    target, draft = pair.engine.target, pair.engine.drafter
    counts = search(target, draft, [request], Beams(4), pace=LookaheadDepth(3, adapts=False)).counts
    assert counts.calls < 12 == counts.steps  # the draft model saves calls of the target


def test_several_prompts_and_other_drafters(pair):
    prompts = [PROMPT, "class Stack:\n    def push(self, item):\n"]
    beams = Beams(3)
    alone = [pair.generate(prompt, stop=Stop(10), beams=beams).texts[0] for prompt in prompts]
    assert pair.generate(prompts, stop=Stop(10), beams=beams).texts == alone
    copies = pair.using(outrider.PromptLookup(4))
    assert copies.generate(prompts, stop=Stop(10), beams=beams).texts == alone
    assert pair.plain().generate(prompts, stop=Stop(10), beams=beams).texts == alone


def test_drawn_beams_follow_their_seed(pair):
    def texts(seed):
        how = SamplingParams(1.0, seed=seed)
        return pair.generate(PROMPT, how, Stop(10), beams=Beams(3, num_return_sequences=3)).texts

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 5}, r"beams must be a Beams; got 5; write beams=outrider.Beams\(5\)"),
        ({"beams": Beams(2), "logprobs": True}, "no use for logprobs"),
        ({"beams": Beams(2), "num_return_sequences": 2}, "no use for num_return_sequences"),
        ({"beams": Beams(2), "stop": Stop(4, ("x",))}, "stop strings"),
    ],
)
def test_what_beams_have_no_use_for(pair, options, message):
    with pytest.raises(ConfigurationError, match=message):
        pair.generate(PROMPT, **options)


def test_a_stream_of_beams_is_refused(pair):
    with pytest.raises(ConfigurationError, match="use generate"):
        pair.stream(PROMPT, beams=Beams(2))


def test_a_near_tie_names_both_beams_and_the_gap_between_them(pair, monkeypatch):
    plain = pair.generate(PROMPT, stop=Stop(10), beams=Beams(3))
    assert plain.completions[0].near_tie is None
    monkeypatch.setattr(speculator, "ROUNDING", {torch.float32: 100.0})
    tie = pair.generate(PROMPT, stop=Stop(10), beams=Beams(3)).completions[0].near_tie
    prompt = pair.tokenizer(PROMPT)["input_ids"]

    def probable(ids):
        network = pair.engine.target
        whole = torch.tensor([[*prompt, *ids]])
        at = torch.arange(whole.shape[1])[None]
        nodes = causal(whole, at, whole.shape[1])
        logits = network.forward(network.open(1, 128), nodes).logits_BQV[0].log_softmax(-1)
        return sum(float(logits[len(prompt) - 1 + at, token]) for at, token in enumerate(ids))

    assert len(tie.kept_ids) == len(tie.dropped_ids)
    assert tie.kept_ids != tie.dropped_ids
    gap = probable(tie.kept_ids) - probable(tie.dropped_ids)
    assert tie.margin == pytest.approx(gap, abs=1e-3)
    assert tie.margin < 1  # the least of ten steps
    assert tie.kept == pair.tokenizer.decode(tie.kept_ids)
