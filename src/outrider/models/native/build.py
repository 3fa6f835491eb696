"""`SOURCES`, compiled once on the machine that runs them, into a library that stays beside
calibrations.

The compiler is what `CC` names, else `cc`. Where there is none, or OUTRIDER_COMPILED is 0, torch's
operators run instead; `unbuilt` says why, and so does `--verbose`.

A process runs the sources that lay there when it imported this module, whatever has replaced them
since: another version's would be called with arguments that it reads otherwise. A library's name
says what it was made of, it is written elsewhere and moved there whole, with a digest of itself at
its end: a damaged one would end the process, so it is built anew. A function is only called with
the arguments that its source declares.
"""

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.models import calibrate, isa

SOURCES = (
    "attend.c",
    "attend_tiles.c",
    "kernels.c",
    "int8.c",
    "cross.c",
    "block.c",
    "draws.c",
    "logits.c",
    "tiles.c",
    "packed_linear.c",
)
SHARED = ("lanes.h", "draws.h", "attend.h", "tiles.h", "packed_vectors.h")
#: What is compiled: read now, together with the modules that call it.
TEXTS = {name: Path(__file__).with_name(name).read_text() for name in (*SOURCES, *SHARED)}
#: Sums keep their order, and what is not a number stays none: nothing of -ffast-math.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
_PATIENCE = 120  #: seconds; a second is usual
_DIGEST = 32  #: bytes of a library's digest, behind its own


class Library:
    """A library made of `texts`, and its functions."""

    def __init__(self, path: Path, texts: dict[str, str]) -> None:
        self._loaded, self._texts = ctypes.CDLL(str(path)), texts
        self._known: dict[tuple[str, tuple[type, ...]], Callable[..., int]] = {}

    def function(self, name: str, types: tuple[type, ...]) -> Callable[..., int]:
        """The function of this name. Raises TypeError if it does not take these."""
        known = self._known.get((name, types))
        if known is None:
            takes = taken(name, self._texts)
            if takes != types:
                raise TypeError(
                    f"{name} takes {_named(takes)}, and would be given {_named(types)}: files of "
                    "two versions of outrider lie side by side; install it anew, or start again "
                    "if that has just been done"
                )
            found = self._loaded[name]
            found.argtypes = types
            known = self._known[name, types] = found
        return known


def taken(name: str, texts: dict[str, str]) -> tuple[type, ...]:
    """What a function takes, by the source that defines it; nothing if none does.

    >>> taken("twice", {"twice.c": "int twice(int64_t count, const float *x) {"})
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


@lru_cache(maxsize=1)
def _found() -> Library | str:
    if os.environ.get("OUTRIDER_COMPILED") == "0":
        return "OUTRIDER_COMPILED is 0"
    if not sys.platform.startswith("linux"):
        return f"compiled on Linux alone, this is {sys.platform}"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"no C compiler: {compiler[0]!r} is not there"
    texts = dict(TEXTS)
    tuned = isa.level().options
    name = hashlib.sha256(repr((texts, compiler, FLAGS, tuned)).encode())
    path = calibrate.cache_dir() / f"kernels-{calibrate.key()}-{name.hexdigest()[:16]}.so"
    if whole(path):
        try:
            return Library(path, texts)
        except OSError:
            pass  # made by another system in the same home, perhaps
    try:
        compiled(path, texts, [*compiler, *tuned])
    except subprocess.SubprocessError as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"{compiler[0]!r} failed: {said.strip()[-300:]}"
    except OSError as error:
        return f"no library could be made in {str(path.parent)!r}: {error}"
    try:
        return Library(path, texts)
    except OSError as error:
        return f"the library made by {compiler[0]!r} cannot be loaded: {error}"


def whole(path: Path) -> bool:
    """Whether a library is there, as `compiled` wrote it."""
    try:
        made = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(made[:-_DIGEST]).digest() == made[-_DIGEST:]


def compiled(path: Path, texts: dict[str, str], compiler: list[str]) -> None:
    """Write a library of these texts there, in one piece: several processes, and threads of one,
    may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent) as folder:
        for name, text in texts.items():
            Path(folder, name).write_text(text)
        made = Path(folder, path.name)
        sources = [str(Path(folder, name)) for name in SOURCES]
        command = [*compiler, *FLAGS, *sources, "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE)
        with made.open("ab") as file:  # what is behind a library's own end is not loaded
            file.write(hashlib.sha256(made.read_bytes()).digest())
        made.replace(path)
