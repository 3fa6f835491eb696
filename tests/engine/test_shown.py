"""What a run shows planners and drafters, and that their choices change no exact text."""

import pytest
import torch
from requests_alone import CAPACITY, LONG, refuses

from outrider import (
    ConfigurationError,
    DraftModel,
    Engine,
    Root,
    SamplingParams,
    StopConditions,
)
from outrider.engine import scheduler
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request
from outrider.engine.speculation_policy import PlanReport
from outrider.models.prefill import causal
from tiny import DRAFTERS, PROMPTS, pair


class Turns:
    """A planner that takes the shapes in turn and counts what it has learnt."""

    def __init__(self):
        self.learnt = 0

    def open(self, shapes, costs):
        self.costs = costs
        return shapes, 0

    def plan(self, state, view):
        rows = view.rows
        assert view.max_num_seqs >= len(rows)
        assert view.closed
        assert all(isinstance(row.request, Request) for row in rows)
        assert all(row.length >= len(row.request.prompt) and row.foresee is None for row in rows)
        shapes, at = state
        shape = shapes[at % len(shapes)]
        most = [at % 3] * len(rows)
        return shape._replace(most_B=torch.tensor(most)) if at % 2 else shape

    def report(self, state):
        return PlanReport()

    def learn(self, state, step):
        blocks = step.blocks
        assert step.milliseconds > 0
        assert step.nodes > max(block.drafted for block in blocks)
        self.learnt += sum(len(block.token_ids) for block in blocks)
        assert all(block.drafted >= block.accepted for block in blocks)
        return state[0], state[1] + 1


@pytest.mark.parametrize("name", ["chain", "tree", "coupled chain", "coupled tree"])
def test_a_planner_chooses_among_the_shapes_and_no_exact_text_changes(name):
    target, small = pair()
    planner, costs = Turns(), {"target": {1: 1.0}}
    engine = Engine(target, DRAFTERS[name](small), None, planner, costs)
    how = SamplingParams(1.0, seed=4) if "coupled" in name else SamplingParams(0)
    run = engine.run(PROMPTS, how, StopConditions(30))
    texts = [[] for _ in PROMPTS]
    for block in run:
        texts[block.request_id] += block.token_ids
    plain = Engine(target, Root(), "match").run(PROMPTS, how, StopConditions(30))
    expected = [[] for _ in PROMPTS]
    for block in plain:
        expected[block.request_id] += block.token_ids
    assert texts == expected
    assert planner.costs == costs
    assert planner.learnt == 30 * len(PROMPTS)


def test_a_planner_outside_the_declared_shapes_is_refused():
    target, small = pair()

    class Wild(Turns):
        def plan(self, state, view):
            return state[0][0]._replace(key="wild", max_nodes=99)

    run = Engine(target, DraftModel(small, (1, 1)), None, Wild()).run(
        PROMPTS[:1], SamplingParams(0)
    )
    with refuses(ConfigurationError, "planner", "'draft_model'", "'wild'", "choose among"):
        next(run)


class Seer:
    """A drafter that foresees, over one that does not."""

    def __init__(self, inner):
        self.inner, self.name, self.aux_layers = inner, "seer", ()
        self.kinds, self.shapes = inner.kinds, inner.shapes
        self.open, self.commit, self.told = inner.open, inner.commit, []

    def foresee(self, memory, context):
        return [[0.0, float(length)] for length in context.length_B.tolist()]

    def propose(self, memory, context, shape):
        assert context.cache is not None
        return self.inner.propose(memory, context, shape)


def test_what_a_drafter_foresees_reaches_the_planner_row_by_row():
    target, small = pair()
    looked = []

    class Looking(Turns):
        def plan(self, state, view):
            looked.append([(row.request_id, row.length, row.foresee()[1]) for row in view.rows])
            return state[0][0]

    engine = Engine(target, Seer(DraftModel(small, (1, 1))), None, Looking())
    list(engine.run(PROMPTS, SamplingParams(0), StopConditions(6)))
    assert [number for number, _, _ in looked[0]] == list(range(len(PROMPTS)))
    assert all(length == gain for step in looked for _, length, gain in step)


class Reader(Root):
    """Plain decoding that keeps what it was shown of the target's states."""

    aux_layers = (-1, 1)
    seen: list[torch.Tensor]

    def open(self, context, capacity):
        self.seen.append(context.hidden)
        return super().open(context, capacity)

    def commit(self, memory, context, draft, verdict, scores):
        self.seen.append(scores.hidden)


def test_a_drafter_that_asks_is_shown_the_states(monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 16)
    target, _ = pair()
    reader = Reader()
    object.__setattr__(reader, "seen", [])
    run = EngineRun(Engine(target, reader), 2, CAPACITY)
    run.submit(Request(LONG, SamplingParams(0), StopConditions(4)))
    list(run)
    prompt, *steps = (states for states in reader.seen if states)
    assert [state.shape for state in prompt] == [(1, len(LONG) - 1, 32)] * 2
    assert [tuple(state.shape) for states in steps for state in states] == [(1, 1, 32)] * 8
    capacity = 256
    cache = target.open(1, capacity)
    text = torch.tensor([LONG])
    at = torch.arange(len(LONG))[None]
    with torch.inference_mode():
        whole = target.forward(
            cache, causal(text, at, capacity), aux_layers=reader.aux_layers
        ).hidden
    for layer in (0, 1):
        states = torch.cat([prompt[layer], steps[0][layer]], 1)
        torch.testing.assert_close(states, whole[layer], atol=1e-4, rtol=1e-4)
