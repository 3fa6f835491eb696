"""Tests on the device, in order of what they would stop; then race and memory checkers."""

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_stages.card import ROOT, Card
from gpu_stages.command import command
from gpu_stages.plan import Failed, Item

FILE = "tests/ops/test_gpu.py"
#: Words in the names of FILE's tests: every test is in one group (tests/bench/test_gpu_day.py).
GROUPS = {
    "equality with the reference": ("twin", "agrees", "keep_what", "drop_in"),
    "graph replay": ("graph_replay", "repeat_replay"),
    "determinism and host reads": ("thousand_launches", "batch_order", "no_operation_reads"),
    "laws over ten million draws": ("ten_million",),
}
ENGINE = "tests/engine/test_on_a_card.py"
MARK = "mark." + "gpu"
#: Checkers are slow: every operation and dtype at the smallest vocabulary.
CHECKED = "twin and 257"
#: What the interpreter does of two groups in a rehearsal; the others need a device.
REHEARSED = {"equality with the reference": "twin", "laws over ten million draws": "sampler"}


def items(card: Card) -> list[Item]:
    """Groups of tests, the engine, the checkers, and whatever else is marked gpu."""
    if card.rehearse:
        return [
            Item(name, lambda keys=keys: run_tests(card, keys, [FILE]), 60)
            for name, keys in REHEARSED.items()
        ]
    found = [
        Item(name, lambda words=words: run_tests(card, " or ".join(words), [FILE]), 200)
        for name, words in GROUPS.items()
    ]
    found.append(Item("engine and graphs", lambda: run_tests(card, "", [ENGINE]), 200))
    for tool in ("memcheck", "racecheck"):
        found.append(Item(tool, lambda tool=tool: checker(card, tool), 150))
    for path in marked():
        found.append(
            Item(f"marked gpu: {path}", lambda path=path: run_tests(card, "", [path]), 150)
        )
    return found


def marked() -> list[str]:
    """The other files with tests marked gpu: importing all the tests takes minutes, and packages
    that these do not need."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    holding = [path for path in files if MARK in path.read_text(encoding="utf-8")]
    names = [path.relative_to(ROOT).as_posix() for path in holding]
    return [name for name in names if name not in (FILE, ENGINE)]


def run_tests(card: Card, keys: str, where: list[str]) -> dict[str, Any]:
    """One pytest run in a process of its own, in parallel where pytest-xdist is installed.

    Raises Failed if a test failed, or if none ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        told = command(
            [*_pytest(card, keys, where), f"--junitxml={report}"], 190, environment(card)
        )
        told["parallel"] = find_spec("xdist") is not None and not card.rehearse
        told |= counts(report)
    if told["failed"] or told["code"]:
        raise Failed(f"pytest ended with code {told['code']}: {told['failed']} failed", told)
    if not told["passed"]:
        raise Failed(f"no test ran: {told['skipped']} were skipped", told)
    return told


def _pytest(card: Card, keys: str, where: list[str]) -> list[str]:
    # warnings of versions that we do not pin are shown, not raised
    argv = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "filterwarnings=", "-ra", *where]
    argv += ["-k", keys] if keys else []
    argv += ["-p", "no:benchmark"]  # it complains of xdist, in every worker
    if card.rehearse:
        argv += ["-p", "no:xdist"]
    elif find_spec("xdist") is not None:
        argv += ["-n", str(min(8, os.cpu_count() or 1))]
    return argv


def environment(card: Card) -> dict[str, str]:
    """Of a test run; in a rehearsal the tests on the device take the interpreter, tiny."""
    told = dict(os.environ)
    told["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), told.get("PYTHONPATH", "")])
    return told | ({"OUTRIDER_GPU_TESTS": "interpreter"} if card.rehearse else {})


def counts(report: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and what the failed ones said."""
    told: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": {}, "slowest": {}}
    if not report.exists():
        return told
    times = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = str(case.get("name"))
        times[name] = float(case.get("time") or 0)
        wrong = [child for child in case if child.tag in ("failure", "error")]
        if wrong:
            told["failed"] += 1
            told["failures"][name] = (wrong[0].text or str(wrong[0].get("message")))[-2000:]
        elif case.find("skipped") is not None:
            told["skipped"] += 1
        else:
            told["passed"] += 1
    slow = sorted(times, key=lambda name: -times[name])[:5]
    return told | {"slowest": {name: times[name] for name in slow}}


def checker(card: Card, tool: str) -> dict[str, Any]:
    """compute-sanitizer around the kernels' equality tests, where the tool exists."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        raise Failed("compute-sanitizer is not installed", {})
    argv = [path, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    argv += [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "filterwarnings=", "-p", "no:xdist"]
    # a caching allocator would hide what is read or written beyond a tensor's end
    told = command(
        [*argv, "-k", CHECKED, FILE], 140,
        environment(card) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    if told["code"]:
        raise Failed(f"{tool} ended with code {told['code']}", told)
    return told
