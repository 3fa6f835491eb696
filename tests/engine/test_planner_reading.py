"""A draft model that has to read a prompt first: requests find out together whether it pays.

The prices are those of Qwen2.5-Coder 1.5B with its 0.5B on one core: reading a prompt of HumanEval
takes as long as twelve plain steps.
"""

import random

import pytest

from outrider import SamplingParams, StopConditions
from outrider.costs import Costs
from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.engine.speculation_policy import Adaptive, BatchView, PlannedRow, StepReport
from outrider.types import PLAIN, DraftShape

READING = 5.0
PAIR = Costs(Costs.of({1: 64.0, 2: 105.0, 3: 150.0, 6: 270.0}).times, {1: READING})
CHAIN = [*(DraftShape(depth, depth + 1, depth, True) for depth in (5, 4, 3, 2, 1)), PLAIN]


class Requests:
    """Requests of one engine, one after another, simulated: their times beside plain decoding's."""

    def __init__(self, chance, temperature=0.0):
        self.planner, self.draws = Adaptive(), random.Random(5)
        self.chance, self.temperature = chance, temperature

    def kept(self, depth):
        return next((at for at in range(depth) if self.draws.random() > self.chance), depth)

    def one(self, prompt, budget, end=None):
        """Tokens drafted, and how many times plain decoding's speed it had.

        `end` is where its text stops, if not at its budget.
        """
        end, state = end or budget, self.planner.open(CHAIN, PAIR)
        limits = StopConditions(budget)
        request = Request([1] * prompt, SamplingParams(self.temperature, seed=1), limits)
        wrote, unread, took, drafted, tokens = 1, prompt, 0.0, 0, [1]
        while wrote < end:
            rows = [PlannedRow(0, request, prompt + wrote)]
            shape = self.planner.plan(
                state, BatchView(rows, ignores_drafts=not self.temperature, unread=unread)
            )
            depth = shape.max_depth
            got = min(self.kept(depth), end - wrote - 1)
            took += PAIR.milliseconds(depth + 1)
            took += READING * unread if depth else 0.0
            unread = 0 if depth else unread + 1
            wrote, drafted = wrote + got + 1, drafted + depth
            tokens = [5] * (got + 1)
            reason = "length" if wrote >= end else None
            block = StepOutput(0, tokens, got, reason, depth)
            self.planner.learn(state, StepReport([block], depth + 1, depth, 0.0))
        return drafted, (end - 1) * PAIR.milliseconds(1) / took


@pytest.mark.parametrize("budget", [512, 1024])
def test_requests_find_out_together_that_a_draft_pays(budget):
    requests = Requests(0.97)
    found = [requests.one(160, budget) for _ in range(12)]
    assert found[0][0] == 0  # nothing is known, and nothing was earned yet
    assert all(drafted > budget / 2 for drafted, _ in found[4:])
    assert min(speed for _, speed in found) > 0.97
    assert min(speed for _, speed in found[5:]) > 1.08


def test_what_long_requests_found_out_holds_for_short_ones():
    requests = Requests(0.97)
    assert requests.one(160, 192)[0] == 0  # it would lose more than a look may
    for _ in range(6):
        requests.one(160, 512)
    drafted, speed = requests.one(160, 192)
    assert drafted > 100
    assert speed > 1.03


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.85])
@pytest.mark.parametrize("budget", [192, 512])
def test_no_request_pays_much_for_a_draft_that_does_not_pay(chance, budget):
    requests = Requests(chance)
    found = [requests.one(160, budget) for _ in range(40)]
    assert min(speed for _, speed in found) > 0.97
    assert sum(1 / speed for _, speed in found) / 40 < 1.01


@pytest.mark.parametrize("chance", [0.0, 0.6, 0.97])
def test_texts_far_shorter_than_their_budgets_pay_for_nothing(chance):
    requests = Requests(chance)
    found = [requests.one(160, 1024, 40 + 10 * (number % 3)) for number in range(60)]
    assert min(speed for _, speed in found) > 0.97


def test_a_text_that_ends_early_among_long_ones_is_the_only_one_that_pays():
    """A draft that pays is read for at once where requests are long."""
    requests = Requests(0.97)
    for _ in range(8):
        requests.one(160, 1024, 512)
    assert requests.one(160, 1024, 40)[1] < 1
    assert min(requests.one(160, 1024, 512)[1] for _ in range(4)) > 1.08


def test_short_requests_alone_are_never_looked_at():
    requests = Requests(0.97)
    assert [requests.one(160, 64)[0] for _ in range(60)] == [0] * 60


def test_sampled_texts_depend_on_no_other_request():
    alone, later = Requests(0.97, 0.8), Requests(0.97, 0.8)
    for _ in range(6):
        later.one(160, 512)
    later.draws = random.Random(5)
    assert later.one(40, 512) == alone.one(40, 512)
