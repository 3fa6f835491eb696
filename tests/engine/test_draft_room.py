"""Drafts that memory has no room for: smaller ones from then on, said once, and the same text."""

import logging

import pytest
import torch
from recurrent_models import VOCAB, made

from outrider.drafters import Recall
from outrider.drafters.root import Root
from outrider.engine.draft_room import DraftRoom
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.engine.speculation_policy import measure
from outrider.models import TreeDecoder, runner_of
from outrider.models.prefill import ingest
from outrider.models.recurrent.states import RecurrentStates
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import PLAIN, DraftShape

MEASURED = measure.measured  # tests are given made-up costs: see conftest.py
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 6
BIASED = SamplingParams(0.0, logit_bias=dict.fromkeys(PROMPT[:8], 30.0))
SEEDED = SamplingParams(0.9, seed=3, logit_bias=dict.fromkeys(PROMPT[:8], 6.0))
FULL = {
    "python": lambda: MemoryError("no room for states"),
    "torch": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12"),
}


@pytest.fixture
def target():
    model = made("qwen3_5_text")
    return TreeDecoder(runner_of(model)(model))


def texts(engine):
    found = [[], []]
    for block in engine.run([PROMPT] * 2, [BIASED, SEEDED], StopConditions(40)):
        found[block.request_id] += block.token_ids
    return found


def no_room_for(monkeypatch, most, error, layer=3):
    """Deep in a call, when some layers have written their part of it already."""
    theirs = RecurrentStates.recur

    def recur(self, layer_idx, number, rule, *inputs):
        call = self._here()
        if layer_idx == layer and not call.pieces and inputs[0].shape[1] > most:
            raise error()
        return theirs(self, layer_idx, number, rule, *inputs)

    monkeypatch.setattr(RecurrentStates, "recur", recur)


@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize("most", [5, 1])
def test_the_tree_is_made_smaller_and_the_text_stays(target, monkeypatch, caplog, error, most):
    plain = texts(Engine(target, Root(), "match"))
    whole = Engine(target, Recall(8), "match")
    assert texts(whole) == plain
    assert whole.room.most is None
    no_room_for(monkeypatch, most, FULL[error])
    engine = Engine(target, Recall(8), "match")
    with caplog.at_level(logging.WARNING, "outrider"):
        assert texts(engine) == plain
        assert texts(engine) == plain  # another run knows already
    assert 1 <= engine.room.most <= most
    said = [record.message for record in caplog.records if "no memory for" in record.message]
    assert said[0].startswith("no memory for 8 drafted tokens a step (")
    assert said[-1].endswith("from now on none" if most == 1 else "at most 4")
    assert len(said) == 9 - most


def test_what_is_no_want_of_memory_and_plain_steps_that_lack_it_are_told(target, monkeypatch):
    no_room_for(monkeypatch, 5, lambda: RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        texts(Engine(target, Recall(8), "match"))
    monkeypatch.undo()
    no_room_for(monkeypatch, 0, FULL["python"])
    with pytest.raises(MemoryError, match="no room for states"):
        texts(Engine(target, Recall(8), "match"))


def test_what_steps_cost_is_measured_without_trees_that_do_not_fit(target, monkeypatch):
    no_room_for(monkeypatch, 4, FULL["python"])
    engine = Engine(target, Recall(8))
    costs = measure.whole(MEASURED(engine, 1))
    assert engine.room.most == 4
    assert all(max(curve.at) <= 4 for curve in costs.times[1].values())


def test_states_of_some_layers_alone_are_never_read_again(target, monkeypatch):
    """Where memory ends while settled tokens are applied no smaller tree makes it good."""
    engine = Engine(target, Recall(8), "match")
    calls = []

    def apply(self, state, log, first_B, count_B):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no room to settle")

    rule = type(next(iter(_logs(target).values())).recurrence)
    monkeypatch.setattr(rule, "apply", apply)
    monkeypatch.setattr(rule, "takes_due", lambda self, state: False)  # as a kernel does
    with pytest.raises(MemoryError, match="some layers only"):
        texts(engine)


def _logs(target):
    cache = target.open(1, 64)
    with torch.inference_mode():
        ingest(target, cache, torch.randint(3, VOCAB, (1, 8)), 8, settled_B=torch.tensor([8]))
    return cache.recurrent.logs


def test_smaller_shapes_keep_what_rows_ask_for():
    shapes = [DraftShape(n, 1 + n, n, is_chain=True) for n in (8, 4)]
    room = DraftRoom(shapes)
    assert room.fitting(shapes[0]) is shapes[0]
    assert room.lost(shapes[0], MemoryError())
    most = torch.tensor([3, 8])
    fitting = room.fitting(shapes[0]._replace(most_B=most, sizes=(3, 8)))
    assert fitting == shapes[1]._replace(most_B=most, sizes=(3, 4))
    assert room.lost(shapes[1], MemoryError())
    assert room.fitting(shapes[0]) == PLAIN
    assert not room.lost(PLAIN, MemoryError())
