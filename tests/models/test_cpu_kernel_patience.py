# ruff: noqa: F401, F811 (a fixture is imported by its name)
"""How long a load waits for kernels that are being compiled, and when it goes on without."""

import os
import re
import shutil

import pytest
from test_cpu_kernel_build import alive, anew, fresh, lasting, needs_cc, small

from outrider.models import calibrate
from outrider.models.cpu_kernels import build, build_process


def test_whoever_cannot_do_without_waits_until_it_is_made(fresh):
    fresh.setattr(build, "PATIENCE", 0.0)
    fresh.setattr(build, "TEXTS", small(1))
    build.wait()
    assert build.unbuilt() is None or not shutil.which("cc")
    assert "still being compiled" not in str(build.unbuilt())


@needs_cc
def test_who_has_gone_on_without_still_waits_for_what_cannot_be_had_otherwise(fresh, tmp_path):
    """A second model of a process, in a type that kernels alone read."""
    fresh.setenv("CC", lasting(tmp_path, 'sleep 1; exec cc "$@"'))
    fresh.setattr(build, "TEXTS", small(1))
    fresh.setattr(build, "PATIENCE", 0.1)
    assert build.late()
    build.wait()
    assert build.unbuilt() is None
    assert not build.late()


def test_whoever_waits_no_longer_runs_without_and_measures_apart(fresh, tmp_path, caplog):
    fresh.setenv("CC", lasting(tmp_path, "sleep 1000"))
    fresh.setattr(build, "TEXTS", small(1))
    fresh.setattr(build, "PATIENCE", 0.3)
    fresh.setattr(build, "_TELLS", 0.1)
    key = calibrate.key()
    why = build.unbuilt()
    assert re.fullmatch(r"still being compiled after 0\.\d+ s; the next start has them", why)
    assert build.late()
    group = build._state.background.process.pid
    nice = {os.getpriority(os.PRIO_PROCESS, one) for one in alive(group)}
    assert nice == {19}  # what the next start will have takes nothing from this one
    assert [record.getMessage().split()[0] for record in caplog.records] == ["compiling", "going"]
    (order := build._state.background).stop()
    fresh.setenv("CC", "cc")
    assert build.unbuilt() == why  # for as long as this process runs
    assert calibrate.key() == key
    if shutil.which("cc"):
        anew(fresh)
        fresh.setattr(build, "PATIENCE", 900.0)
        assert build.unbuilt() is None
        assert not build.late()
        assert calibrate.key() != key
    assert not alive(order.process.pid)


@needs_cc
@pytest.mark.parametrize(("share", "late"), [(0.0, True), (0.4, True), (1.0, False)])
def test_who_would_wait_in_vain_goes_on_and_who_would_not_waits(fresh, tmp_path, share, late):
    """At 0.4 of the work after 0.3 of 0.6 seconds the rest takes longer than is left."""
    fresh.setenv("CC", lasting(tmp_path, 'sleep 0.2; exec cc "$@"'))  # for each of twenty sources
    fresh.setattr(build, "TEXTS", small(1))
    fresh.setattr(build, "PACED", 0.3)
    fresh.setattr(build, "PATIENCE", 0.6 if late else 60.0)
    fresh.setattr(build_process.Build, "share", lambda _: share)
    fresh.setattr(calibrate, "cores", lambda: 1)
    assert build.late() == late
    assert (build.unbuilt() is None) != late
    if late:
        assert re.match(r"still being compiled after 0\.\d+ s", build.unbuilt())


@needs_cc
def test_how_much_is_done_is_told_by_what_is_kept(fresh):
    fresh.setattr(build, "TEXTS", small(1))
    one = build_process.Build(build._look().given())
    assert one.share() == 0.0
    build.library()
    assert one.share() == 1.0
    fresh.setattr(build, "TEXTS", small(2))  # one source is another
    anew(fresh)
    left = build_process.Build(build._look().given()).share()
    assert left == 1.0 - 1.0 / len(build.SOURCES)
