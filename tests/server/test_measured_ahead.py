"""What steps cost is measured while nobody asks: a server answers before that."""

import threading
import time

import pytest

from outrider import Engine
from outrider.costs import Costs, Curve
from outrider.drafters import DraftModel
from outrider.engine.speculation_policy import measure
from outrider.models import budget
from outrider.server.engine_factory import _measurements
from outrider.server.engine_loop import EngineLoop, EngineRequest
from outrider.server.speculation_methods import COUPLED, MethodRouter
from outrider.testing import pair

MEASURED = measure.measured  # tests are given made-up costs: see conftest.py


class Failing:
    """A run that says of each request that it cannot be decoded."""

    done, errors = True, {}

    def submit(self, request):
        raise RuntimeError(request)


def adaptive():
    target, small = pair()
    return Engine(target, DraftModel(small, (1, 1)), None, "adaptive")


@pytest.fixture
def looks(monkeypatch):
    """Rows of each look that was made; a table has three."""
    seen = []

    def measured(engine, rows):
        for _ in range(2):
            seen.append(rows)
            yield
        seen.append(rows)
        return Costs({rows: {0: Curve.of({1: 10.0, 3: 12.0})}})

    monkeypatch.setattr(measure, "measured", measured)
    return seen


def test_one_row_is_measured_first_then_all_and_nothing_twice(looks):
    engine = adaptive()
    parts = _measurements(engine, 8)
    assert [next(parts) for _ in range(3)] == [False, False, True]
    assert (looks, sorted(engine.costs.times)) == ([1] * 3, [1])
    assert list(parts) == [False, False, True] * 2  # 4 rows are known before a look at 8
    assert (looks, sorted(engine.costs.times)) == ([1] * 3 + [4] * 3 + [8] * 3, [1, 4, 8])
    assert list(_measurements(engine, 8)) == []
    assert len(looks) == 9


def test_who_comes_while_one_row_is_measured_has_an_estimate_and_the_measurement_goes_on(looks):
    engine = adaptive()
    kept = []
    engine.kept = kept.append
    parts = _measurements(engine, 8)
    next(parts)
    engine.estimate_costs()
    estimated = engine.costs
    with budget.postponing():
        assert engine.priced(8) is estimated is not None
    engine.estimate_costs()
    assert (looks, kept) == ([1] * 4, [])  # once, and in no cache
    *_, known = parts
    assert (looks, known) == ([1] * 6 + [4] * 3 + [8] * 3, True)
    assert sorted(engine.costs.times) == [1, 4, 8]
    assert len(kept) == 3
    engine.estimate_costs()
    assert len(looks) == 12


def test_an_estimate_is_no_table_for_who_can_wait(looks):
    engine = adaptive()
    engine.estimate_costs()
    assert sorted(engine.priced(1).times) == [1]
    assert looks == [1] * 6


def test_a_request_that_comes_between_two_looks_goes_first():
    """It waited until all that there was to measure was measured."""
    began, goes_on, heard, opened = threading.Event(), threading.Event(), [], []
    told = []

    def ahead():
        for look in range(4):
            began.set()
            assert goes_on.wait(60)
            yield look == 2
            told.append((len(opened), len(heard)))

    def run(lane):
        opened.append(lane)
        return Failing()

    loop = EngineLoop(run, 1, heard.extend, ahead=ahead())
    loop.start()
    assert began.wait(60)
    loop.submit([EngineRequest("a", None)])
    goes_on.set()
    ends = time.monotonic() + 60
    while len(told) < 4:
        assert time.monotonic() < ends
        time.sleep(0.001)
    loop.submit([EngineRequest("a", None)])
    while len(heard) < 2:
        assert time.monotonic() < ends
        time.sleep(0.001)
    loop.close()
    loop.join(60)
    assert told == [(1, 1)] * 4  # its answer came behind the first look
    assert opened == ["a", "a"]  # the run is another one since more is known


def test_a_real_measurement_stops_behind_every_look(monkeypatch):
    took = []
    before = measure._on_cpu
    monkeypatch.setattr(measure, "_on_cpu", lambda *given: took.append(0) or before(*given))
    monkeypatch.setattr(measure, "measured", MEASURED)
    monkeypatch.setattr(measure, "CONTEXTS", (8, 16))
    engine, most = adaptive(), 0
    news = []
    for known in engine.pricing(2):
        most, took[:] = max(most, len(took)), []
        news.append(known)
        if len(news) == 1:  # a request comes, whose estimate is none
            engine.estimate_costs()
            took.clear()
    assert most == 1
    assert news.count(True) == 2  # a table of one row, and one of two
    assert not news[0]
    assert not news[1]
    assert sorted(engine.costs.times) == [1, 2]


def test_nothing_is_measured_where_that_is_postponed():
    engine = adaptive()
    with budget.postponing():
        assert engine.priced(8) is None
        assert engine.costs is None
    assert sorted(engine.priced(1).times) == [1]
    with budget.postponing():
        assert sorted(engine.priced(8).times) == [1]


def test_seeded_requests_are_planned_by_what_was_measured_since():
    lanes = MethodRouter(adaptive())
    assert lanes[COUPLED].costs is None
    measured = lanes["default"].priced(4)
    assert lanes[COUPLED].costs is measured is not None


def test_a_loop_works_ahead_until_somebody_asks_and_begins_anew_with_it():
    opened, heard = [], []
    begun, goes_on, over = threading.Event(), threading.Event(), threading.Event()

    def ahead():
        begun.set()
        goes_on.wait(60)
        yield True
        over.set()

    def run(lane):
        opened.append(lane)
        return Failing()

    loop = EngineLoop(run, 1, heard.extend, ahead=ahead())
    loop.submit([EngineRequest("a", None)])  # it is there first, and is answered first
    loop.start()
    assert begun.wait(60)
    assert (opened, len(heard)) == (["a"], 1)
    loop.submit([EngineRequest("a", None)])
    goes_on.set()
    assert over.wait(60)
    loop.close()
    loop.join(60)
    assert (opened, len(heard)) == (["a", "a"], 2)
