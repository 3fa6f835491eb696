"""Fixtures for all tests. Threads are fixed so that results do not depend on the machine's load."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import costs
import kept_kernels

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network
os.environ["no_proxy"] = "*"  # and servers here are asked past proxies
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share what is compiled and found
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="outrider-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    kept_kernels.keep(Path(os.environ["XDG_CACHE_HOME"]))

import pytest
import torch

if not torch.cuda.is_available():
    # Kernel tests run in Triton's interpreter, which must be chosen before anything imports Triton
    # (transformers does). Nothing else in the tests uses Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What `make test` leaves out of a test's cases is `exhaustive`; `make test-all` runs it.

    Of those marked `one_in(n)` one in n runs; of a product of parameters, enough cases that every
    value of every parameter has one.
    """
    cases = {}
    for item in items:
        cases.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for same in cases.values():
        mark = same[0].get_closest_marker("one_in")
        if mark is not None:
            rest = [item for place, item in enumerate(same) if place % mark.args[0]]
        else:
            rest = left_out(same) if len(values(same[0])) > 1 else []
        for item in rest:
            item.add_marker("exhaustive")


def values(item):
    """(place, name) of a case's value in each `parametrize` of its test."""
    return set(enumerate(item.callspec._idlist)) if hasattr(item, "callspec") else set()


def left_out(product):
    """Cases of a test without which every value of every parameter still has a case.

    Those that stay are chosen one by one, the first of those with the most values that none had.
    """
    missing = set().union(*map(values, product))
    rest = list(product)
    while missing:
        best = max(rest, key=lambda item: len(missing & values(item)))
        missing -= values(best)
        rest.remove(best)
    return rest


def pytest_sessionstart():
    """What is tested does not depend on how busy the machine is: tests wait for kernels."""
    from outrider.models.cpu_kernels import build

    build.be_patient()


def pytest_collection_finish():
    """What imports made is there for good: not to be gone through again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    costs.spent = costs.processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Each report says what the processor worked for it, fixtures and ended processes included."""
    report = yield
    before, costs.spent = costs.spent, costs.processor_seconds()
    report.processor_seconds = costs.spent - before
    return report


def pytest_runtest_logreport(report):
    spent = getattr(report, "processor_seconds", 0.0)  # xdist's of a worker that died has none
    costs.add(report.nodeid, spent)


def pytest_terminal_summary(terminalreporter):
    """What the tests cost, so that it is seen when they grow (CONTRIBUTING.md, "Tests")."""
    terminalreporter.write_line(costs.told())


def pytest_unconfigure():
    """Libraries complain of what is left when the process ends."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def made_up_costs(monkeypatch):
    """No test depends on how fast the machine is: steps cost what is said here."""
    from outrider.costs import Costs, Curve
    from outrider.engine.speculation_policy import measure

    def measured(engine, rows):
        yield
        return Costs({rows: {0: Curve.of({1: 10.0, 13: 14.0 + rows, 65: 40.0 * rows})}})

    monkeypatch.setattr(measure, "measured", measured)


@pytest.fixture
def registries():
    """Drafters and rules that a test registers are gone when it ends."""
    from outrider.drafters import DRAFTERS
    from outrider.verifiers import VERIFIERS

    before = [(registry, dict(registry)) for registry in (DRAFTERS, VERIFIERS)]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


@pytest.fixture(scope="session")
def shipped():
    """The shipped pair in float32, nothing measured, and every step drafts alike."""
    import outrider

    return outrider.load(dtype="float32", threads=1, pack_weights=True, planner="fixed")


@pytest.fixture(scope="session")
def held_out():
    """A few held-out prompts, trailing blanks stripped."""
    import json

    from outrider.shipped import shipped as packaged

    lines = packaged("heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"].rstrip() for line in lines[::12]]


@pytest.fixture(scope="session")
def chromium():
    """One Chromium for all tests of pages."""
    from browsing import opened

    with opened() as driver:
        yield driver


@pytest.fixture
def browser(chromium):
    """It, with nothing left of an earlier test's page."""
    chromium.get("about:blank")
    for log in ("browser", "performance"):
        chromium.get_log(log)
    return chromium
