"""What `SOURCES` name, compiled once on the machine that runs it, into a library that stays beside
calibrations.

The compiler is what `CC` names, else `cc`. Where there is none, or OUTRIDER_COMPILED is 0, torch's
operators run instead; `unbuilt` says why, and so does `--verbose`.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from outrider.models import calibrate

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "int8.c", "cross.c", "block.c")]
SHARED = Path(__file__).with_name("lanes.h")
#: Sums keep their order, and what is not a number stays none: nothing of -ffast-math.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
#: The processor that compiles is the one that runs; vectors are as wide as it has them.
TUNED = ("-march=native", "-mprefer-vector-width=512")
_PATIENCE = 120  #: seconds; a second is usual


def unbuilt() -> str | None:
    """Why there is no library; None: there is one."""
    found = _found()
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL:
    """The library. Raises RuntimeError where there is none: see `unbuilt`."""
    found = _found()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@lru_cache(maxsize=16)
def function(name: str, types: tuple[type, ...]) -> Callable[..., int]:
    """A function of the library that takes these. Raises RuntimeError where there is none."""
    found = library()[name]
    found.argtypes = types
    called: Callable[..., int] = found
    return called


@lru_cache(maxsize=1)
def _found() -> ctypes.CDLL | str:
    if os.environ.get("OUTRIDER_COMPILED") == "0":
        return "OUTRIDER_COMPILED is 0"
    if not sys.platform.startswith("linux"):
        return f"compiled on Linux alone, this is {sys.platform}"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"no C compiler: {compiler[0]!r} is not there"
    texts = [path.read_text() for path in (*SOURCES, SHARED)]
    name = hashlib.sha256(repr((texts, compiler, FLAGS, TUNED)).encode())
    path = calibrate.cache_dir() / f"kernels-{calibrate.key()}-{name.hexdigest()[:16]}.so"
    try:
        if not path.exists():
            compiled(path, [*compiler, *TUNED])
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"{compiler[0]!r} failed: {said.strip()[-300:]}"


def compiled(path: Path, compiler: list[str]) -> None:
    """Write the library there, in one piece: two processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        command = [*compiler, *FLAGS, *map(str, SOURCES), "-o", str(scratch), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
