"""What imports and a first load make is not looked through for garbage while a model writes."""

import gc
import os
import subprocess
import sys

import pytest

from outrider import lazy


@pytest.fixture
def looks():
    """Whenever all objects were looked through; thresholds are put back."""
    seen = []

    def told(phase, about):
        if phase == "start" and about["generation"] == 2:
            seen.append(about["generation"])

    kept = gc.get_threshold()
    gc.set_threshold(*lazy._USUAL)  # as of a process that is no program of ours
    lazy._collected.cache_clear()
    gc.callbacks.append(told)
    yield seen
    gc.callbacks.remove(told)
    gc.set_threshold(*kept)


@pytest.mark.parametrize("there", [False, True])
def test_what_is_frozen_is_let_go_at_the_end_where_triton_would_call_it_leaked(monkeypatch, there):
    thawed = []
    monkeypatch.setattr(lazy.gc, "unfreeze", lambda: thawed.append(1))
    if there:
        monkeypatch.setitem(sys.modules, "triton", sys)
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    lazy._unfrozen()
    assert len(thawed) == there


def test_a_program_never_looks_through_its_imports(looks, monkeypatch):
    told = []
    monkeypatch.setattr(lazy.gc, "freeze", lambda: told.append("frozen"))
    monkeypatch.setattr(lazy.atexit, "register", told.append)
    lazy.collect_seldom()
    lazy.collect_as_usual()
    assert told == ["frozen", lazy._unfrozen]
    assert not looks
    assert gc.get_threshold() == lazy._USUAL


@pytest.mark.parametrize(("frozen", "on", "times"), [(0, True, 1), (0, False, 0), (9, True, 0)])
def test_a_process_of_somebody_else_does_so_when_a_model_is_loaded(
    looks, monkeypatch, frozen, on, times
):
    """Unless it looks for no garbage, or has frozen what it has. Its objects stay its own."""
    monkeypatch.setattr(lazy.gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(lazy.gc, "isenabled", lambda: on)
    monkeypatch.setattr(lazy.gc, "freeze", lambda: pytest.fail("frozen"))
    lazy.collect_as_usual()
    assert looks == [2] * times


def test_an_interrupt_while_packages_are_imported_ends_the_program(tmp_path):
    """Whatever they catch; afterwards it is KeyboardInterrupt again."""
    (tmp_path / "deaf.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    [None for _ in range(1000)]\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    program = (
        "import signal\n"  # a job in a shell's background has it ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from contextlib import nullcontext\nfrom outrider import lazy\n"
        "with {}():\n    import deaf\n"
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    print(2)\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    for how, code, out in (("lazy.ended_by_interrupt", 130, ""), ("nullcontext", 0, "2\n")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(how)],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (code, out), done.stderr
