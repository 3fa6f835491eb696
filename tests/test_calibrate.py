"""Measurements are remembered, and a file that cannot be read is no error."""

import json

import pytest

from outrider.models import calibrate
from outrider.models.calibrate import Calibration, Setting, recall, remember
from tiny import pair


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider"


FOUND = Calibration(Setting(2, "float32", True), {"target": {1: 3.5, 5: 4.25}}, [{"score_ms": 1.0}])


def test_what_is_remembered_is_recalled(home):
    assert recall("abc") is None
    remember("abc", FOUND)
    again = recall("abc")
    assert again.cached
    assert (again.setting, again.curves, again.candidates) == (
        FOUND.setting,
        FOUND.curves,
        FOUND.candidates,
    )
    assert recall("abd") is None
    assert [path.name for path in home.iterdir()] == ["calibration-abc.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b'{"setting": 1, "curves": {}, "candidates": []}',
        b'{"setting": {"threads": 1}, "curves": {}, "candidates": []}',
        b'{"setting": {"threads": 1, "dtype": "a", "packed": true}, "curves": 3, "candidates": []}',
        b'{"setting": {"threads": 1, "dtype": "a", "packed": true},'
        b' "curves": {"target": 3}, "candidates": []}',
        b'{"setting": {"threads": 1, "dtype": "a", "packed": true},'
        b' "curves": {"target": {"x": 3}}, "candidates": []}',
    ],
)
def test_a_corrupt_file_is_measured_again(home, content):
    home.mkdir()
    (home / "calibration-abc.json").write_bytes(content)
    assert recall("abc") is None
    remember("abc", FOUND)
    assert recall("abc").setting == FOUND.setting


def test_a_home_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    remember("abc", FOUND)
    assert recall("abc") is None


def test_the_key_tells_models_apart():
    class Config:
        def __init__(self, text):
            self.to_json_string = lambda: text

    keys = [calibrate.key(Config("a"), Config("b")), calibrate.key(Config("b"), Config("a"))]
    keys += [calibrate.key(Config("a")), calibrate.key(Config("a"), None)]
    assert keys[2] == keys[3]
    assert len(set(keys)) == 3


def test_every_combination_is_timed_and_the_cheapest_taken(monkeypatch):
    import torch

    before = torch.get_num_threads()
    costs = {("float32", True): 1.0, ("float32", False): 2.0, ("bfloat16", True): 1.5}

    def build(setting):
        return (setting.dtype, setting.packed), None

    def cost(model, widths=(1, 2), repeats=5):
        return {n: costs[model] * n / torch.get_num_threads() for n in widths}

    monkeypatch.setattr(calibrate, "cost", cost)
    costs[("bfloat16", False)] = 9.0
    found = calibrate.choose(
        build,
        threads=[1, 2],
        dtypes=["bfloat16", "float32"],
        packings=[True, False],
        num_speculative_tokens=3,
    )
    assert found.setting == Setting(2, "float32", True)
    assert len(found.candidates) == 8
    assert found.curves == {"target": {1: 0.5, 2: 1.0}}
    assert json.dumps(found.candidates)
    assert torch.get_num_threads() == before


def test_a_slow_second_does_not_choose(monkeypatch):
    """The best combination is timed while the machine is busy; it is looked at again."""
    costs, busy = {"float32": 1.5, "bfloat16": 1.0, "float16": 9.0}, {"bfloat16": 1.8}
    timed = []

    def cost(model, widths=(1, 2), repeats=5):
        timed.append(model)
        slow = busy.get(model, 1.0) if timed.count(model) == 1 else 1.0
        return dict.fromkeys(widths, costs[model] * slow)

    monkeypatch.setattr(calibrate, "cost", cost)
    found = calibrate.choose(
        lambda setting: (setting.dtype, None),
        threads=[1],
        dtypes=["bfloat16", "float32", "float16"],
        packings=[False],
        num_speculative_tokens=3,
    )
    assert found.setting.dtype == "bfloat16"
    assert [note["dtype"] for note in found.candidates] == ["bfloat16", "float32", "float16"]
    assert timed.count("float16") == 1  # far from the best: not timed again


def test_costs_are_positive():
    target, _ = pair()
    curve = calibrate.cost(target, (1, 4), repeats=1)
    assert set(curve) == {1, 4}
    assert min(curve.values()) > 0


def test_a_calibration_is_not_recalled_where_idle_threads_wait_differently(monkeypatch):
    class Config:
        def to_json_string(self):
            return "{}"

    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    asleep = calibrate.key(Config())
    assert calibrate.key(Config()) == asleep
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert calibrate.key(Config()) != asleep


def test_costs_are_read_between_and_beyond_the_widths():
    costs = Calibration(FOUND.setting, {"target": {1: 3.0, 5: 4.0, 9: 8.0}}).costs
    read = costs.target.milliseconds
    assert costs.draft is None
    assert [read(n) for n in (0, 1, 3, 5, 6, 9, 11)] == [3.0, 3.0, 3.5, 4.0, 5.0, 8.0, 10.0]
    both = Calibration(FOUND.setting, {"target": {1: 3.0}, "draft": {4: 2.0, 1: 1.0}}).costs
    assert both.target.milliseconds(7) == 3.0
    assert both.draft.milliseconds(2) == pytest.approx(4 / 3)
