"""Beam search, several texts of a prompt, and laws on models whose layers keep states."""

from bisect import insort
from types import SimpleNamespace

import pytest
import torch
from recurrent_models import made, perturbed

from outrider import SamplingParams, StopConditions, verifiers
from outrider.drafters import DraftModel, PromptLookup, Root
from outrider.engine.beam_search import scorer, search
from outrider.engine.beam_search.step import Beams
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.models import TreeDecoder, runner_of
from outrider.models.decoder import orders_slots
from outrider.models.prefix_cache import PrefixCache
from outrider.models.recurrent.states import RecurrentStates
from outrider_lab.certify import Power, certify, foreign

KINDS = [  # one of each kind of mixer
    "jamba",
    "lfm2",
    "qwen3_5_text",
    "rwkv",
    *[
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            "falcon_h1",
            "inkling2_text",
            "kimi_linear",
            "minimax",
            "qwen4_exp_text",
            "recurrent_gemma",
            "xlstm",
            "zaya",
        )
    ],
]
BUDGET = 14


def decoder(model):
    return TreeDecoder(runner_of(model)(model))


def words(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=random).tolist()


@torch.inference_mode()
def beams_of_transformers(model, prompt, width):
    """Its own beam search, each text read anew in every step: no cache that could be wrong."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=BUDGET,
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        use_cache=False,
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, len(prompt) :].tolist(), out.sequences_scores


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_beams_are_those_of_transformers(kind):
    """A beam's nodes lie in any free slots, a child ahead of its parent as well."""
    model = made(kind)
    target, draft = decoder(model), decoder(perturbed(model))
    prompts, beams = [words(70), words(9, 1)], Beams(4, num_return_sequences=4)
    expected = [beams_of_transformers(model, prompt, 4) for prompt in prompts]
    requests = [Request(prompt, SamplingParams(0), StopConditions(BUDGET)) for prompt in prompts]
    for drafter in (Root(), PromptLookup(), DraftModel(draft, (1, 1))):
        found = search.search(target, drafter, requests, beams).hypotheses
        for row, (texts, scores) in enumerate(expected):
            assert [one.token_ids for one in found[row]] == texts, (row, drafter.name)
            mine = torch.tensor([one.score for one in found[row]])
            torch.testing.assert_close(mine, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_text_lies_behind_what_it_begins_with_where_slots_form_blocks(ordered):
    root = scorer.chain([5, 6])
    row = scorer._ScoredRow(root, 12, ordered)
    dropped, kept = root.child(7), root.child(8)
    assert [row.place(text).slot for text in (root, dropped, kept)] == [1, 2, 3]
    insort(row.free_slots, row.scored.pop(dropped).slot)
    assert row.place(kept.child(9)).slot == (4 if ordered else 2)
    config = made("qwen4_exp_text").config
    assert orders_slots(SimpleNamespace(runner=SimpleNamespace(config=config)))
    assert not orders_slots(decoder(made("lfm2")))


SMALL = Power(
    tokens=5_000, samples=512, equality_tokens=128, new_tokens=32, rows=64, effect=0.05, level=1e-3
)
PROMPTS = [[3, 1, 4, 1, 5, 9 + i % 8, i % 23 + 3, 2, 6] for i in range(32)]
HOT = SamplingParams(3.0)  # these models' laws are peaked: hotter, several tokens are likely


def drafting(kind="qwen3_5_text"):
    model = made(kind, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    target, draft = decoder(model), decoder(perturbed(model, 0.3))
    return target, draft


@pytest.mark.exhaustive
def test_texts_of_a_model_with_states_have_its_law():
    """Sampled trees, of a draft model that keeps states as well."""
    target, draft = drafting()
    engine = Engine(target, DraftModel(draft, (3, 2)), verifiers.get("rejection"))
    report = certify(engine, PROMPTS, HOT, SMALL)
    assert report.verdict == "exact", report.as_dict()


@pytest.mark.slow
def test_from_outside_a_state_that_keeps_what_was_rejected_is_seen(monkeypatch):
    """Nothing is known of the generator but its texts: sound ones pass, planted mistakes do not."""
    target, draft = drafting()
    engine, seed = Engine(target, DraftModel(draft, (2, 2)), None), iter(range(10**6))

    def sample(prompts):
        settings = [SamplingParams(3.0, seed=next(seed)) for _ in prompts]
        tokens = [[] for _ in prompts]
        for block in engine.run(prompts, settings, StopConditions(32)):
            tokens[block.request_id] += block.token_ids
        return tokens

    good = foreign(sample, target, PROMPTS, HOT, SMALL)
    assert good.verdict == "exact", good.as_dict()
    monkeypatch.setattr(RecurrentStates, "keep", lambda *_: None)
    assert foreign(sample, target, PROMPTS, HOT, SMALL).verdict == "not exact"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_several_texts_of_a_prompt_are_those_of_their_seeds(kind):
    """Rows of one prompt, each with a state of its own: who sits where changes nothing."""
    model = made(kind)
    target, draft = decoder(model), decoder(perturbed(model))
    prompt, rule = words(70), verifiers.get("match")
    params = [SamplingParams(0.8, seed=seed) for seed in range(4)]

    def texts(drafter, params, max_num_seqs):
        run = EngineRun(
            Engine(target, drafter, rule), max_num_seqs, 160, prefixes=PrefixCache(1 << 24)
        )
        run.submit_all([Request(prompt, one, StopConditions(12)) for one in params])
        run.close()
        found = [[] for _ in params]
        for block in run:
            found[block.request_id] += block.token_ids
        return found, [run.cached(row) for row in range(len(params))]

    each = [texts(Root(), [one], 1)[0][0] for one in params]
    found, copied = texts(DraftModel(draft, (2, 2), shared_noise=True), params, 3)
    assert found == each
    assert copied == [0, 64, 64, 64]
