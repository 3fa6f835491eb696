"""Where requests of a run stand, what ends them, and what a run refuses."""

import pytest
import torch
from requests_alone import CAPACITY, LONG, engine_of, refuses

from outrider import (
    CapacityError,
    ConfigurationError,
    PromptError,
    SamplingParams,
    StopConditions,
)
from outrider.engine import scheduler
from outrider.engine.engine_run import EngineRun
from outrider.engine.outputs import NEXT, RequestStatus
from outrider.engine.request import Request
from outrider.types import Inputs
from tiny import PROMPTS, VOCAB


def test_requests_wait_for_a_seat_in_order():
    run = EngineRun(engine_of("chain"), 2, CAPACITY)
    numbers = [run.submit(Request([n + 1], SamplingParams(0), StopConditions(6))) for n in range(6)]
    assert run.phases == [RequestStatus.WAITING] * 6
    run.step()
    assert run.phases == [RequestStatus.RUNNING] * 2 + [RequestStatus.WAITING] * 4
    order = []
    for block in run:
        if block.request_id not in order:
            order.append(block.request_id)
    assert order == numbers
    assert run.phases == [RequestStatus.ENDED] * 6
    assert list(run) == []
    assert (
        run.submit(Request([9], SamplingParams(0), StopConditions(2))) == 6
    )  # an idle run takes more
    assert sum(len(block.token_ids) for block in run) == 2


def test_a_request_can_be_cancelled_in_every_phase(monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 16)
    run = EngineRun(engine_of("chain"), 2, CAPACITY)
    first = run.submit(Request(PROMPTS[0], SamplingParams(0), StopConditions(30)))
    run.step()
    reading = run.submit(Request(LONG, SamplingParams(0), StopConditions(5)))
    waiting = run.submit(Request([5], SamplingParams(0), StopConditions(5)))
    gone = run.submit(Request([6], SamplingParams(0), StopConditions(5)))
    run.end(gone)
    run.step()
    assert run.phases[reading] is RequestStatus.PREFILLING
    run.end(reading)
    assert [block.request_id for block in run.step()] == [first, waiting]
    assert run.phases[waiting] is RequestStatus.RUNNING
    run.end(first, "stop")
    texts = list(run)
    assert {block.request_id for block in texts} == {waiting}
    assert run.reasons == ["stop", "cancelled", "length", "cancelled"]
    cancelled = RequestStatus.CANCELLED
    assert run.phases == [RequestStatus.ENDED, cancelled, RequestStatus.ENDED, cancelled]
    assert run.requests[reading].new_tokens == 0


@pytest.mark.parametrize(("most", "phase"), [(1024, "RUNNING"), (24, "PREFILLING")])
def test_the_more_wait_the_more_is_read_between_two_steps(monkeypatch, most, phase):
    monkeypatch.setattr(scheduler, "CHUNK", 16)
    monkeypatch.setattr(scheduler, "MOST_TOKENS", most)
    run = EngineRun(engine_of("chain"), 4, CAPACITY)
    run.submit(Request(PROMPTS[0], SamplingParams(0), StopConditions(30)))
    run.step()
    for length in (17, 16, 17):  # of each all but the last token are read ahead
        run.submit(Request(LONG[:length], SamplingParams(0), StopConditions(5)))
    run.step()
    assert run.phases == [RequestStatus.RUNNING] + [RequestStatus[phase]] * 3


def test_only_what_may_follow_follows():
    assert set(NEXT) == set(RequestStatus)
    assert not NEXT[RequestStatus.FAILED]
    assert not NEXT[RequestStatus.CANCELLED]
    entry = EngineRun(engine_of("root"), 1, CAPACITY)
    entry.submit(Request([1], SamplingParams(0), StopConditions(1)))
    with pytest.raises(AssertionError, match="WAITING -> FAILED"):
        entry._requests.entries[0].move(RequestStatus.FAILED, "error")


def test_what_a_run_refuses():
    engine = engine_of("chain")
    run = EngineRun(engine, 1, 64)
    good = Request(PROMPTS[0], SamplingParams(0), StopConditions(8))
    with refuses(CapacityError, "prompt 0", "6 tokens", "budget 60", "capacity=64"):
        run.submit(Request(PROMPTS[0], SamplingParams(0), StopConditions(60)))
    for prompt, part in (([], "no tokens"), ([VOCAB], "vocabulary"), ([1] * 256, "context")):
        with refuses(PromptError, "prompt 0", part):
            run.submit(Request(prompt, SamplingParams(0), StopConditions(8)))
    with refuses(ConfigurationError, "logit_bias names token 99"):
        run.submit(Request([1], SamplingParams(0, logit_bias={99: 1.0}), StopConditions(8)))
    with refuses(PromptError, "token ids"):
        Request("text")
    with refuses(ConfigurationError, "sampling must be a Sampling"):
        Request([1], 0.5)
    assert run.submit(good) == 0  # what was refused left no trace
    for number in (1, -1, "0"):
        with refuses(ConfigurationError, "no request", "submit returned"):
            run.end(number)
    run.step()
    with refuses(ConfigurationError, "keep must be", "at most"):
        run.end(0, "stop", keep=100)
    run.end(0)
    with refuses(ConfigurationError, "request 0 is over already", "cancelled", "end it once"):
        run.end(0)
    run.close()
    with refuses(ConfigurationError, "this run is closed", "another run"):
        run.submit(good)
    with refuses(ConfigurationError, "max_num_seqs", "at least 1"):
        EngineRun(engine, 0)


def test_what_is_kept_is_what_counts():
    run = EngineRun(engine_of("chain"), 2, CAPACITY)
    numbers = [run.submit(Request(p, SamplingParams(0), StopConditions(30))) for p in PROMPTS[:2]]
    told = sum(len(block.token_ids) for block in run.step() if block.request_id == numbers[0])
    run.end(numbers[0], "stop", keep=told - 1)
    list(run)
    assert run.requests[0].new_tokens == told - 1
    assert run.stats.new_tokens == told - 1 + 30
    assert run.reasons == ["stop", "length"]


def test_inputs_for_a_model_of_text_alone_are_refused():
    run = EngineRun(engine_of("root"), 1, CAPACITY)
    inputs = Inputs(torch.tensor([[1, 2]]), None, torch.ones(1, 2, dtype=torch.bool))
    with refuses(ConfigurationError, "reads text alone", "request 0 with inputs", "leave out"):
        run.submit(Request([1], SamplingParams(0), StopConditions(4), inputs))
