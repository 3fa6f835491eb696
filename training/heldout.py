"""Which modules are never trained on: by name, in every Python version and every package."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

MODULES = frozenset(
    """
    bisect calendar cmd colorsys configparser contextlib csv difflib fileinput fractions getopt
    glob graphlib gzip heapq netrc numbers poplib queue quopri reprlib sched shelve shlex
    statistics string tempfile textwrap timeit zipapp
    """.split()
)


def is_held_out(path: str) -> bool:
    """Whether a library file, its tests or a copy of it elsewhere carries a held-out name.

    >>> is_held_out("test/test_csv.py"), is_held_out("_pydatetime.py")
    (True, False)
    """
    parts = PurePosixPath(path).with_suffix("").parts
    return any(
        name in MODULES
        for part in parts
        for name in (part, part.lstrip("_"), re.sub(r"^_?test_?", "", part))
    )
