"""What steps cost is measured while nobody asks: a server answers before that."""

import threading

from outrider import Engine
from outrider.costs import Costs, Curve
from outrider.drafters import DraftModel
from outrider.engine.speculation_policy import measure
from outrider.models import budget
from outrider.server.engine_factory import _measurements
from outrider.server.engine_loop import EngineLoop, EngineRequest
from outrider.server.speculation_methods import COUPLED, MethodRouter
from outrider.testing import pair


class Failing:
    """A run that says of each request that it cannot be decoded."""

    done, errors = True, {}

    def submit(self, request):
        raise RuntimeError(request)


def adaptive():
    target, small = pair()
    return Engine(target, DraftModel(small, (1, 1)), None, "adaptive")


def test_one_row_is_measured_first_then_all_and_nothing_twice(monkeypatch):
    seen = []

    def measured(engine, rows):
        seen.append(rows)
        return Costs({rows: {0: Curve.of({1: 10.0, 3: 12.0})}})

    monkeypatch.setattr(measure, "measured", measured)
    engine = adaptive()
    parts = _measurements(engine, 8)
    next(parts)
    assert seen == [1]
    assert list(parts) == [None]
    assert seen == [1, 4, 8]
    assert list(_measurements(engine, 8)) == []
    assert seen == [1, 4, 8]


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
        yield
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
