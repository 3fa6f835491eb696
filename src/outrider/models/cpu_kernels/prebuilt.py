"""Libraries that a wheel carries: one for each level of its platform, made by
`tools/build_kernels.py`.

A library's name says for which system, processor and level it is, of which sources it was made, and
what is in it: other sources beside it, or damage, leave it alone. It runs its threads on the OpenMP
that torch has loaded, see `threads.c`.
"""

import ctypes
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from outrider.models import isa

#: What is linked to the kernels besides; the compiler that makes wheels has no OpenMP library.
THREADS = Path(__file__).with_name("threads.c")
FOLDER = Path(__file__).with_name("shipped")
_RUNTIMES = ("libgomp", "libomp", "libiomp5")  #: of OpenMP, as torch's own files begin
#: What `outrider_threads` takes, in its order.
_WANTED = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")


def stem(
    system: str,
    family: str,
    level: isa.Level,
    texts: Mapping[str, str],
    flags: Sequence[str],
) -> str:
    """A library's name but for what is in it."""
    made_of = sorted(texts.items()), THREADS.read_text(), tuple(flags), level.options
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


def connect(library: ctypes.CDLL) -> bool:
    """Give a library the threads that torch has; False: there are none, and it runs one."""
    for runtime in _runtimes():
        try:
            wanted = [ctypes.cast(runtime[name], ctypes.c_void_p) for name in _WANTED]
        except AttributeError:
            continue
        library.outrider_threads(*wanted)
        return True
    return False


def _runtimes() -> Iterator[ctypes.CDLL]:
    """Where functions of OpenMP may be: what all libraries of the process see, and torch's own."""
    import torch  # late: `found` is asked before it is imported

    yield ctypes.CDLL(None)
    lies = Path(torch.__file__).parent
    for folder in (lies / "lib", lies.parent / "torch.libs"):
        for path in sorted(folder.glob("lib*")):
            if path.name.startswith(_RUNTIMES):
                try:
                    yield ctypes.CDLL(str(path))  # loaded with torch: the same again
                except OSError:
                    continue


def _digest(made: bytes) -> str:
    return hashlib.sha256(made).hexdigest()[:16]
