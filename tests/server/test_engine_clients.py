"""What a server asks of an engine is answered alike here and at the other end of a pipe."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest
from served import linked

from outrider import Request, SamplingParams, StopConditions
from outrider.server.engine_client import InProcessClient
from outrider.server.engine_factory import EngineConfig
from outrider.server.engine_loop import EngineRequest, EngineStoppedError, QueueFullError
from outrider.server.serving import running

ROOM = EngineConfig(max_num_seqs=2, max_model_len=512, max_queued_requests=1)


@pytest.fixture(params=["in this process", "over a pipe"])
def engine(request, shipped):
    if request.param == "over a pipe":
        client = linked(lambda: shipped, ROOM)
    else:
        client = InProcessClient(shipped, ROOM)
    yield client
    client.close()
    client.join(20)


def asked(count=200, **more):
    """A request of so many tokens."""
    stop = StopConditions(count)
    return EngineRequest("coupled", Request([5, 6], SamplingParams(0.8, seed=3), stop), **more)


class Outputs:
    """What has come, and a way to wait for it."""

    def __init__(self):
        self.came, self._more = [], threading.Condition()

    def __call__(self, output):
        with self._more:
            self.came.append(output)
            self._more.notify_all()

    def until(self, true, seconds=60):
        with self._more:
            assert self._more.wait_for(lambda: true(self.came), seconds)
        return self.came

    @property
    def tokens(self):
        return [token for one in self.came if one.block for token in one.block.token_ids]


def over(key):
    return lambda came: any(one.over and one.key == key for one in came)


def test_a_request_is_decoded_to_its_end_and_its_row_is_free(engine):
    told, request = Outputs(), asked(24)
    engine.start()
    engine.submit([request], told)
    last = told.until(over(request.key))[-1]
    assert len(told.tokens) == 24
    assert (last.error, last.block.finish_reason) == (None, "length")
    assert last.scheduled >= request.arrived
    assert all(one.key == request.key for one in told.came)
    assert engine.load == (0, 0, 2)


def test_the_texts_of_both_are_one(shipped):
    texts = []
    for make in (lambda: linked(lambda: shipped, ROOM), lambda: InProcessClient(shipped, ROOM)):
        told, request, client = Outputs(), asked(40), make()
        client.start()
        client.submit([request], told)
        told.until(over(request.key))
        texts.append(told.tokens)
        client.close()
        assert client.join(20)
    assert texts[0] == texts[1]


def test_a_full_queue_takes_all_of_a_request_s_texts_or_none(engine):
    told = Outputs()
    engine.start()
    engine.submit([asked(), asked()], told)
    with pytest.raises(QueueFullError):
        engine.submit([asked(), asked()], told)
    assert engine.load == (2, 0, 2)
    last = asked(4)
    engine.submit([last], told)
    assert engine.load == (2, 1, 2)
    with pytest.raises(QueueFullError):
        engine.submit([asked()], told)
    told.until(over(last.key))


def test_what_is_aborted_is_over_once_and_says_nothing_more(engine):
    told, first, second = Outputs(), asked(400), asked(4)
    engine.start()
    engine.submit([first], told)
    told.until(lambda came: any(one.block for one in came))
    for _ in range(2):
        engine.abort(first.key)
    ended = told.until(over(first.key))[-1]
    assert (ended.block, ended.error) == (None, None)
    count = len(told.came)
    engine.submit([second], told)
    told.until(over(second.key))
    assert {one.key for one in told.came[count:]} == {second.key}
    engine.abort(first.key)  # of nobody
    assert engine.load == (0, 0, 2)


def test_a_deadline_is_told_of_a_request_that_waits(engine):
    told, rows = Outputs(), [asked(400), asked(400)]
    late = asked(4, deadline=time.monotonic() - 1)
    engine.start()
    engine.submit(rows, told)
    engine.submit([late], told)
    told.until(over(late.key))
    (said,) = [one for one in told.came if one.key == late.key]
    assert isinstance(said.error, TimeoutError)
    assert engine.load == (2, 0, 2)


def test_a_request_that_cannot_be_decoded_leaves_the_engine_as_it_was(engine):
    told, wrong, right = Outputs(), asked(10_000), asked(4)
    engine.start()
    engine.submit([wrong], told)
    assert "capacity" in str(told.until(over(wrong.key))[-1].error)
    engine.submit([right], told)
    assert told.until(over(right.key))[-1].error is None
    assert engine.alive
    assert engine.fault is None


def test_who_waits_for_an_engine_that_is_closed_hears_it(engine):
    told, request = Outputs(), asked()
    engine.start()
    engine.submit([request], told)
    engine.close()
    assert engine.join(20)
    assert isinstance(told.until(over(request.key))[-1].error, EngineStoppedError)
    assert not engine.alive
    with pytest.raises(EngineStoppedError):
        engine.submit([], told)


def test_a_stream_that_is_closed_ends_what_it_asked_for(engine):
    async def use():
        counted = []
        async with running(engine, counted.extend):
            async with aclosing(engine.stream([asked(400), asked(8)])) as outputs:
                async for _ in outputs:
                    break
            while engine.load.running:
                await asyncio.sleep(0.01)
            whole = [one async for one in engine.stream([asked(8)])]
            assert whole[-1].over
            assert counted[-1] == whole[-1]
            late = [one async for one in engine.stream([asked(400, deadline=time.monotonic())])]
            assert isinstance(late[-1].error, TimeoutError)

    asyncio.run(use())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_is_told_to_all_and_nobody_asks_it_again(engine, monkeypatch):
    told, request = Outputs(), asked()
    engine.start()

    def broken(run):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("outrider.engine.engine_run.EngineRun.step", broken)
    engine.submit([request], told)
    told.until(over(request.key))
    assert engine.join(20)
    assert engine.fault is not None
    assert not engine.alive
    with pytest.raises(EngineStoppedError):
        engine.submit([asked()], told)
