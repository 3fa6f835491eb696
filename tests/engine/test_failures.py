"""A failure is one row's own: the others have the texts that they have alone."""

import pytest
import torch
from requests_alone import CAPACITY, MAX_NUM_SEQS, REQUESTS, alone, engine_of, refuses

from outrider import (
    ConfigurationError,
    Engine,
    NumericalError,
    SamplingParams,
    StopConditions,
)
from outrider.engine.engine_run import EngineRun
from outrider.engine.outputs import RequestStatus
from outrider.engine.request import Request
from outrider.models.cache import SlotCache
from outrider.types import Output
from tiny import DRAFTERS, PROMPTS, pair


class Fragile:
    """A processor that fails once its own text is long enough."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > self.most:
            raise ZeroDivisionError("too long")
        return scores


@pytest.mark.parametrize("name", ["root", "chain", "tree", "dynamic tree"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_processor_that_raises_fails_its_own_row(name, shared):
    engine = engine_of(name)
    fragile = Fragile(len(PROMPTS[1]) + 12)
    others = SamplingParams(0, processors=(fragile,)) if shared else SamplingParams(1.0, seed=3)
    requests = [
        Request(PROMPTS[0], SamplingParams(1.0, seed=1), StopConditions(30)),
        Request(PROMPTS[1], SamplingParams(0, processors=(fragile,)), StopConditions(30)),
        Request(PROMPTS[3], others, StopConditions(6)),
    ]
    run = EngineRun(engine, 3, CAPACITY)
    for request in requests:
        run.submit(request)
    texts, raised = [[], [], []], []
    while True:
        try:
            for block in run:
                texts[block.request_id] += block.token_ids
            break
        except ZeroDivisionError as error:
            raised.append(error)
    assert raised == [run.errors[1]]
    assert "request 1" in raised[0].__notes__[0]
    assert run.reasons == ["length", "error", "length"]
    assert run.phases[1] is RequestStatus.FAILED
    assert 0 < len(texts[1]) < 30
    for number in (0, 2):
        request = requests[number]
        expected = engine.run([request.prompt], request.sampling, request.limits)
        assert texts[number] == [token for block in expected for token in block.token_ids]
    with refuses(ConfigurationError, "request 1 is over already", "error"):
        run.end(1)


@pytest.mark.parametrize("name", ["root", "chain", "tree", "dynamic tree"])
def test_a_processor_that_raises_on_what_is_only_drafted_fails_nobody(name):
    """As one that has a line for each token of the answer, and none for those behind its end."""
    sampling = SamplingParams(0, processors=(Fragile(len(PROMPTS[1]) + 8),))
    limits = StopConditions(9)
    run = engine_of(name).run([PROMPTS[1]], sampling, limits)
    told = [token for block in run for token in block.token_ids]
    plain = engine_of("root").run([PROMPTS[1]], SamplingParams(0), limits)
    assert told == [token for block in plain for token in block.token_ids]
    assert run.reasons == ["length"]


class Full:
    """A target that finds no room for its second cache: that of the free rows."""

    def __init__(self, model):
        self.model, self.opened = model, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def open(self, *size):
        self.opened += 1
        if self.opened == 2:
            raise MemoryError("no room")
        return self.model.open(*size)


@pytest.mark.parametrize("name", ["root", "chain"])
def test_a_request_whose_seat_cannot_be_had_is_not_lost(name):
    target, small = pair()
    requests = REQUESTS[:2]
    run = EngineRun(Engine(Full(target), DRAFTERS[name](small)), MAX_NUM_SEQS, CAPACITY)
    for request in requests:
        run.submit(request)
    run.close()
    with pytest.raises(MemoryError, match="no room"):
        run.step()
    texts = [[], []]
    for block in run:  # tried again
        texts[block.request_id] += block.token_ids
    assert texts == [alone(name, number)[0] for number in range(2)]


@pytest.mark.parametrize("name", ["root", "chain", "tree"])
def test_rows_that_cannot_be_moved_stay_where_they_are(name, monkeypatch):
    run, take, failures = EngineRun(engine_of(name), MAX_NUM_SEQS, CAPACITY), SlotCache.take, []
    numbers = [1, 2, 4]
    for number in numbers:
        run.submit(REQUESTS[number])

    def full(cache, rows, *filled):
        if len(failures) < 2:
            failures.append(list(rows))
            raise MemoryError("no room")
        return take(cache, rows, *filled)

    monkeypatch.setattr(SlotCache, "take", full)
    texts = [[] for _ in numbers]
    while not run.done:
        try:
            for block in run.step():
                texts[block.request_id] += block.token_ids
        except MemoryError:
            assert len(run.batch.reason_B) == len(run._scheduler.rows)
    assert len(failures) == 2
    assert texts == [alone(name, number)[0] for number in numbers]


@pytest.mark.parametrize("name", ["root", "chain"])
def test_an_observer_that_raises_costs_no_tokens(name):
    calls = []

    def observe(*_):
        calls.append(None)
        if len(calls) == 2:
            raise ZeroDivisionError

    run = EngineRun(engine_of(name), MAX_NUM_SEQS, CAPACITY, observe=observe)
    for request in REQUESTS[:2]:
        run.submit(request)
    texts = [[], []]
    while not run.done:
        try:
            for block in run.step():
                texts[block.request_id] += block.token_ids
        except ZeroDivisionError:
            assert len(calls) == 2
    assert texts == [alone(name, number)[0] for number in range(2)]


class Poisoned:
    """A target whose logits, keys and values are NaN for rows that have read a certain token."""

    def __init__(self, model, token):
        self.model, self.token = model, token

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, cache, nodes, **how):
        output = self.model.forward(cache, nodes, **how)
        bad = (nodes.tokens_BQ == self.token).any(1)
        for row in bad.nonzero()[:, 0].tolist():
            for stack in cache.stacks:
                stack[:, row] = torch.nan
        logits = output.logits_BQV.masked_fill(bad[:, None, None], torch.nan)
        return Output(logits, output.hidden)


@pytest.mark.parametrize("name", ["root", "chain", "tree"])
def test_a_nan_fails_its_own_row_and_does_not_stay_in_its_seat(name):
    target, small = pair()
    engine = Engine(Poisoned(target, 31), DRAFTERS[name](small))
    sound = Engine(target, DRAFTERS[name](small))
    ban = {31: -torch.inf}
    run = EngineRun(engine, 2, CAPACITY)
    run.submit(Request(PROMPTS[0], SamplingParams(0, logit_bias=ban), StopConditions(30)))
    run.submit(Request([2, 31], SamplingParams(0), StopConditions(30)))
    run.submit(Request(PROMPTS[1], SamplingParams(1.0, seed=2, logit_bias=ban), StopConditions(30)))
    texts, failed = [[], [], []], []
    while not run.done:
        for block in run.step():
            texts[block.request_id] += block.token_ids
            failed += [block.request_id] if block.finish_reason == "error" else []
    assert failed == [1]
    assert isinstance(run.errors[1], NumericalError)
    assert "request 1" in str(run.errors[1])
    for number in (0, 2):
        request = run._requests.entries[number].request
        expected = sound.run([request.prompt], request.sampling, request.limits)
        assert texts[number] == [token for block in expected for token in block.token_ids]


@pytest.mark.parametrize("name", ["root", "chain", "tree"])
def test_a_nan_that_nobody_has_read_does_not_stay_in_its_seat(name):
    """The row was ended from outside while its last block was on its way, as on a card."""
    target, small = pair()
    ban = {31: -torch.inf}
    run = EngineRun(Engine(Poisoned(target, 31), DRAFTERS[name](small)), 2, CAPACITY, trace=True)
    run._outputs.lag = 1
    run.submit(Request(PROMPTS[0], SamplingParams(0, logit_bias=ban), StopConditions(30)))
    run.submit(Request([2] * 12 + [31], SamplingParams(0), StopConditions(30)))
    run.submit(Request([6], SamplingParams(0, logit_bias=ban), StopConditions(30)))
    texts = [[], [], []]
    assert run.step() == []  # not read yet
    run.end(1)
    while not run.done:
        for block in run.step():
            texts[block.request_id] += block.token_ids
    assert not run.errors
    sound = Engine(target, DRAFTERS[name](small))
    for number in (0, 2):
        request = run._requests.entries[number].request
        expected = sound.run([request.prompt], request.sampling, request.limits)
        assert texts[number] == [token for block in expected for token in block.token_ids]
