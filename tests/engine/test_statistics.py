"""Counts add up: requests to totals, positions to acceptances, tokens to texts."""

import math

import pytest

from outrider import DraftModel, Engine, RequestStats, SamplingParams, StopConditions
from outrider.drafters import Paths
from outrider.ops import use
from outrider.stats import VERBS
from outrider_lab.timeline import Timed
from tiny import DRAFTERS, PROMPTS, VOCAB, decode, pair


@pytest.mark.one_in(12)
@pytest.mark.parametrize("sampling", [SamplingParams(0), SamplingParams(1.0, seed=4)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_statistics_add_up(name, sampling):
    target, small = pair()
    budgets = [9, 30, 17, 31, 12]
    engine = Engine(target, DRAFTERS[name](small))
    rows, run = decode(engine, PROMPTS, sampling, [StopConditions(b) for b in budgets])
    total = RequestStats()
    for request in run.requests:
        total.add(request)
    for field in ("prompt_tokens", "new_tokens", "steps", "drafted", "accepted", "overlaps"):
        assert getattr(run.stats, field) == getattr(total, field), field
    assert run.stats.accepted_per_position == total.accepted_per_position
    assert run.stats.overlap == pytest.approx(total.overlap)
    for prompt, row, stats in zip(PROMPTS, rows, run.requests, strict=True):
        assert stats.prompt_tokens == len(prompt)
        assert stats.new_tokens == len(row)
        assert sum(stats.accepted_per_position) == stats.accepted <= stats.drafted
        assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
        assert stats.steps <= stats.new_tokens <= stats.steps + stats.accepted
        assert stats.seconds > 0
    stats = run.stats
    assert max(r.steps for r in run.requests) <= stats.engine_steps <= stats.steps
    parts = [getattr(stats, f"{part}_ms") for part in (*VERBS, "host")]
    assert sum(parts) == pytest.approx(1e3 * stats.seconds)
    assert min(parts) > 0
    assert stats.prefill_ms > 0
    if name == "root":
        assert stats.drafted == stats.accepted == 0
        assert stats.block_efficiency == stats.mean_acceptance_length == 1
        assert stats.alpha is None


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_alpha_is_there_when_there_was_a_law(name):
    target, small = pair()
    rows = [SamplingParams(1.0, seed=i) for i in range(len(PROMPTS))]
    _, run = decode(Engine(target, DRAFTERS[name](small)), PROMPTS, rows, StopConditions(40))
    assert 0 < run.stats.alpha < 1
    assert run.stats.overlaps <= run.stats.steps * len(DRAFTERS[name](small).counts)


def test_alpha_is_one_when_the_target_drafts():
    target, _ = pair()
    _, run = decode(
        Engine(target, DraftModel(target, (1, 1))),
        PROMPTS,
        SamplingParams(1.0, seed=1),
        StopConditions(30),
    )
    assert run.stats.alpha == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("drafter", [DraftModel, lambda model: Paths(model, 2, 2)])
def test_a_timed_model_knows_what_was_spent_in_it(drafter):
    target, small = pair()
    timed = Timed(small)
    expected, _ = decode(
        Engine(target, drafter(small)), PROMPTS[:2], SamplingParams(0), StopConditions(20)
    )
    texts, run = decode(
        Engine(target, drafter(timed)), PROMPTS[:2], SamplingParams(0), StopConditions(20)
    )
    assert texts == expected
    assert timed.calls > run.stats.engine_steps
    assert 0 < timed.seconds < run.stats.seconds + run.stats.prefill_ms / 1e3


def test_the_trace_tells_what_became_of_every_drafted_token():
    target, small = pair()
    run = Engine(target, DRAFTERS["tree"](small)).run(
        PROMPTS, SamplingParams(1.0, seed=2), StopConditions(20), trace=True
    )
    drafted = accepted = 0
    for block in run:
        trace = block.trace
        assert len(trace.tokens) == len(trace.parents)
        drafted += len(trace.tokens)
        accepted += len(trace.accepted)
        path = [trace.tokens[n - 1] for n in trace.accepted]
        assert block.token_ids[: block.accepted] == path[: block.accepted]
        parents = [0, *trace.accepted]
        assert [trace.parents[n - 1] for n in trace.accepted] == parents[:-1]
        leaf = parents[-1]
        assert trace.next_is_bonus == (leaf not in trace.parents)
    assert drafted == run.stats.drafted
    assert accepted == run.stats.accepted


FILTERED = (
    SamplingParams(1.0, top_k=1, seed=1),
    SamplingParams(1.0, top_p=0.5, seed=1),
    SamplingParams(0, logit_bias=dict.fromkeys(range(2, VOCAB), -math.inf)),
    [SamplingParams(1.0, top_k=2, seed=1), SamplingParams(0)],
)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("ops", ["reference", None])
@pytest.mark.parametrize("name", sorted(set(DRAFTERS) - {"root"}))
def test_nothing_is_offered_below_a_node_that_is_not(name, ops):
    """Filters and bans leave fewer tokens than a node has places for children."""
    target, small = pair()
    for sampling in FILTERED:
        with use(ops):
            engine = Engine(target, DRAFTERS[name](small))
            run = engine.run(PROMPTS[:2], sampling, StopConditions(6), trace=True)
            traces = [block.trace for block in run]
        offered = sum(len(trace.tokens) for trace in traces)
        assert offered <= run.stats.drafted
        if "paths" not in name:  # a child that two paths drew counts twice
            assert offered == run.stats.drafted
        for trace in traces:
            assert all(parent < node for node, parent in enumerate(trace.parents, start=1))


def test_what_filters_leave_out_is_not_counted_as_drafted():
    target, _ = pair()
    engine = Engine(target, DraftModel(target, (3, 2, 1)))
    _, run = decode(engine, PROMPTS[:1], SamplingParams(1.0, top_k=1, seed=1), StopConditions(16))
    assert run.stats.draft_acceptance_rate == 1  # one chain of three, which its own drafter keeps


def test_plain_values_for_json():
    import json

    target, small = pair()
    _, run = decode(Engine(target, DRAFTERS["chain"](small)), PROMPTS)
    document = json.loads(json.dumps(run.stats.as_dict()))
    assert document["block_efficiency"] == run.stats.block_efficiency
    assert document["alpha"] is None
    assert RequestStats().as_dict()["mean_acceptance_length"] == 0
