"""benchmarks/gpu_day.py: its rehearsal runs every stage, and no failure or kill ends the day."""

# ruff: noqa: E402
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
sys.path.append(str(FOLDER))

from gpu_stages import STAGES, Stage, summary, worker
from gpu_stages.plan import Failed, Item
from gpu_stages.record import ATTEMPTS, DONE, FAILED, DamagedFile, Record

NAMES = [stage.name for stage in STAGES]
TREE_BYTES = 62 << 20
UNUSED = ("whisper-base-draft", "corrector", "smollm2-head")
LEFT = (*(f"src/outrider/pair/{part}/" for part in UNUSED), "docs/results/report.html")


def command(out, *more):
    return [sys.executable, str(FOLDER / "gpu_day.py"), "--out", str(out), "--rehearse", *more]


def environment():
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1")


def until(condition, seconds=600.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("waited in vain")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A whole rehearsal during which the worker is killed once: (folder, exit code, output)."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("day")
    running = subprocess.Popen(
        command(out), env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    path = out / "verification.json"
    until(lambda: running.poll() is not None or (path.exists() and '"started"' in path.read_text()))
    assert running.poll() is None, running.communicate()[0]
    pids = re.findall(r"^worker (\d+)$", (out / "log.txt").read_text(), re.M)
    os.kill(int(pids[-1]), signal.SIGKILL)
    told, _ = running.communicate(timeout=300)
    return out, running.returncode, told


@pytest.mark.slow  # a minute
def test_every_stage_of_the_rehearsal_writes_its_file(rehearsal):
    out, code, told = rehearsal
    for name in NAMES:
        document = json.loads((out / f"{name}.json").read_text())
        assert document["complete"], document["items"]
        assert document["rehearsal"]
        assert document["planned"] == list(document["items"]) or name == "verification"
    assert code == 0, told
    lines = told.splitlines()
    assert [line.split(" | ")[0] for line in lines if " | 0 | 0 | " in line] == NAMES
    assert (out / "summary.md").read_text().strip() == told[told.index("stage |") :].strip()


@pytest.mark.slow  # a minute
def test_a_killed_stage_goes_on_where_it_was(rehearsal):
    out, code, told = rehearsal
    assert code == 0
    assert "a worker ended with code -9; it was at: verification: right before timed" in told
    items = json.loads((out / "verification.json").read_text())["items"]
    tries = {key: item["attempts"] for key, item in items.items()}
    assert tries.pop("right before timed") == 2
    assert set(tries.values()) == {1}
    log = (out / "log.txt").read_text()
    assert log.count("[environment] is there already") == 1


@pytest.mark.slow  # a minute
def test_few_files_and_small_ones(rehearsal):
    files = [path for path in rehearsal[0].rglob("*") if path.is_file()]
    assert len(files) <= len(NAMES) + 2, files  # and the summary and the log
    assert all(path.stat().st_size < 16 << 20 for path in files)
    assert all(path.parent == rehearsal[0] for path in files)


@pytest.mark.slow  # behind the same minute
def test_a_failing_stage_does_not_stop_the_later_ones(rehearsal, tmp_path):
    """A damaged file is a failure; the stage behind it is done all the same, and nothing twice."""
    out = tmp_path / "day"
    shutil.copytree(rehearsal[0], out)
    (out / "environment.json").write_text("{")
    (out / "paper.json").unlink()
    ended = subprocess.run(command(out), env=environment(), text=True, capture_output=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "environment.json is no result file" in ended.stdout
    assert (out / "environment.json").read_text() == "{"
    assert json.loads((out / "paper.json").read_text())["complete"]
    same = (rehearsal[0] / "growth.json").read_text() == (out / "growth.json").read_text()
    assert same


def stage(tmp_path, items, name="one", seconds=60, **how):
    how = {"deadline": time.time() + 60} | how
    path = tmp_path / f"{name}.json"
    return worker.work(Stage(name, seconds, ""), path, lambda: items, **how), Record.read(path)


def test_items_fail_alone_and_keep_what_they_found(tmp_path):
    def wrong():
        raise Failed("two of three", {"wrong": 2})

    def refuse():
        raise SystemExit("wrong before timing")

    items = [Item("a", wrong), Item("b", refuse), Item("c", lambda: {"x": 1})]
    going, record = stage(tmp_path, items)
    assert going
    assert [record.state(key) for key in "abc"] == [FAILED, FAILED, DONE]
    assert record.results() == {"a": {"wrong": 2}, "c": {"x": 1}}
    assert record.failures["b"] == "SystemExit: wrong before timing"
    assert record.ended
    assert not record.complete
    record.forget_failures()
    assert list(Record.read(record.path).items) == ["c"]


def test_a_lost_device_ends_the_process_and_not_the_stage(tmp_path):
    done = []

    def crash():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    items = [Item("a", crash), Item("b", lambda: done.append("b") or {})]
    going, record = stage(tmp_path, items)
    assert not going
    assert not done
    going, record = stage(tmp_path, items)  # as the next worker does
    assert going
    assert record.state("b") == DONE
    assert record.attempts("a") == 1


def test_a_stage_whose_items_cannot_be_listed_has_failed(tmp_path):
    def missing():
        raise ImportError("no module named scipy")

    path = tmp_path / "one.json"
    assert worker.work(Stage("one", 60, ""), path, missing, deadline=time.time() + 60)
    assert "scipy" in Record.read(path).failures[worker.SET_UP]


def test_time_is_bounded_and_what_is_left_is_left(tmp_path):
    items = [Item(key, lambda: time.sleep(0.15) or {}) for key in "abc"]
    _, record = stage(tmp_path, items, seconds=0.1)
    assert [record.state(key) for key in "abc"] == [DONE, "", ""]
    assert not record.ended
    _, record = stage(tmp_path, items, deadline=time.time() - 1)
    assert record.state("b") == ""
    _, record = stage(tmp_path, items)
    assert record.complete


def test_interrupted_items_come_last_and_not_for_ever(tmp_path):
    record = Record(tmp_path / "one.json")
    record.plan(["a", "b"])
    for _ in range(ATTEMPTS):
        assert record.state("a") != FAILED
        record.start("a", 60)
        assert record.interrupted(time.time()) == ["a"]
        assert record.plan(["a", "b"])[0] == "b"
    assert record.failures == {"a": f"interrupted {ATTEMPTS} times"}
    record.start("b", 60)
    assert record.interrupted(time.time() + 61) == ["b"]
    assert "longer than 60 s" in record.failures["b"]


def test_an_item_that_hangs_ends_its_process_and_has_failed(tmp_path):
    path = tmp_path / "one.json"
    code = f"""
import pathlib, sys, time
sys.path.insert(0, {str(FOLDER)!r})
from gpu_stages import Stage, worker
from gpu_stages.plan import Item
items = [Item("hangs", lambda: time.sleep(60), 0.3), Item("next", dict)]
path = pathlib.Path({str(path)!r})
worker.work(Stage("one", 60, ""), path, lambda: items, deadline=time.time() + 60)
"""
    first = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert first.returncode == 1
    assert "Timeout" in first.stderr  # and where it was
    record = Record.read(path)
    assert record.interrupted(time.time()) == ["hangs"]
    assert "longer than 0.3 s" in record.failures["hangs"]
    assert not subprocess.run([sys.executable, "-c", code], capture_output=True).returncode
    assert Record.read(path).state("next") == DONE


def test_a_rehearsal_is_not_taken_for_a_run(tmp_path):
    stage(tmp_path, [Item("a", dict)], rehearse=True)
    with pytest.raises(DamagedFile, match="a rehearsal; give another --out"):
        stage(tmp_path, [Item("a", dict)], rehearse=False)


def test_the_table_says_what_missed_its_target(tmp_path):
    record = Record(tmp_path / "verification.json", ["x"])
    key = "B=1 gamma=5 V=151936 bf16"
    rows = [
        {"row": "transformers", "median_us": 400.0},
        {"row": "one kernel, LSE kept", "median_us": 8.0},
    ]
    record.items[key] = {"state": DONE, "attempts": 1, "result": {"rows": rows}}
    said = summary.text({"verification": record})
    assert "50.0x of transformers (400 us); target 9.5 / 7.5 us: accept" in said
    rows[1]["median_us"] = 20.0
    assert "MISSED" in summary.text({"verification": record})


@pytest.mark.slow  # a minute
def test_readmes_tables_come_from_a_days_files_and_no_rehearsals(rehearsal, tmp_path):
    import table

    with pytest.raises(SystemExit, match="is a rehearsal"):
        table.read(rehearsal[0])
    shutil.copytree(rehearsal[0], tmp_path / "card")
    for name in NAMES:
        path = tmp_path / "card" / f"{name}.json"
        document = json.loads(path.read_text()) | {"rehearsal": False}
        if name == "environment":
            document["items"]["machine"]["result"]["gpu"] = "a card"
        path.write_text(json.dumps(document))
    document = table.read(tmp_path / "card")
    text = table.markdown(document, table.GPU_ROWS)
    assert "| 1, 2, 40, bf16 | mixed |" in text
    assert text.startswith("a card, torch ")
    lines = table.generation(tmp_path / "card").splitlines()
    assert lines[0].startswith("| pair, batch, tokens/s | plain | chain | tree | transformers |")
    assert len(lines) == 2 + 6
    assert "x)" in lines[2]


def test_targets_are_those_of_the_page():
    page = (ROOT / "docs" / "kernels.md").read_text()
    lines = re.findall(
        r"^\| (\d+), (\d+), (\d+)k, bf16 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", page, re.M
    )
    vocabularies = {"32": 32_000, "152": 151_936, "256": 256_000}
    told, floors = {}, {}
    for batch, gamma, vocab, floor, accept, good in lines:
        key = f"B={batch} gamma={gamma} V={vocabularies[vocab]} bf16"
        told[key], floors[key] = (float(accept), float(good)), float(floor)
        read = int(batch) * (int(gamma) + 1) * vocabularies[vocab] * 2
        assert floors[key] == pytest.approx(read / 4.3e12 * 1e6, rel=0.05)
    assert told == summary.TARGETS
    assert floors == summary.FLOORS


def test_a_slower_card_has_more_time_for_reading_and_no_more_for_the_rest(tmp_path):
    record = Record(tmp_path / "verification.json", ["x"])
    rows = [{"row": "one kernel, LSE kept", "median_us": 54.0, "floor_us": 38.7}]
    key = "B=64 gamma=5 V=151936 bf16"
    record.items[key] = {"state": DONE, "attempts": 1, "result": {"rows": rows}}
    assert "target 54.7 / 49.7 us: accept" in summary.text({"verification": record})


def test_the_files_with_marked_tests_are_found_without_importing_others():
    from gpu_stages import correctness

    files = correctness.marked()
    assert {"tests/models/test_families.py", "tests/integrations/test_generate.py"} <= set(files)
    assert not {correctness.FILE, correctness.ENGINE} & set(files)
    for name in files:
        assert re.search(r"^@pytest\.mark\.gpu", (ROOT / name).read_text(), re.M), name


def test_every_test_of_a_kernel_on_a_device_is_in_one_group():
    source = (FOLDER / "gpu_stages" / "correctness.py").read_text()
    groups = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GROUPS"
    )
    tests = (ROOT / "tests" / "ops" / "test_gpu.py").read_text()
    for name in re.findall(r"^def (test_\w+)", tests, re.M):
        fits = [group for group, words in groups.items() if any(word in name for word in words)]
        assert len(fits) == 1, (name, fits)


def test_what_the_day_needs_stays_small():
    """docs/gpu.md: everything that travels but for what it names first to be left behind."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    sizes = [
        (ROOT / name).stat().st_size
        for name in listed.stdout.decode().split("\0")
        if name and not name.startswith(LEFT) and (ROOT / name).is_file()
    ]
    assert sum(sizes) < TREE_BYTES, f"{sum(sizes) / 2**20:.1f} MiB; docs/gpu.md says what to leave"
