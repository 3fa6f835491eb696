"""Libraries that a wheel carries: one for each level of its platform, made by
`tools/build_kernels.py`.

A library's name says for which system, processor and level it is, of which sources it was made, and
what is in it: other sources beside it, or damage, leave it alone.
"""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.models import isa

FOLDER = Path(__file__).with_name("shipped")


def stem(
    system: str,
    family: str,
    level: isa.Level,
    texts: Mapping[str, str],
    flags: Sequence[str],
) -> str:
    """A library's name but for what is in it."""
    made_of = sorted(texts.items()), tuple(flags), level.options
    return f"kernels-{system}-{family}-{level.name}-{_digest(repr(made_of).encode())}"


def named(stem: str, made: bytes) -> str:
    """The whole name of a library that holds these bytes."""
    return f"{stem}-{_digest(made)}.so"


def found(level: isa.Level, texts: Mapping[str, str], flags: Sequence[str]) -> Path | None:
    """The library of these sources for this machine; None: none is here, or it is damaged."""
    if not FOLDER.is_dir():
        return None
    begins = stem(sys.platform, isa.family(), level, texts, flags)
    for path in sorted(FOLDER.glob(f"{begins}-*.so")):
        try:
            if path.name == named(begins, path.read_bytes()):
                return path
        except OSError:
            continue
    return None


def _digest(made: bytes) -> str:
    return hashlib.sha256(made).hexdigest()[:16]
