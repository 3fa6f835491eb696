"""`model.generate` plans where nobody says how much to draft; costs are measured once a model."""

import copy

import pytest
import torch
from families import FAMILIES, build

from outrider.costs import Costs
from outrider.engine.speculation_policy import Adaptive, FixedLength, measure
from outrider.integrations.generate import SpeculativeGenerate
from outrider.integrations.generate_setup import generate_setup

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])


@pytest.fixture(scope="module")
def pair():
    target = build(FAMILIES["Llama"](), "sdpa")
    return target, copy.deepcopy(target)


def written(model, **settings):
    ours = SpeculativeGenerate(**settings)
    text = model.generate(PROMPT, custom_generate=ours, do_sample=False, max_new_tokens=24)
    assert torch.equal(text, model.generate(PROMPT, do_sample=False, max_new_tokens=24))
    return ours.stats


def test_costs_are_measured_in_the_first_call_and_kept_for_the_model(pair, monkeypatch):
    target, draft = pair
    calls, before = [], measure.measured
    monkeypatch.setattr(
        measure, "measured", lambda engine, rows: calls.append(rows) or before(engine, rows)
    )
    for _ in range(2):
        stats = written(target, draft_model=draft)
    assert calls == [1]
    assert len(stats.sizes) > 1
    assert stats.predicted_ms > 0


def test_a_number_or_a_name_switches_it_off(pair):
    target, draft = pair
    assert isinstance(generate_setup(target, {"draft": draft}).engine.planner, Adaptive)
    for settings in ({"num_speculative_tokens": 3}, {"planner": "fixed"}):
        engine = generate_setup(target, {"draft": draft} | settings).engine
        assert isinstance(engine.planner, FixedLength)
    assert written(target, draft_model=draft, num_speculative_tokens=3).sizes.keys() <= {1, 2, 3, 4}


def test_costs_that_are_given_are_not_measured(pair, monkeypatch, tmp_path):
    target, draft = pair
    monkeypatch.setattr(measure, "measured", None)
    hopeless = Costs.of({1: 5.0, 2: 50.0, 13: 500.0})
    hopeless.write(tmp_path / "costs.json")
    for costs in (hopeless, tmp_path / "costs.json"):
        stats = written(target, draft_model=draft, step_costs=costs)
        assert stats.plain_steps > 20
        assert stats.why_plain.startswith("the smallest draft costs 900% of a plain step")
