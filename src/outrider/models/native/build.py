"""`kernels.c`, compiled once on the machine that runs it; the library stays beside calibrations.

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
from functools import lru_cache
from pathlib import Path

from outrider.models import calibrate

SOURCE = Path(__file__).with_name("kernels.c")
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


@lru_cache(maxsize=1)
def _found() -> ctypes.CDLL | str:
    if os.environ.get("OUTRIDER_COMPILED") == "0":
        return "OUTRIDER_COMPILED is 0"
    if not sys.platform.startswith("linux"):
        return f"compiled on Linux alone, this is {sys.platform}"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"no C compiler: {compiler[0]!r} is not there"
    name = hashlib.sha256(repr((SOURCE.read_text(), compiler, FLAGS, TUNED)).encode())
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
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(scratch), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
