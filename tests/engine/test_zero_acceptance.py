"""A draft of which nothing is kept is told once, with a reason, and the planner drops it."""

import logging
import re

import pytest
import torch

import outrider
from outrider import SamplingParams, Stop
from outrider.costs import Costs
from outrider.drafters import DraftModel
from outrider.engine.engine import LOOKS, zero_reason
from outrider.models import TransformersRunner, TreeDecoder
from tiny import PROMPTS, llama, perturbed

LOAD = {"dtype": "float32", "device": "cpu", "threads": 1, "pack_weights": False}
SIZE = Stop(120, token_ids=())


def _with_head(change):
    """The target with another output layer: it reads alike, and says something else."""
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.copy_(change(model.lm_head.weight))
    return model


def _rotated():
    return _with_head(lambda weight: weight.roll(1, 0))


def _silent():
    return _with_head(lambda weight: 0 * weight)


def _broken():
    return _with_head(lambda weight: weight * torch.nan)


def _stuck():
    model = _with_head(lambda weight: 0.3 * weight)
    model.model.norm.weight.data.zero_()
    model.lm_head.bias = torch.nn.Parameter(20 * torch.eye(32)[7])
    return model


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (_rotated, "agrees with the target on 0% of a text's tokens.*draft_tokenizer"),
        (_silent, "all but uniform: its weights were not read"),
        (_broken, "no numbers; try dtype='float32'"),
        (_stuck, "says token 7 whatever it reads"),
        (llama, "where both read the text .100% of its tokens.*please report"),
    ],
)
def test_the_reason(draft, said):
    models = (TreeDecoder(TransformersRunner(model)) for model in (llama(), draft()))
    with torch.inference_mode():
        found = zero_reason(*models, list(PROMPTS[2]))
    assert re.search(said, found), found


def _loaded(draft, drafter="draft_model", **options):
    return outrider.load(llama(), draft, drafter=drafter, **LOAD, **options)


def test_it_is_told_once_and_the_planner_drops_it(caplog):
    speculator = _loaded(_rotated(), planner="adaptive")
    plain = speculator.plain().generate(list(PROMPTS), SamplingParams(0), SIZE)
    with caplog.at_level(logging.WARNING, "outrider"):
        found = [speculator.generate(list(PROMPTS), SamplingParams(0), SIZE) for _ in range(6)]
    told = [one.getMessage() for one in caplog.records if "of no use" in one.getMessage()]
    assert len(told) == 1
    assert "none of the first" in told[0]
    assert "draft_tokenizer" in told[0]
    assert found[-1].stats.drafted == 0 < found[0].stats.drafted
    assert "none of the first" in found[-1].stats.why_dropped
    for one in found:
        assert one.completions[0].token_ids == plain.completions[0].token_ids


def test_texts_that_may_depend_on_drafts_do_not_depend_on_what_others_showed(caplog):
    """A sampled row's plan is its own: dropping is for greedy and coupled rows."""
    settings = list(PROMPTS), SamplingParams(0.9, seed=3), SIZE
    fresh = _loaded(_rotated(), planner="adaptive")
    first = fresh.generate(*settings)
    fresh.engine.watch.why = "told"
    again = fresh.generate(*settings)
    assert [one.token_ids for one in first.completions] == [
        one.token_ids for one in again.completions
    ]
    assert again.stats.drafted == first.stats.drafted > 0


def test_a_fixed_planner_goes_on_and_says_it(caplog):
    speculator = _loaded(_rotated(), num_speculative_tokens=2)
    with caplog.at_level(logging.WARNING, "outrider"):
        found = speculator.generate(list(PROMPTS), SamplingParams(0), SIZE)
    assert sum("of no use" in one.getMessage() for one in caplog.records) == 1
    assert found.stats.drafted > 2 * LOOKS
    assert found.stats.why_dropped == ""


def test_copies_beside_it_go_on_without_it(caplog, monkeypatch):
    """`either`: what its model drafts is told apart from what it copies, which is kept."""
    speculator = _loaded(_rotated(), "either", planner="adaptive")
    engine, text = speculator.engine, [*PROMPTS[0], *range(3, 9)] * 4
    plain = speculator.plain().generate([text], SamplingParams(0), SIZE)
    engine.costs, engine._given = Costs.of({1: 6.0, 2: 6.1, 4: 6.2, 9: 6.3}), True
    asked, propose = [], DraftModel.propose
    monkeypatch.setattr(DraftModel, "propose", lambda *given: asked.append(1) or propose(*given))
    with caplog.at_level(logging.WARNING, "outrider"):
        found = [speculator.generate([text], SamplingParams(0), SIZE) for _ in range(6)]
        before = len(asked)
        found.append(speculator.generate([text], SamplingParams(0), SIZE))
    told = [one.getMessage() for one in caplog.records if "of no use" in one.getMessage()]
    assert len(told) == 1
    assert "the draft of 'either'" in told[0]
    assert before >= LOOKS
    assert len(asked) == before
    assert found[-1].stats.accepted > 0
    assert "none of the first" in found[-1].stats.why_dropped
    for one in found:
        assert one.completions[0].token_ids == plain.completions[0].token_ids


def test_a_row_whose_text_may_depend_on_it_asks_it_as_before():
    """Copies or the model: a sampled row beside greedy ones is not told what these have shown."""
    settings = [SamplingParams(0.9, seed=3), SamplingParams(0)]
    texts = []
    for why in ("", "told"):
        speculator = _loaded(perturbed(llama(), 0.3), "either", planner="adaptive")
        engine = speculator.engine
        engine.costs, engine._given = Costs.of({1: 6.0, 2: 6.1, 4: 6.2, 9: 6.3}), True
        engine.watch.why, engine.watch.over = why, True
        found = speculator.generate(list(PROMPTS[:2]), settings, SIZE)
        texts.append([one.token_ids for one in found.completions])
    assert texts[0] == texts[1]


def test_a_draft_that_is_kept_now_and_then_is_not_named(caplog):
    speculator = _loaded(perturbed(llama(), 0.3), num_speculative_tokens=2)
    with caplog.at_level(logging.WARNING, "outrider"):
        found = speculator.generate(list(PROMPTS), SamplingParams(0), SIZE)
    assert found.stats.accepted > 0
    assert not [one for one in caplog.records if "of no use" in one.getMessage()]
