"""The loop's turns: who begins with whom."""

import time
from types import SimpleNamespace

import pytest

from outrider.server.loop import Event, Loop, Ticket


class Steps:
    """A run whose requests are over after one step; it notes how many stood side by side."""

    def __init__(self):
        self.errors, self.left, self.beside = {}, [], []

    @property
    def done(self):
        return not self.left

    def submit(self, request):
        self.left.append(request)
        return request

    def step(self):
        self.beside.append(len(self.left))
        blocks = [SimpleNamespace(row=row, finish_reason="length") for row in self.left]
        self.left = []
        return blocks

    def cached(self, number):
        return 0

    def forget(self, number):
        pass


@pytest.fixture
def steps():
    return Steps()


@pytest.fixture
def loop(steps):
    made = Loop(lambda lane: steps, 4, 4)
    made.start()
    yield made
    made.close()
    made.join(5)


def submitted(loop, number, told):
    loop.submit([Ticket("default", number, told.append)])


def over(told, count):
    ends = time.monotonic() + 5
    while len(told) < count and time.monotonic() < ends:
        time.sleep(0.001)
    assert [event.over for event in told] == [True] * count


def test_requests_that_come_together_begin_together(loop, steps):
    told: list[Event] = []
    with loop.coming(), loop.coming():
        submitted(loop, 1, told)
        submitted(loop, 2, told)
    over(told, 2)
    assert steps.beside == [2]


def test_nobody_waits_long_for_one_that_does_not_come(loop, steps):
    told: list[Event] = []
    with loop.coming():
        submitted(loop, 1, told)
        over(told, 1)
    assert steps.beside == [1]
