"""A compiled library is made of what the process has read, whole, and called as declared."""

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cpu_kernels import BF16, call_of, filled, random_nodes

from outrider.models import LlamaRunner, calibrate, isa
from outrider.models.cpu_kernels import build, build_process, cross_attention
from outrider.testing import models

WHOLE = (ctypes.c_int64,)
needs_cc = pytest.mark.skipif(
    not shutil.which("cc") or not sys.platform.startswith("linux"), reason="needs cc, on Linux"
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process of a user without a cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)  # compilers are `cc` here
    monkeypatch.setattr(calibrate, "homeless", lambda: tmp_path / "temporary")
    anew(monkeypatch)
    yield monkeypatch
    forget()


def anew(monkeypatch):
    """Another process."""
    forget()
    monkeypatch.setattr(build, "_state", build._State())


def forget():
    if build._state.background is not None:
        build._state.background.stop()


def small(answer):
    """Sources of a library whose function adds `answer`."""
    added = f'#include "lanes.h"\nint added(int64_t x) {{ return x + {answer}; }}\n'
    return dict.fromkeys(build.SOURCES, "") | {"lanes.h": "#include <stdint.h>\n", "int8.c": added}


def lasting(tmp_path, script):
    """A compiler that is `script` of the shell, which finds its arguments in "$@"; it knows all
    options that it is asked about."""
    compiler = tmp_path / "compiler"
    asked = 'case "$*" in *"-E -x c /dev/null"*) exit 0;; esac'
    compiler.write_text(f"#!/bin/sh\n{asked}\n{script}\n")
    compiler.chmod(0o755)
    return str(compiler)


def alive(group):
    """Processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of, *_ = stat.read_text().rpartition(")")[2].split()
            if int(of) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


def until(happens, seconds=60.0):
    """Wait for what another process brings about."""
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.02)
    return happens()


@needs_cc
def test_what_a_process_has_read_is_compiled_whatever_lies_there_now(fresh, tmp_path):
    made = []
    for answer in (1, 2, 1):  # the files of the package are others all the while
        fresh.setattr(build, "TEXTS", small(answer))
        anew(fresh)
        made.append(build.function("added", WHOLE)(40) - 40)
    assert made == [1, 2, 1]
    assert len([*tmp_path.rglob("*.so")]) == 2
    assert not [*tmp_path.rglob("*.tmp")]


@needs_cc
def test_one_changed_file_is_compiled_alone(fresh, tmp_path):
    log = tmp_path / "log"
    fresh.setenv("CC", lasting(tmp_path, f'echo "$@" >> {log}; exec cc "$@"'))
    ran = []
    for texts in (small(1), small(2), small(2) | {"lanes.h": "#include <stdint.h>\n\n"}):
        fresh.setattr(build, "TEXTS", texts)
        anew(fresh)
        assert build.unbuilt() is None
        ran.append(re.findall(r" -c (\S+)", log.read_text()))
        log.unlink()
    assert sorted(ran[0]) == sorted(build.SOURCES)
    assert ran[1:] == [["int8.c"], ["int8.c"]]  # which reads the header; the others do not


@needs_cc
def test_what_most_sources_include_is_read_once_and_changes_no_object(fresh, tmp_path):
    log = tmp_path / "log"
    fresh.setenv("CC", lasting(tmp_path, f'echo "$@" >> {log}; exec cc "$@"'))
    made = '#include "intrinsics.h"\nint added(int64_t x) { return x + (int64_t)sqrt(4); }\n'
    libraries = []
    for others in ({}, {"attend.c": '#include "intrinsics.h"\n'}):
        texts = small(1) | {build.AHEAD: build.TEXTS[build.AHEAD], "int8.c": made} | others
        fresh.setattr(build, "TEXTS", texts)
        anew(fresh)
        fresh.setenv("XDG_CACHE_HOME", str(tmp_path / str(len(others))))
        assert build.function("added", WHOLE)(40) == 42
        libraries.append(build.library().path.parent)
    ran = log.read_text().splitlines()
    assert sum(f"-x c-header {build.AHEAD}" in line for line in ran) == 1
    assert sum(f"-include {build.AHEAD}" in line for line in ran) == 2
    alone, together = ({one.read_bytes() for one in each.glob("objects/*.o")} for each in libraries)
    assert alone <= together


@pytest.mark.parametrize("locks", [True, False])
def test_where_there_are_no_locks_what_others_build_is_left(tmp_path, monkeypatch, locks):
    """On some shared file systems; with locks it is what a build that was cut off has left."""
    fcntl = pytest.importorskip("fcntl")

    def flock(file, how):
        if not locks:
            raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    other = tmp_path / "build.other.tmp"
    other.mkdir()
    order = {"library": str(tmp_path / "kernels.so"), "compiler": ["true"], "seconds": 60.0}
    order |= {"sources": [], "texts": {}, "ahead": "", "flags": [], "links": [], "at_once": 1}
    build_process.Build(order).make()
    assert build_process.whole(tmp_path / "kernels.so")
    assert other.exists() == (not locks)


@needs_cc
def test_processes_that_build_at_once_have_one_library(fresh, tmp_path):
    log = tmp_path / "log"
    fresh.setenv("CC", lasting(tmp_path, f'echo "$@" >> {log}; exec cc "$@"'))
    fresh.setattr(build, "TEXTS", small(3))
    orders = [build._Background(build._look()) for _ in range(3)]
    assert [one.failed(60.0, 60.0) for one in orders] == [None] * 3
    assert len(log.read_text().splitlines()) == len(build.SOURCES) + 1  # and the library itself
    assert build.function("added", WHOLE)(40) == 43


def cut(library):
    library.write_bytes(library.read_bytes()[:5000])


def emptied(library):
    library.write_bytes(b"")


def overwritten(library):
    library.write_bytes(b"no ELF" + library.read_bytes()[6:])


def foreign(library):
    """Whole, but of another system."""
    library.write_bytes(text := b"made elsewhere")
    library.write_bytes(text + hashlib.sha256(text).digest())


@pytest.mark.one_in(2)
@needs_cc
@pytest.mark.parametrize("damage", [cut, emptied, overwritten, foreign])
def test_a_damaged_library_is_built_anew(fresh, tmp_path, damage):
    fresh.setattr(build, "TEXTS", small(1))
    build.function("added", WHOLE)
    (library,) = tmp_path.rglob("*.so")
    damaged = library.with_name("damaged")
    damaged.write_bytes(library.read_bytes())  # this process has loaded the other
    library.unlink()
    damage(damaged)
    damaged.rename(library)
    anew(fresh)
    assert build.function("added", WHOLE)(40) == 41
    assert build_process.whole(library)
    before = library.stat().st_mtime_ns
    anew(fresh)
    assert build.function("added", WHOLE)(40) == 41
    assert library.stat().st_mtime_ns == before


@needs_cc
def test_what_is_wrong_with_a_library_is_said_and_not_tried_again(fresh, tmp_path):
    fresh.setattr(build, "TEXTS", small(1))
    fresh.setattr(build, "Library", lambda *_: ctypes.CDLL(str(tmp_path / "none")))
    why = r"the library made by 'cc' cannot be loaded: .*none: cannot"
    assert re.match(why, build.unbuilt())
    anew(fresh)
    assert re.match(rf"{why}.* \(not tried again for a day\)", build.unbuilt())


@needs_cc
def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(fresh, tmp_path):
    fresh.setattr(build, "TEXTS", small(1))
    locked = tmp_path / "outrider" / "kernels"
    unfit = build._unfit
    fresh.setattr(build, "_unfit", lambda at: "read-only" if at == locked else unfit(at))
    assert build.function("added", WHOLE)(40) == 41
    assert f"({str(locked)!r} is read-only)" in build.describe()
    (library,) = tmp_path.rglob("*.so")
    assert library.is_relative_to(tmp_path / "temporary")
    anew(fresh)
    fresh.setattr(build, "_unfit", lambda folder: "read-only")
    assert build.unbuilt() == (
        f"no folder to keep a library in: neither {str(locked)!r} (read-only) nor "
        f"{str(library.parent)!r} can be written to and run from; set XDG_CACHE_HOME to one that "
        "can"
    )
    assert build.describe().startswith("none: no folder")


@needs_cc
def test_a_cache_that_nothing_can_be_run_from_is_replaced_by_a_temporary_folder(fresh, tmp_path):
    """Homes are mounted noexec: a library was compiled into it each day, and never loaded."""
    fresh.setattr(build, "TEXTS", small(1))
    home, flags = tmp_path / "outrider" / "kernels", os.ST_NOEXEC
    fresh.setattr(os, "statvfs", lambda at: SimpleNamespace(f_flag=flags if at == home else 0))
    assert build.function("added", WHOLE)(40) == 41
    assert f"({str(home)!r} is mounted noexec)" in build.describe()
    assert not list(home.iterdir())
    anew(fresh)
    fresh.setattr(os, "statvfs", lambda at: SimpleNamespace(f_flag=flags))
    assert build.describe().startswith(
        f"none: no folder to keep a library in: neither {str(home)!r} (mounted noexec) nor "
    )


@needs_cc
def test_a_file_in_place_of_the_cache_is_no_obstacle(fresh, tmp_path):
    fresh.setattr(build, "TEXTS", small(1))
    (tmp_path / "file").write_text("")
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build.function("added", WHOLE)(40) == 41
    assert str(tmp_path / "temporary" / "kernels") in build.describe()


@needs_cc
@pytest.mark.skipif(len(isa.available()) < 2, reason="this processor has one level")
def test_a_compiler_that_does_not_know_a_level_compiles_for_the_one_below(fresh, tmp_path):
    fresh.setattr(build, "TEXTS", small(1))
    *_, below, level = isa.up_to(isa.level())
    unknown = next(one for one in level.options if one not in below.options)
    fresh.setenv("CC", compiler := lasting(tmp_path, 'exec cc "$@"'))
    script = f'#!/bin/sh\ncase " $* " in *" {unknown} "*) exit 1;; esac; exec cc "$@"\n'
    Path(compiler).write_text(script)
    for _ in range(2):  # the second finds what the first has made
        anew(fresh)
        assert build.function("added", (ctypes.c_int64,))(1) == 2
        assert build.describe().startswith(f"{below.name}, compiled here")
        assert f"({compiler!r} does not know {' '.join(level.options)})" in build.describe()


def test_a_failure_is_remembered_until_the_compiler_or_the_day_is_another(fresh, tmp_path):
    log = tmp_path / "log"
    fresh.setenv("CC", compiler := lasting(tmp_path, f"echo run >> {log}; echo no >&2; exit 3"))
    fresh.setattr(build, "TEXTS", small(1))
    fresh.setattr(calibrate, "cores", lambda: 1)
    why = f"{compiler!r} failed: no"
    assert build.unbuilt() == why
    runs = len(log.read_text().splitlines())
    anew(fresh)
    assert build.unbuilt() == f"{why} (not tried again for a day)"
    assert build.identity() == "none"
    assert len(log.read_text().splitlines()) == runs
    now = time.time()
    anew(fresh)
    with pytest.MonkeyPatch.context() as later:
        later.setattr(time, "time", lambda: now + 25 * 3600)
        assert build.unbuilt() == why
    anew(fresh)
    fresh.setenv("CC", lasting(tmp_path, "echo still not >&2; exit 4"))
    assert build.unbuilt() == f"{compiler!r} failed: still not"


def test_a_compiler_that_hangs_is_given_up_and_killed(fresh, tmp_path):
    fresh.setenv("CC", lasting(tmp_path, "sleep 1000 & sleep 1000"))
    fresh.setattr(build, "TEXTS", small(1))
    fresh.setattr(build, "_LIMIT", 0.5)
    build.start()
    group = build._state.background.process.pid
    assert build.unbuilt() == "compiling took longer than 0.5 s"
    assert until(lambda: not alive(group))
    anew(fresh)
    assert build.unbuilt() == "compiling took longer than 0.5 s (not tried again for a day)"


WAITS = """
import sys, time
from outrider.models.cpu_kernels import build
build.TEXTS = dict.fromkeys(build.SOURCES, "")
build.start()
print(build._state.background.process.pid, flush=True)
{ends}
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("ends", "signal_"),
    [
        ("sys.exit(0)", None),
        ("build.unbuilt()", signal.SIGTERM),
        ("build.unbuilt()", signal.SIGKILL),
    ],
)
def test_no_process_is_left_behind_however_the_first_one_ends(fresh, tmp_path, ends, signal_):
    fresh.setenv("CC", lasting(tmp_path, f"touch {tmp_path}/runs; sleep 1000 & sleep 1000"))
    code = WAITS.format(ends=ends)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        group = int(process.stdout.readline())
        if signal_ is not None:
            assert until((tmp_path / "runs").exists)
            assert alive(group)
            process.send_signal(signal_)
        process.wait(60)
    assert until(lambda: not alive(group))


@pytest.fixture
def shipped(fresh, tmp_path):
    """A folder of the package with a library that adds 5, where the sources say so, too."""
    texts = small(5)
    fresh.setattr(build, "TEXTS", texts)
    build.library()
    (made,) = tmp_path.rglob("kernels-*.so")
    folder = tmp_path / "shipped"
    folder.mkdir()
    begins = build.shipped_stem(sys.platform, isa.family(), isa.level(), texts, build.FLAGS)
    content = made.read_bytes()
    (folder / build.shipped_name(begins, content)).write_bytes(content)
    made.unlink()
    fresh.setattr(build, "SHIPPED", folder)
    anew(fresh)
    return folder


@needs_cc
def test_a_shipped_library_is_preferred_to_compiling(fresh, shipped):
    fresh.setenv("CC", "no-such-compiler")
    assert build.function("added", WHOLE)(40) == 45
    assert build.describe().startswith(f"{isa.level().name}, shipped with the package")
    assert build.identity() == next(shipped.iterdir()).name


def changed_sources(fresh, library):
    texts = small(5)
    fresh.setattr(build, "TEXTS", texts | {"int8.c": texts["int8.c"] + "/* of another version */"})


def changed_level(fresh, library):
    fresh.setenv("OUTRIDER_ISA", "generic")


def damaged(fresh, library):
    library.write_bytes(library.read_bytes()[:-1])


@needs_cc
@pytest.mark.parametrize("change", [changed_sources, changed_level, damaged])
def test_a_shipped_library_of_other_sources_or_level_or_damaged_is_left(fresh, shipped, change):
    change(fresh, next(shipped.iterdir()))
    assert "compiled here by 'cc'" in build.describe()
    assert build.function("added", WHOLE)(40) == 45


@needs_cc
def test_a_shipped_library_that_cannot_be_loaded_is_said_and_replaced(fresh, shipped):
    library = next(shipped.iterdir())
    begins = library.stem.rpartition("-")[0]
    (shipped / build.shipped_name(begins, b"another system's")).write_bytes(b"another system's")
    library.unlink()
    assert "compiled here by 'cc'" in build.describe()
    assert "(the shipped one cannot be loaded: " in build.describe()
    assert build.function("added", WHOLE)(40) == 45


@needs_cc
def test_a_function_is_not_called_with_other_arguments(fresh):
    fresh.setattr(build, "TEXTS", small(1))
    with pytest.raises(TypeError, match=r"added takes \(c_long\), and would be given \(c_float\)"):
        build.function("added", (ctypes.c_float,))
    assert build.function("added", WHOLE)(1) == 2


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("CC", "no-such-compiler", "'no-such-compiler' is not there"),
        ("CC", "false", "'false' failed: it ended with code 1"),
        ("OUTRIDER_COMPILED", "0", "OUTRIDER_COMPILED is 0"),
    ],
)
def test_without_a_compiler_torchs_operators_run(fresh, tmp_path, name, value, why):
    fresh.setenv(name, value)
    runner = LlamaRunner(models.llama(head_dim=16).to(BF16), False)
    assert why in runner.means
    with pytest.raises(RuntimeError, match=why.split(" ")[-1]):
        build.library()
    assert not [*tmp_path.rglob("*.so"), *tmp_path.rglob("*.tmp")]


@needs_cc
def test_a_frozen_program_is_not_started_again_to_compile(fresh):
    fresh.setattr(sys, "frozen", True, raising=False)
    fresh.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    assert "frozen" in build.unbuilt()


@pytest.mark.slow
def test_the_library_is_built_once_and_has_the_same_bits_on_plainer_processors(fresh, tmp_path):
    if not shutil.which("cc"):
        pytest.skip("needs cc")
    assert build.unbuilt() is None
    (library,) = tmp_path.rglob("*.so")
    written = library.stat().st_mtime_ns
    anew(fresh)
    assert build.unbuilt() is None
    assert library.stat().st_mtime_ns == written

    def across(dtype):
        keys, values = torch.randn(2, 1, 3, 40, 20).to(dtype)
        laid = cross_attention.laid_keys(keys), cross_attention.laid_values(values)
        return cross_attention.attend(
            torch.randn(1, 7, 3, 20).to(dtype), *laid, torch.tensor([40]), 40
        )

    def answers():
        torch.manual_seed(2)
        nodes = random_nodes(2, 5, True)
        qkv = torch.randn(2, 5, 8 * 64).to(BF16)
        cache, keys, _ = filled(2, 2, 64, 300)
        with torch.inference_mode():
            call, _ = call_of(4, 2, 64, nodes)
            _, normed = call.norm(qkv, qkv, torch.ones(512, dtype=BF16))
            own = call.attend(qkv, cache.layers[0]), keys, normed, call.gate(qkv)
            return *own, across(BF16), across(torch.float32)

    tuned = answers()
    fresh.setenv("OUTRIDER_ISA", "avx2")  # without vectors of sixteen
    anew(fresh)
    assert build.unbuilt() is None
    assert len([*tmp_path.rglob("*.so")]) == 2
    assert all(torch.equal(a, b) for a, b in zip(tuned, answers(), strict=True))
