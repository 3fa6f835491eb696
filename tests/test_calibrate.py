"""Measurements are remembered, and a file that cannot be read is no error."""

import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from outrider import Engine
from outrider.costs import Costs, Curve
from outrider.drafters import DraftModel
from outrider.engine.engine_run import EngineRun
from outrider.engine.speculation_policy import measure
from outrider.errors import ConfigurationError
from outrider.models import budget, calibrate
from outrider.models.calibrate import Calibration, Setting, recall, remember
from outrider.models.cpu_kernels import build
from outrider.models.runtime_config import RuntimeOptions, resolve_runtime
from tiny import pair


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "identity", lambda: "the same")  # nothing is compiled for a key
    return tmp_path / "outrider"


NOTE = {"threads": 2, "dtype": "float32", "packed": True, "draft_dtype": None, "score_ms": 1.0}
FOUND = Calibration(Setting(2, "float32", True), [NOTE])
COSTS = Costs({1: {64: Curve.of({1: 6.0, 5: 8.0}), 448: Curve.of({1: 7.0, 5: 9.5})}})


def test_what_is_remembered_is_recalled(home):
    assert recall("abc") is None
    remember("abc", FOUND)
    again = recall("abc")
    assert again.cached
    assert (again.setting, again.candidates) == (FOUND.setting, FOUND.candidates)
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
        b'{"setting": 1, "candidates": []}',
        b'{"setting": {"threads": 1}, "candidates": []}',
        b'{"setting": {"threads": 1, "dtype": "a", "packed": true}, "candidates": 3}',
        b'{"setting": {"threads": 1, "dtype": "a", "packed": true}, "candidates": [{"a": 1}]}',
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
    monkeypatch.setattr(calibrate, "homeless", lambda: tmp_path / "temporary")
    remember("abc", FOUND)
    assert recall("abc") == replace(FOUND, cached=True, starts=2)
    monkeypatch.setattr(calibrate, "homeless", lambda: blocked)
    remember("abc", FOUND)
    assert recall("abc") is None


@pytest.fixture
def homeless(tmp_path, monkeypatch):
    """A user whom the system does not know, and a folder for temporary files."""

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(calibrate.Path, "home", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    calibrate.homeless.cache_clear()
    yield tmp_path / f"outrider-{os.getuid()}"
    calibrate.homeless.cache_clear()


def test_without_a_home_a_folder_of_the_users_own_is_used(homeless):
    remember("abc", FOUND)
    assert recall("abc").setting == FOUND.setting
    assert calibrate.cache_dir() == homeless
    assert homeless.stat().st_mode & 0o777 == 0o700


def test_a_home_that_cannot_be_made_is_none(homeless, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(calibrate.Path, "home", lambda: tmp_path / "file")
    assert calibrate.cache_dir() == homeless
    monkeypatch.setattr(calibrate.Path, "home", lambda: tmp_path)
    assert calibrate.cache_dir() == tmp_path / ".cache" / "outrider"


@pytest.mark.parametrize("whose", ["another's", "open to all", "a link", "a file"])
def test_a_folder_that_may_be_anothers_is_left_alone(homeless, monkeypatch, tmp_path, whose):
    if whose == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        homeless.symlink_to(tmp_path / "elsewhere")
    elif whose == "a file":
        homeless.write_text("")
    else:
        homeless.mkdir(mode=0o700)
        homeless.chmod(0o777 if whose == "open to all" else 0o700)
    if whose == "another's":
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        homeless.rename(tmp_path / f"outrider-{user + 1}")
    found = calibrate.cache_dir()
    assert found.parent == tmp_path
    assert found != tmp_path / f"outrider-{os.getuid()}"
    assert found.stat().st_mode & 0o777 == 0o700
    remember("abc", FOUND)
    assert recall("abc").setting == FOUND.setting


def test_without_any_place_nothing_is_kept(homeless, monkeypatch):
    def none(**_):
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(tempfile, "mkdtemp", none)
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


@pytest.mark.parametrize("name", calibrate.KERNELS)
def test_the_key_tells_kernels_and_cores_apart(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {1, 3}, raising=False)
    usual = calibrate.key()
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {3}, raising=False)
    pinned = calibrate.key()
    monkeypatch.setenv(name, "AVX2")
    assert len({usual, pinned, calibrate.key()}) == 3


def test_threads_are_tried_on_cores_that_the_process_may_use(monkeypatch):
    tried = []

    def choose(build, *, threads, **_):
        tried.append(threads)
        return FOUND

    monkeypatch.setattr(calibrate, "choose", choose)
    for some in ({3}, {1, 3}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda who, some=some: some, raising=False)
        resolve_runtime(RuntimeOptions(), TARGET, (), None, torch.device("cpu"), 4)
    assert tried == [[1], [1, 2]]


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, sys.maxsize),
        ({"cpu.max": "max 100000"}, sys.maxsize),
        ({"cpu.max": "150000 100000"}, 2),  # a container's own
        ({"cpu.max": "50000 100000"}, 1),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4),  # of a service's slice
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, sys.maxsize),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_a_container_has_the_cores_whose_time_it_may_use(tmp_path, monkeypatch, limits, most):
    for name, said in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(said + "\n")
    told = tmp_path / "cgroup"
    told.write_text("1:cpu:/\n0::/a/b\n")
    assert calibrate._quota(tmp_path, told) == most
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(range(64)), raising=False)
    monkeypatch.setattr(calibrate, "_quota", lambda: most)
    assert calibrate.cores() == min(most, 64)


def test_a_relative_cache_folder_is_left_alone(tmp_path, monkeypatch):
    """A compiler works in another folder, and commands may be called in any."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("cache", "~/cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert calibrate.cache_dir() == tmp_path / ".cache" / "outrider"


def test_every_combination_is_timed_and_the_cheapest_taken(monkeypatch):
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
    assert json.dumps(found.candidates)
    assert torch.get_num_threads() == before


def test_a_slow_second_does_not_choose(monkeypatch):
    """The best combination is timed while the machine is busy; it is looked at again."""
    costs, busy = {"float32": 1.5, "bfloat16": 1.0, "float16": 9.0}, {"bfloat16": 1.8}
    timed, built = [], []

    def build(setting):
        built.append(setting.dtype)
        return setting.dtype, None

    def cost(model, widths=(1, 2), repeats=5):
        timed.append(model)
        slow = busy.get(model, 1.0) if timed.count(model) == 1 else 1.0
        return dict.fromkeys(widths, costs[model] * slow)

    monkeypatch.setattr(calibrate, "cost", cost)
    found = calibrate.choose(
        build,
        threads=[1],
        dtypes=["bfloat16", "float32", "float16"],
        packings=[False],
        num_speculative_tokens=3,
    )
    assert found.setting.dtype == "bfloat16"
    assert [note["dtype"] for note in found.candidates] == ["bfloat16", "float32", "float16"]
    assert timed.count("float16") == 1  # far from the best: not timed again
    again = ["float32", "bfloat16", "float32"]  # the second of a pass begins the next one
    assert (timed[3:], built[3:]) == ([*again[:2], "bfloat16", "float32"], again)


#: A target of which nothing is loaded.
TARGET = SimpleNamespace(
    config=None,
    group=None,
    in_blocks=False,
    stored_types="",
    loaded_dtype=lambda: "float32",
    keeps=lambda *_: False,
)


class Machine:
    """One that takes so many milliseconds with one thread and two, and what others run on it."""

    def __init__(self, monkeypatch):
        self.takes, self.busy, self.timed = {1: 4.9, 2: 3.6}, 0.0, []
        self.clock = self.others = 0.0

        def cost(model, widths=(1, 2), repeats=5):
            count = torch.get_num_threads()
            self.timed.append((model, count))
            self.clock += 1.0
            self.others += self.busy
            return dict.fromkeys(widths, self.takes[count])

        monkeypatch.setattr(calibrate, "cost", cost)
        monkeypatch.setattr(calibrate, "cores", lambda: 2)
        monkeypatch.setattr(calibrate, "others", lambda: self.others)
        monkeypatch.setattr(calibrate.time, "perf_counter", lambda: self.clock)

    def start(self):
        """How many threads a start runs with, and how often it timed a model for that."""
        self.timed.clear()
        wish = RuntimeOptions(dtype="float32", pack_weights=False)
        setting, _ = resolve_runtime(wish, TARGET, (), self.build, torch.device("cpu"), 3)
        return setting.threads, len(self.timed)

    @staticmethod
    def build(setting):
        return setting.dtype, None

    @staticmethod
    def kept(home):
        """What is in the cache folder."""
        (path,) = home.glob("calibration-*.json")
        return path.stem.removeprefix("calibration-")


def test_what_was_measured_in_a_bad_second_is_corrected_by_the_next_start(monkeypatch):
    machine = Machine(monkeypatch)
    machine.takes = {1: 4.9, 2: 4.32}  # by 1.13: too little for MORE_THREADS
    assert machine.start() == (1, 6)
    machine.takes = {1: 4.9, 2: 3.6}
    seen = [machine.start() for _ in range(8)]
    # The second start measures anew and corrects, the fourth confirms, and that is all.
    assert seen == [(2, 2), (2, 0), (2, 2), (2, 0), (2, 0), (2, 0), (2, 0), (2, 0)]


def test_without_doubt_a_bad_second_stays(monkeypatch, home):
    """What the test before has to see: a result that is believed at once is never corrected."""
    machine = Machine(monkeypatch)
    machine.takes = {1: 4.9, 2: 4.32}
    machine.start()
    name = machine.kept(home)
    remember(name, replace(recall(name), agreed=True))
    machine.takes = {1: 4.9, 2: 3.6}
    assert [machine.start() for _ in range(8)] == [(1, 0)] * 8


def test_a_measurement_beside_others_says_nothing_and_comes_seldom(monkeypatch):
    machine = Machine(monkeypatch)
    assert machine.start() == (2, 6)
    machine.takes, machine.busy = {1: 4.9, 2: 9.0}, 0.5
    seen = [machine.start() for _ in range(15)]
    assert [threads for threads, _ in seen] == [2] * 15
    assert [at for at, (_, timed) in enumerate(seen, 2) if timed] == [2, 4, 8, 16]
    machine.busy = 0.0  # two threads are slower where nobody has the cores: that is believed
    seen = [machine.start() for _ in range(16)]
    assert [seen[-2], seen[-1]] == [(2, 0), (1, 2)]


def test_one_thread_may_be_timed_beside_others(monkeypatch):
    """Its own clock stands while others have its core."""
    machine = Machine(monkeypatch)
    machine.busy = 0.8
    before = Calibration(Setting(1, "bfloat16", True), [{**NOTE, "threads": 1}])
    more = {"threads": [1], "num_speculative_tokens": 3}
    assert calibrate.choose_again(before, machine.build, **more).agreed


def test_a_setting_that_is_hardly_slower_stays(monkeypatch, home):
    """Texts may depend on it, and measurements differ by as much."""
    machine = Machine(monkeypatch)
    machine.start()
    machine.takes = {1: 4.9, 2: 4.9 / calibrate.MORE_THREADS * 1.04}
    assert machine.start() == (2, 2)
    assert recall(machine.kept(home)).agreed


def test_a_start_without_time_measures_nothing_anew(monkeypatch, home):
    machine = Machine(monkeypatch)
    machine.start()
    with budget.under(budget.Budget(0.0)):
        assert machine.start() == (2, 0)
    assert not recall(machine.kept(home)).agreed


def test_what_a_start_had_no_time_to_measure_is_measured_by_the_next(monkeypatch, home):
    """And not confirmed by it: nothing was there to compare."""
    machine = Machine(monkeypatch)
    with budget.under(budget.Budget(0.0)):
        assert machine.start() == (1, 0)
    assert [machine.start() for _ in range(3)] == [(2, 6), (2, 2), (2, 0)]
    assert recall(machine.kept(home)).agreed


def test_what_others_run_is_what_cores_did_less_what_this_process_did(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "_CORES", str(tmp_path / "stat"))
    assert calibrate.others() == 0.0
    lines = ["cpu 9 9 9 9 9", "cpu0 99 99 99 99", "cpu1 200 0 100 7777 55 0 30 70 0 0", "intr 12 3"]
    (tmp_path / "stat").write_text("\n".join(lines))
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {1}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(calibrate.time, "process_time", lambda: 1.5)
    assert calibrate.others() == 2.5
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {7}, raising=False)
    assert calibrate.others() == 0.0


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


def test_costs_that_two_starts_do_not_agree_on_are_measured_anew(monkeypatch):
    """By the starts of a command: the text first, then a measurement that nobody waits for."""
    found, measured = [], []

    def looks(engine, rows):
        measured.append(rows)
        yield
        return Costs({rows: {64: Curve.of({1: 6.0, 2: 9.0 if len(found) else 6.3})}})

    def start():
        measured.clear()
        costs = calibrate.recall_costs("abc")
        keep = partial(calibrate.remember_costs, "abc")
        engine = Engine(*engine_of, None, "adaptive", costs, kept=keep)
        engine.priced(1)  # ahead of the text
        ahead = len(measured)
        engine.priced(1, again=True)  # behind it
        found.append(engine.costs.milliseconds(2))
        return ahead, len(measured) - ahead

    target, small = pair()
    engine_of = target, DraftModel(small, (1,))
    monkeypatch.setattr(measure, "measured", looks)
    assert [start() for _ in range(9)] == [(1, 0), (0, 1), (0, 0), (0, 1), *[(0, 0)] * 5]
    assert found == [6.3, *[9.0] * 8]
    assert calibrate.recall_costs("abc").agreed == {1}


def test_costs_of_a_librarys_batches_are_confirmed_too(monkeypatch):
    """By starts of a program: a model is loaded, and batches of four rows are run."""
    measured, target, small = [], *pair()

    def looks(engine, rows):
        measured.append(rows)
        yield
        return Costs({rows: {64: Curve.of({1: 6.0, 2: 6.3})}})

    def start(batches=1):
        measured.clear()
        costs = calibrate.recall_costs("abc")
        keep = partial(calibrate.remember_costs, "abc")
        engine = Engine(target, DraftModel(small, (1,)), None, "adaptive", costs, kept=keep)
        engine.priced(1, again=True)  # as `load` does
        for _ in range(batches):
            EngineRun(engine, 4, 64)
        return measured.copy()

    monkeypatch.setattr(measure, "measured", looks)
    assert [start(), start(batches=0), start(), start(2), start()] == [[1, 4], [1], [], [4], []]
    kept = calibrate.recall_costs("abc")
    assert (kept.agreed, kept.starts) == ({1, 4}, 5)  # what is agreed on counts no more starts
    assert start() == []
    assert calibrate.recall_costs("abc").starts == 5


def test_costs_that_were_measured_alike_stay_to_the_last_digit():
    """A seeded text that depends on them is the same at every start."""
    again = Costs({1: {64: Curve.of({1: 3.0, 5: 4.3}), 448: Curve.of({1: 3.5, 5: 4.6})}})
    assert COSTS.merged(again).times == COSTS.times
    assert COSTS.merged(again).agreed == {1}
    few = Costs({1: {64: Curve.of({1: 6.0, 3: 7.0, 5: 30.0})}})  # its largest is an estimate
    assert COSTS.merged(few).times == few.times
    plain = COSTS.merged(Costs.of({1: 6.0}))  # of what drafts take it says nothing
    assert (plain.times, plain.agreed) == (COSTS.times, frozenset())
    fine = Costs({1: {64: Curve.of({1: 6.0, 2: 6.5, 3: 7.0, 5: 8.0})}})
    assert fine.merged(few).times == fine.times


def test_costs_are_kept_beside_the_calibration_and_read_as_written(home, tmp_path):
    assert calibrate.recall_costs("abc") is None
    calibrate.remember_costs("abc", COSTS)
    assert calibrate.recall_costs("abc") == COSTS
    (home / "costs-abc.json").write_text('{"step_ms": {}}')
    assert calibrate.recall_costs("abc") is None
    COSTS.write(tmp_path / "costs.json")
    assert Costs.read(tmp_path / "costs.json") == COSTS


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"step_ms": {}}',
        '{"step_ms": {"0": {"64": {"1": 3}}}}',
        '{"step_ms": {"1": {"64": {"1": 0}}}}',
        '{"step_ms": {"1": {"64": {"x": 3}}}}',
        '{"step_ms": {"1": {"64": {}}}}',
    ],
)
def test_a_file_without_costs_is_refused(tmp_path, content):
    (tmp_path / "costs.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"no costs; got .*costs\.json.*Costs\.write"):
        Costs.read(tmp_path / "costs.json")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot be read; got .*nowhere.*Costs\.write"):
        Costs.read(tmp_path / "nowhere.json")


def test_costs_are_read_between_and_beyond_what_was_measured():
    read = Costs.of({1: 3.0, 5: 4.0, 9: 8.0}).milliseconds
    assert [read(n) for n in (0, 1, 3, 5, 6, 9, 11)] == [3.0, 3.0, 3.5, 4.0, 5.0, 8.0, 10.0]
    assert [COSTS.milliseconds(5, 1, at) for at in (0, 64, 256, 448, 640)] == [
        8,
        8,
        8.75,
        9.5,
        10.25,
    ]
    both = COSTS.merged(Costs({4: {64: Curve.of({1: 9.0, 5: 20.0})}}))
    assert [both.milliseconds(1, rows, 64) for rows in (1, 2, 4)] == [6.0, 7.0, 9.0]
    assert both.milliseconds(1, 8, 64) == 9.0 + 11 / 4  # as two nodes of four rows
    assert COSTS.milliseconds(5, 2, 64) == 8.0 + 2.5  # as ten nodes of one row
