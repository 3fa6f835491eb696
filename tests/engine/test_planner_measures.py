"""What steps cost is measured before a planner works: by size, often enough, and honestly."""

from types import SimpleNamespace

import pytest
import torch

from outrider import DraftModel, Engine, PromptLookup, Root, SamplingParams, StopConditions
from outrider.drafters import Recall, Suffix
from outrider.engine.speculation_policy import measure
from outrider.models.cache import SlotCache
from outrider.types import PLAIN
from tiny import PROMPTS, decode, pair

MEASURED = measure.measured  # tests are given made-up costs: see conftest.py


def test_costs_are_measured_before_a_run_and_told_once(monkeypatch):
    target, small = pair()
    told = []
    engine = Engine(target, DraftModel(small, (1, 1)), None, "adaptive", kept=told.append)
    monkeypatch.setattr(measure, "measured", MEASURED)
    for _ in range(2):
        texts, run = decode(engine, PROMPTS[:3], SamplingParams(0), StopConditions(12))
    assert (
        texts
        == decode(Engine(target, Root()), PROMPTS[:3], SamplingParams(0), StopConditions(12))[0]
    )
    assert [sorted(costs.times) for costs in told] == [[1], [1, 4]]
    assert all(ms > 0 for by in told[-1].times.values() for curve in by.values() for ms in curve[1])
    assert run.stats.predicted_ms > 0
    assert sum(run.stats.sizes.values()) == run.stats.engine_steps


def test_what_nodes_cost_is_measured_by_nodes(monkeypatch):
    """A target that takes its time for every node; the smallest chains cost as much as told."""
    target, small = pair()
    engine = Engine(target, DraftModel(small, (1,) * 12), None, "adaptive")
    monkeypatch.setattr(measure, "ENOUGH", 1)
    costs = measure.whole(MEASURED(engine, 1))
    curve = costs.times[1][64]
    assert curve.at == (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13)
    assert list(curve.times) == sorted(curve.times)
    assert curve.times[-1] > 2 * curve.times[0]  # twelve calls of a draft model


@pytest.mark.parametrize(("seconds", "each"), [(0.0, measure.ROUNDS), (1e9, measure.ENOUGH)])
def test_a_machine_that_is_fast_enough_is_looked_at_more_often(seconds, each, monkeypatch):
    """Three looks at steps of some milliseconds differ by a tenth: one busy moment is believed."""
    looks, sound = [], measure._on_cpu

    def look(engine, step, batch, shape):
        looks.append(shape)
        return sound(engine, step, batch, shape)

    target, small = pair()
    monkeypatch.setattr(measure, "_on_cpu", look)
    monkeypatch.setattr(measure, "CONTEXTS", (8,))
    monkeypatch.setattr(measure, "SECONDS", seconds)
    measure.whole(MEASURED(Engine(target, DraftModel(small, (1, 1)), None, "adaptive"), 1))
    assert {looks.count(shape) for shape in looks} == {each + 1}  # and one that warms up


def test_a_machine_that_slows_down_between_looks_does_not_make_drafts_dear(monkeypatch):
    """One plain step alone was seen at full pace: each size is still as much of it as it was."""
    target, small = pair()
    looks = iter(range(10**6))

    def look(engine, step, batch, shape):
        warm_up_and_one_plain_step = next(looks) < 4  # rounds begin with their last but the next
        return shape.max_nodes, (4.0 + shape.max_depth) * (1 if warm_up_and_one_plain_step else 2)

    monkeypatch.setattr(measure, "_on_cpu", look)
    monkeypatch.setattr(measure, "CONTEXTS", (8,))
    costs = measure.whole(MEASURED(Engine(target, DraftModel(small, (1, 1)), None, "adaptive"), 1))
    assert costs.times[1][8] == ((1, 2, 3), (4.0, 5.0, 6.0))  # of the least of each: 10 and 12


def test_on_a_card_replays_are_timed(monkeypatch):
    """A chain looked dear, as the step that compiles or is captured was among the timed ones."""
    done: list[int] = []
    at: list[int] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            at.append(len(done))

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return float(sum(done[at[0] : at[1]]))

    def step(batch, shape):
        done.append((500, 200, 3)[min(len(done), 2)])  # compiles, is captured, is replayed
        return SimpleNamespace(draft=SimpleNamespace(tree=SimpleNamespace(nodes=2)))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert measure._on_cuda(step, None, PLAIN) == (2, 3.0)


def kept_what_was_right(engine, batch, shape):
    """A step whose token is the target's own: nothing of the made-up text goes on behind it."""
    return engine.stepper()(batch.take(range(batch.rows)), shape).batch


@pytest.mark.parametrize("drafter", [PromptLookup(8), Suffix(8), Recall(8), Recall(8, chain=True)])
def test_drafters_that_copy_are_measured_with_drafts(drafter, monkeypatch):
    """Every size has its own cost: one that never was drafted would be taken for free."""
    target, _ = pair(vocab=1024)
    monkeypatch.setattr(measure, "ENOUGH", 1)
    engine = Engine(target, drafter, None, "adaptive")
    sizes = (1, *(size for size in measure.SIZES if size <= 9))

    def found(rows):
        (curve,) = measure.whole(MEASURED(engine, rows)).times[rows].values()
        return curve.at

    assert found(1) == found(2) == sizes
    monkeypatch.setattr(measure, "_roomy", kept_what_was_right)
    assert len(found(1)) < len(sizes)


@pytest.mark.parametrize("drafter", [PromptLookup(8), Recall(8)])
def test_rows_are_stepped_again_from_where_they_were_and_no_entry_is_copied(drafter, monkeypatch):
    """A copy would lie in pages of which a long text in a run does not, and be read slower."""
    target, _ = pair(vocab=1024)
    engine = Engine(target, drafter, None, "adaptive")
    shape = engine.shapes[0]
    start = measure._with_room(engine, measure._made_up(engine, 1, 64), [PLAIN, shape])
    monkeypatch.setattr(SlotCache, "take", None)
    laws = []
    for asked in (shape, PLAIN, shape):
        state = measure._again(start)
        assert state.cache is start.cache
        made = engine.stepper()(state, asked)
        laws.append((made.draft.tokens_BN, made.scores.laws.logits_BRV.clone()))
    assert len(laws[0][0][0]) > 1
    assert all(map(torch.equal, laws[0], laws[2]))
