"""The shipped pair, planned, writes what plain decoding does, alone and in ragged batches."""

import json

import pytest

import outrider
from outrider import SamplingParams, Stop
from outrider.costs import Costs
from outrider.engine.speculation_policy import measure
from outrider.shipped import shipped

STOP = Stop(48)


def prompts(count):
    lines = shipped("heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"].rstrip() for line in lines][:count]


def written(speculator, texts, temperature, together):
    done, stats = [], []
    for first in range(0, len(texts), together):
        some = texts[first : first + together]
        seeds = [SamplingParams(temperature, seed=first + row) for row in range(len(some))]
        found = speculator.generate(some, seeds, STOP)
        done += [completion.token_ids for completion in found.completions]
        stats.append(found.stats)
    return done, stats


def equal(count, dtype, drafter, temperature, together):
    """How many texts are those of plain decoding; and the sizes that were drafted."""
    about = {"dtype": dtype, "threads": 1, "pack_weights": True}
    speculator = outrider.load(drafter=drafter, shared_noise=drafter == "draft_model", **about)
    texts = prompts(count)
    ours, stats = written(speculator, texts, temperature, together)
    plain, _ = written(speculator.plain(shared_noise=True), texts, temperature, 1)
    sizes = {nodes for each in stats for nodes in each.sizes}
    return sum(a == b for a, b in zip(ours, plain, strict=True)), sizes


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("count", "together"), [(2, 1), (4, 4)])
def test_planned_texts_are_plain_ones(count, together):
    same, sizes = equal(count, "float32", "draft_model", 1.0, together)
    assert same == count
    assert len(sizes) > 2, "one size is no plan"


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup", "recall"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forty_eight_planned_texts_are_plain_ones(dtype, drafter, temperature, together):
    same, sizes = equal(48, dtype, drafter, temperature, together)
    print(f"{dtype}, {drafter}, T = {temperature:g}, {together} at once: {same} of 48, {sizes}")
    assert same == 48


def test_costs_of_a_file_are_those_that_count(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "measured", None)
    Costs.of({1: 5.0, 13: 500.0}).write(tmp_path / "costs.json")
    about = {"dtype": "float32", "threads": 1, "pack_weights": True}
    speculator = outrider.load(step_costs=tmp_path / "costs.json", **about)
    stats = speculator.generate(prompts(1)[0], SamplingParams(0), Stop(24)).stats
    assert stats.plain_steps > 20
    assert "of a plain step" in stats.why_plain
