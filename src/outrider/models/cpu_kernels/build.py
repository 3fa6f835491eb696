"""`SOURCES` as a library for the processor at hand: shipped with the package, or compiled here
once, in the background, and kept beside calibrations.

A wheel carries libraries of the sources that lie beside it (`shipped_library`). Elsewhere the
compiler that `CC` names, else `cc`, makes one, in a process of its own (`build_process`) that ends
with this one. Whoever needs the library first waits for it, PATIENCE at most and PACED where it is
too slow for that, or to its end who cannot do without (`wait`). Then, and where there is none,
torch's operators run, for as long as this process does: what it measures is kept under `identity`,
apart from what is measured with a library. `unbuilt` says why there is none, `late` whether the
next process will have one, `told` which one runs, and so does `--verbose`. OUTRIDER_COMPILED=0
wants none, OUTRIDER_ISA caps what one may use.

A process runs the sources that lay there when it imported this module, whatever has replaced them
since: another version's would be called with arguments that it reads otherwise. A library's name
says what it was made of, and its digest lies at its end: a damaged one would end the process, so it
is built anew. A function is only called with the arguments that its source declares.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outrider.models import calibrate, isa
from outrider.models.cpu_kernels import build_process

SOURCES = tuple(
    """
    thread_pool.c attend.c attend_tiles.c kernels.c int8.c cross.c decoder_layers.c
    block_verification.c draws.c logits.c tiles.c packed_linear.c packed_layout.c packed_dense.c
    packed_blocks.c packed_superblocks.c packed_int8.c int16_attention.c outer_product.c mixers.c
    experts.c
    """.split()
)
AHEAD = "intrinsics.h"  #: read once for all sources: alone it takes a quarter of a second
SHARED = (
    AHEAD,
    "thread_pool.h",
    "lanes.h",
    "draws.h",
    "attend.h",
    "attend_sums.h",
    "tiles.h",
    "packed_vectors.h",
    "packed_tiles.h",
    "packed_linear.h",
    "experts.h",
)
#: What is compiled: read now, together with the modules that call it.
TEXTS = {name: Path(__file__).with_name(name).read_text() for name in (*SOURCES, *SHARED)}
#: Sums keep their order, and what is not a number stays none: nothing of -ffast-math.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-pthread", "-fPIC", "-Wno-psabi")
LINKS = ("-lm",)
SHIPPED = Path(__file__).with_name("shipped")  #: the folder of what a wheel carries
#: Seconds from its start that a load waits for a library that is being compiled, and those after
#: which it goes on without where, at its pace, that would not be enough.
PATIENCE, PACED = 25.0, 10.0
_LOWEST = 19  #: of a process's priorities
_TELLS = 2.0  #: seconds of waiting after which a line says what for
_NOEXEC = "mounted noexec"  #: of a folder that no library can be loaded from
_LIMIT = 900.0  #: seconds that a build may take, in the background, before it is given up
_COMPILER = Path(__file__).with_name("build_process.py").read_text()
_log = logging.getLogger(__name__)


# Libraries that a wheel carries: one for each level of its platform, made by
# `tools/build_kernels.py`. A library's name says for which system, processor and level it is, of
# which sources it was made, and what is in it: other sources beside it, or damage, leave it alone.


def shipped_stem(
    system: str, family: str, level: isa.Level, texts: Mapping[str, str], flags: Sequence[str]
) -> str:
    """A library's name but for what is in it."""
    made_of = sorted(texts.items()), tuple(flags), level.options
    return f"kernels-{system}-{family}-{level.name}-{_digest(made_of)}"


def shipped_name(stem: str, made: bytes) -> str:
    """The whole name of a library that holds these bytes."""
    return f"{stem}-{hashlib.sha256(made).hexdigest()[:16]}.so"


def shipped_library(
    level: isa.Level, texts: Mapping[str, str], flags: Sequence[str]
) -> Path | None:
    """The library of these sources for this machine; None: none is here, or it is damaged."""
    if not SHIPPED.is_dir():
        return None
    begins = shipped_stem(sys.platform, isa.family(), level, texts, flags)
    for path in sorted(SHIPPED.glob(f"{begins}-*.so")):
        try:
            if path.name == shipped_name(begins, path.read_bytes()):
                return path
        except OSError:
            continue
    return None


class Library:
    """A library made of `texts`, and its functions."""

    def __init__(self, path: Path, texts: dict[str, str], told: str = "") -> None:
        """Load it. Raises OSError for what is no library, or another system's."""
        self.path, self.told = path, told
        self.loaded, self._texts = ctypes.CDLL(str(path)), texts
        #: the functions so far, by name and what they take
        self.known: dict[tuple[str, tuple[type, ...]], Callable[..., int]] = {}

    def function(self, name: str, types: tuple[type, ...]) -> Callable[..., int]:
        """The function of this name. Raises TypeError if it does not take these."""
        known = self.known.get((name, types))
        if known is None:
            takes = argument_types(name, self._texts)
            if takes != types:
                raise TypeError(
                    f"{name} takes {_named(takes)}, and would be given {_named(types)}: files of "
                    "two versions of outrider lie side by side; install it anew, or start again "
                    "if that has just been done"
                )
            found = self.loaded[name]
            found.argtypes = types
            known = self.known[name, types] = found
        return known


def argument_types(name: str, texts: dict[str, str]) -> tuple[type, ...]:
    """What a function takes, by the source that defines it; nothing if none does.

    >>> argument_types("twice", {"twice.c": "int twice(int64_t count, const float *x) {"})
    (<class 'ctypes.c_long'>, <class 'ctypes.c_void_p'>)
    """
    opened = re.compile(rf"^\w+ {name}\(([^)]*)\)\s*{{", re.MULTILINE)
    found = next(filter(None, map(opened.search, texts.values())), None)
    each = found[1].split(",") if found else []
    return tuple(ctypes.c_void_p if "*" in one else _PLAIN[one.split()[0]] for one in each)


_PLAIN: dict[str, type] = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}


def _named(types: tuple[type, ...]) -> str:
    return f"({', '.join(one.__name__ for one in types)})"


def unbuilt() -> str | None:
    """Why there is no library; None: there is one."""
    found = _found()
    return found if isinstance(found, str) else None


def library() -> Library:
    """The library. Raises RuntimeError where there is none: see `unbuilt`."""
    found = _found()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def function(name: str, types: tuple[type, ...]) -> Callable[..., int]:
    """A function of the library. Raises RuntimeError where there is none, TypeError if it does not
    take these."""
    return library().function(name, types)


def describe() -> str:
    """Which library runs, or why none does, in words."""
    found, cap = _found(), isa.capped()
    capped = f" ({isa.VARIABLE} leaves out what is above {cap})" if cap else ""
    said = f"none: {found}" if isinstance(found, str) else found.told
    return f"{said}{capped}"


def late() -> bool:
    """Whether this process goes on without a library that the next one will have: then what it
    would measure is of little use."""
    return isinstance(_found(), str) and _state.late


def identity() -> str:
    """What runs, as measurements are kept under: the library's name, "none", or "late"."""
    found = _found()
    if isinstance(found, str):
        return "late" if _state.late else "none"
    return found.path.name


@dataclasses.dataclass(frozen=True)
class _Order:
    """A library to be compiled."""

    library: Path
    compiler: tuple[str, ...]
    level: isa.Level
    texts: dict[str, str]
    note: str = ""  #: what is unusual about it

    def loaded(self) -> "Library":
        """When it is there. Raises OSError if it cannot be loaded."""
        how = f"compiled here by {self.compiler[0]!r} into {str(self.library)!r}{self.note}"
        return Library(self.library, self.texts, f"{self.level.name}, {how}")

    def given(self) -> dict[str, object]:
        """As `build_process` reads it.

        One compiler more than there are cores: on a core that others use as well, each has a part.
        """
        return {
            "library": str(self.library),
            "sources": SOURCES,
            "texts": self.texts,
            "ahead": AHEAD,
            "compiler": self.compiler,
            "flags": [*FLAGS, *self.level.options],
            "links": LINKS,
            "at_once": calibrate.cores() + 1,
            "seconds": _LIMIT,
        }


class _Background:
    """A build in a process, and a group, of its own; all of it is killed when this process ends."""

    def __init__(self, order: _Order) -> None:
        """Start it. Raises OSError where no process can be started."""
        self.order, self.started = order, time.monotonic()
        command = [sys.executable or "", "-I", "-S", "-c", _COMPILER]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        atexit.register(self.stop)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it printed says why
            self.process.stdin.write(json.dumps(order.given()).encode() + b"\n")
            self.process.stdin.flush()  # and stays open: its end would be the end of the build

    def failed(self, patience: float, paced: float) -> str | None:
        """Why there is no library when it has ended.

        Raises TimeoutError if that takes longer than `patience`, or would at the pace that is seen
        after `paced` seconds.
        """
        paced = min(paced, patience)
        if (spent := self._seconds()) < paced and not self._ends(min(spent + _TELLS, paced)):
            _log.warning("compiling kernels for this processor, once (%s)", self.order.level.name)
        if not self._ends(paced):
            build = build_process.Build(self.order.given())
            if build.share() * patience < self._seconds() or not self._ends(patience):
                raise TimeoutError
        assert self.process.stdout is not None
        said = self.process.stdout.read().decode(errors="replace").strip()
        self.stop()
        try:
            why = json.loads(said.splitlines()[-1])["failed"]
        except (ValueError, IndexError, KeyError, TypeError):
            why = f"the process that compiles ended with {self.process.returncode}: {said[-300:]}"
        return None if why is None else str(why)

    def _seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    def _ends(self, within: float) -> bool:
        """Whether it has ended so many seconds after it began."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(within - self._seconds(), 0))
        return self.process.returncode is not None

    def stop(self) -> None:
        """Kill what is left of it."""
        atexit.unregister(self.stop)
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _State:
    """What this process has found out: a library, or why there is none."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.found: Library | str | None = None
        self.background: _Background | None = None
        self.late = False  #: it was still being compiled when patience ended


_state = _State()


def start() -> None:
    """Begin to compile where there is no library yet, without waiting for it."""
    with _state.lock:
        if _state.found is not None or _state.background is not None:
            return
        found = _look()
        if isinstance(found, _Order):
            try:
                _state.background = _Background(found)
                return
            except OSError as error:
                found = f"no process to compile in: {error}"
        _state.found = found


def be_patient(seconds: float = _LIMIT) -> None:
    """What this process loads waits so long for a library that is being compiled: who measures, or
    answers for days, is not to go on without."""
    global PATIENCE, PACED
    PATIENCE = PACED = seconds


def wait() -> None:
    """Wait for a library that is being compiled for as long as compiling may take: where a model is
    several times as large without one, or cannot be had at all. Whoever has given up on it before
    waits as well."""
    with _state.lock:
        start()
        if _state.background is not None and (_state.found is None or _state.late):
            _state.late = False
            longest = max(PATIENCE, _LIMIT)
            _state.found = _made(_state.background, longest, longest)


def _found() -> Library | str:
    if _state.found is not None:  # as in all calls but the first
        return _state.found
    with _state.lock:
        start()
        if _state.found is None and _state.background is not None:
            _state.found = _made(_state.background, PATIENCE, PACED)
        assert _state.found is not None
        return _state.found


def _made(background: _Background, patience: float, paced: float) -> Library | str:
    """What a build has come to, within the seconds that are given to it."""
    order = background.order
    try:
        failed = background.failed(patience, paced)
    except TimeoutError:
        took = time.monotonic() - background.started
        why = f"still being compiled after {took:.2g} s; the next start has them"
        _log.warning("going on without compiled kernels: %s", why)
        with contextlib.suppress(OSError):  # it has what nobody else needs
            os.setpriority(os.PRIO_PGRP, background.process.pid, _LOWEST)
        _state.late = True
        return why
    if failed is not None:
        return failed
    try:
        return order.loaded()
    except OSError as error:
        why = f"the library made by {order.compiler[0]!r} cannot be loaded: {error}"
        build_process.remember_failure(order.library, why)
        return why


def _look() -> Library | _Order | str:
    """A library that is there, what to compile if none is, or why none can be had."""
    level = isa.level()
    if os.environ.get("OUTRIDER_COMPILED") == "0":
        return "OUTRIDER_COMPILED is 0"
    texts, note = dict(TEXTS), ""
    shipped = shipped_library(level, texts, FLAGS)
    if shipped is not None:
        try:
            return Library(shipped, texts, f"{level.name}, shipped with the package")
        except OSError as error:  # of another system: one is made here
            note = f" (the shipped one cannot be loaded: {error})"
    if not sys.platform.startswith("linux"):
        return f"none was shipped for {sys.platform} with {level.name}, and Linux alone compiles"
    if "frozen" in vars(sys):  # its executable is no Python, but would start the program again
        return "a frozen program (PyInstaller and its kin) compiles none"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    there = shutil.which(compiler[0])
    if there is None:
        return f"no C compiler: {compiler[0]!r} is not there"
    about = Path(there).stat()
    for one in reversed(isa.up_to(level)):
        options = one.options
        made_of = texts, compiler, there, about.st_mtime_ns, about.st_size, FLAGS, LINKS, options
        name = f"kernels-{isa.family()}-{one.name}-{_digest(made_of)}.so"
        found = _kept(name, _Order(Path(name), tuple(compiler), one, texts, note))
        if not isinstance(found, _Order) or _knows(compiler, options) or not _knows(compiler, ()):
            break
        note = f" ({compiler[0]!r} does not know {' '.join(options)})"
    return found


def _knows(compiler: list[str], options: tuple[str, ...]) -> bool:
    """Whether a compiler takes these options: older ones lack those of newer processors."""
    asked = [*compiler, *options, "-E", "-x", "c", os.devnull, "-o", os.devnull]
    try:
        done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=1)
        return not done.returncode
    except (OSError, subprocess.TimeoutExpired):  # its build will say why
        return True


def _kept(name: str, order: _Order) -> Library | _Order | str:
    """The library of this name in a folder of ours, or where and whether to make it."""
    usual = calibrate.cache_dir() / "kernels"
    unfit = _unfit(usual)
    if unfit != _NOEXEC:
        found = _in(usual, name, order)
        if not isinstance(found, _Order) or unfit is None:
            return found
    other = calibrate.homeless() / "kernels"
    if _unfit(other) is not None:
        return (
            f"no folder to keep a library in: neither {str(usual)!r} ({unfit}) nor {str(other)!r} "
            "can be written to and run from; set XDG_CACHE_HOME to one that can"
        )
    note = f"{order.note} ({str(usual)!r} is {unfit})"
    return _in(other, name, dataclasses.replace(order, note=note))


def _in(folder: Path, name: str, order: _Order) -> Library | _Order | str:
    here = dataclasses.replace(order, library=folder / name)
    if build_process.whole(here.library):
        try:
            return here.loaded()
        except OSError:  # made by another system in the same home, perhaps
            with contextlib.suppress(OSError):
                here.library.unlink()
    failed = build_process.failure(here.library)
    return here if failed is None else f"{failed} (not tried again for a day)"


def _unfit(folder: Path) -> str | None:
    """Why no library is made and loaded there; None: it is."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return _NOEXEC
    return None if os.access(folder, os.W_OK | os.X_OK) else "read-only"


def _digest(about: object) -> str:
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]
