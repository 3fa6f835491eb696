"""Compiled kernels that one run of the tests leaves to the next, in build/test-kernels."""

import atexit
import contextlib
import os
import shutil
from pathlib import Path

KEPT = Path(__file__).parents[1] / "build" / "test-kernels"


def keep(cache: Path) -> None:
    """Take what an earlier run compiled into a cache folder, and leave there what this one does.

    A library's name is of all it was made from, and its end says whether it is whole, so one that
    is taken is the one that would be compiled again.
    """
    used = cache / "outrider" / "kernels"
    _copy(KEPT, used)
    atexit.register(_copy, used, KEPT)


def _copy(source: Path, to: Path) -> None:
    with contextlib.suppress(OSError):  # a full or read-only disk: compiled once more, then
        to.mkdir(parents=True, exist_ok=True)
        for library in source.glob("kernels-*.so"):
            if not (to / library.name).exists():
                part = to / f"{library.name}.{os.getpid()}"
                shutil.copy2(library, part)
                part.replace(to / library.name)
