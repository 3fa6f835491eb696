"""What a run says that its tests cost, for seconds that are known."""

import collections

import costs


def test_folders_and_tests_are_summed_over_their_cases(monkeypatch):
    monkeypatch.setattr(costs, "_by_test", collections.Counter())
    for test, seconds in (
        ("tests/models/test_a.py::test_one[x]", 2.0),
        ("tests/models/test_a.py::test_one[y]", 1.5),
        ("tests/engine/test_b.py::test_two", 3.0),
        ("tests/test_c.py::test_three", 0.5),
    ):
        costs.add(test, seconds)
    total, folders, dearest = costs.told(dearest=2).splitlines()
    assert total == "processor seconds of tests: 7"
    assert folders == "models 4, engine 3, test_c.py 0"
    assert dearest == "dearest: models/test_a.py::test_one 3.5, engine/test_b.py::test_two 3.0"
