"""What a start may spend on measuring, and what it estimates when that is gone."""

import time

import pytest
import torch

from outrider import Engine
from outrider.drafters import DraftModel
from outrider.engine.speculation_policy import measure
from outrider.models import budget, calibrate
from outrider.models.budget import Budget
from outrider.models.calibrate import Setting
from tiny import pair

MEASURED = measure.measured  # tests are given made-up costs: see conftest.py


class Clock:
    """Processor seconds that pass when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "process_time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_what_is_measured_counts_and_what_lies_between_does_not(clock):
    allowed = Budget(5.0)
    clock.now = 100.0
    with allowed.measuring("one"):
        clock.now += 2.0
        with allowed.measuring("a part of it"):
            clock.now += 1.0
        with allowed.apart():
            clock.now += 50.0
        assert allowed.left == pytest.approx(2.0)
    clock.now += 100.0
    assert allowed.spent == pytest.approx(3.0)
    with allowed.measuring("two"), allowed.part(0.5):
        assert allowed.left == pytest.approx(1.0)
        clock.now += 1.0
        assert allowed.over()
    assert not allowed.over()
    assert not Budget().limited


def test_nothing_is_left_of_a_budget_that_was_closed():
    allowed = Budget(5.0)
    allowed.close()
    allowed.allow(135_000_000)
    assert allowed.over()
    assert allowed.limited


@pytest.mark.parametrize(
    ("parameters", "loading", "seconds"),
    [(135_000_000, 1.0, 5.0), (7_000_000_000, 30.0, 2.0), (7_000_000_000, 400.0, 8.0)],
)
def test_large_models_may_take_a_share_of_the_time_that_they_load(
    clock, parameters, loading, seconds
):
    allowed = Budget(budget.SECONDS)
    clock.now += loading
    allowed.allow(parameters)
    assert allowed.seconds == pytest.approx(seconds)


def test_long_measurements_say_what_they_do_and_short_ones_do_not(monkeypatch):
    said = []
    with budget.reporting(said.append), Budget().measuring("nothing"):
        pass
    assert not said
    monkeypatch.setattr(budget, "TELLS", 0.0)
    with budget.reporting(said.append), Budget().measuring("what steps cost"):
        while not said:
            time.sleep(0.001)
    assert said == ["measuring this machine once: what steps cost"]


def test_a_measurement_in_pieces_is_told_of_when_they_have_taken_long(clock):
    said, allowed = [], Budget()
    with budget.reporting(said.append):
        for _ in range(7):
            with allowed.looking("what steps cost"), allowed.looking("a part of it"):
                clock.now += 0.4
            said.append(allowed.spent)
    line = "measuring this machine once: what steps cost"
    assert [one if one == line else round(one, 1) for one in said] == [
        *(0.4, 0.8, 1.2, 1.6),
        *(line, 2.0, 2.4, 2.8),
    ]


def test_settings_without_time_are_estimated_by_the_bytes_of_their_weights(clock, monkeypatch):
    def cost(model, widths, repeats):
        clock.now += 2.0
        return dict.fromkeys(widths, 10.0)

    built = []
    monkeypatch.setattr(calibrate, "cost", cost)
    allowed = Budget(5.0)
    with budget.under(allowed):
        found = calibrate.choose(
            lambda setting: (built.append(setting.dtype), None),
            threads=[1, 2],
            dtypes=["bfloat16", "float32"],
            packings=[True],
            num_speculative_tokens=3,
        )
    assert found.setting == Setting(1, "bfloat16", True)
    assert built == ["bfloat16"]
    scores = {(note["dtype"], note["threads"]): note["score_ms"] for note in found.candidates}
    assert scores == {(d, t): ms for d, ms in (("bfloat16", 20), ("float32", 40)) for t in (1, 2)}


def test_without_any_time_the_first_setting_is_taken_and_nothing_is_built():
    """A start whose kernels are late would measure, and read weights twice, for itself alone."""

    def build(setting):
        raise AssertionError(f"built {setting}")

    with budget.under(Budget(0.0)):
        found = calibrate.choose(
            build, threads=[1], dtypes=["float32"], packings=[True, False], num_speculative_tokens=3
        )
    assert found.setting == Setting(1, "float32", True)
    assert found.candidates == []


def test_a_table_under_a_budget_that_is_over_has_one_three_and_six_nodes():
    target, small = pair()
    engine = Engine(target, DraftModel(small, (1,) * 12), None, "adaptive")
    with budget.under(Budget(0.0)):
        costs = measure.whole(MEASURED(engine, 1))
    ((context, curve),) = costs.times[1].items()
    assert (context, curve.at) == (measure.CONTEXTS[0], (1, 3, 6, 13))
    assert min(curve.times) > 0
    assert curve.times[-1] == pytest.approx(curve.times[-2] * 13 / 6)  # never taken for free


def test_rows_are_measured_as_far_as_the_budget_goes(clock, monkeypatch):
    def measured(engine, rows):
        yield
        clock.now += 3.0
        return calibrate.Costs({rows: {0: calibrate.Costs.of({1: 10.0}).times[1][0]}})

    monkeypatch.setattr(measure, "measured", measured)
    target, small = pair()
    engine = Engine(target, DraftModel(small, (1, 1)), None, "adaptive")
    assert engine.budget.seconds == budget.SECONDS
    assert sorted(engine.priced(8).times) == [1, 4]
    assert sorted(engine.priced(8).times) == [1, 4]  # the rest is estimated from these


def test_costs_end_with_the_budget_behind_one_look():
    target, _ = pair()
    looks, forward = [], target.forward

    def look(*args, **kwargs):
        looks.append(1)
        return forward(*args, **kwargs)

    target.forward = look
    try:
        with budget.under(Budget(0.0)):
            found = calibrate.cost(target, (1, 3, 6), repeats=6)
    finally:
        del target.forward
    assert sorted(found) == [1, 3, 6]
    assert len(looks) == 1 + 3  # what is committed, and one of each
    assert torch.get_num_threads() == 1


def test_without_a_terminal_a_measurement_is_told_of_once_a_process(caplog):
    """Several engines of one process measure what their steps cost."""
    budget._line.cache_clear()
    for what in ("what steps cost", "what steps cost", "threads"):
        budget._line(what)
    assert [record.message for record in caplog.records] == ["what steps cost", "threads"]
    budget._line.cache_clear()
