"""Memory of the host that is read from end to end in every step: weights, and long caches.

In pages of 4 KiB a processor looks up an address every 64 lines, and fetches nothing ahead across a
page's end; in pages of 2 MiB, which a system gives where it is asked and has them, it reads faster.
"""

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

_PAGE = 2 << 20
_MAPPING = 32 << 20  #: bytes that are asked for at once
_LINE = 64  #: bytes of a processor's cache line
_lock = threading.Lock()
#: Of the mapping that small pieces are cut from.
_rest = torch.empty(0, dtype=torch.uint8, device="cpu")


def empty(count: int) -> Tensor:
    """So many bytes for weights, uint8, from a whole cache line on, not set to anything.

    What is smaller than a page shares a mapping with what is made next to it; a mapping is given
    back when nothing in it is used any more.

    >>> empty(100).shape, empty(100).data_ptr() % 64
    (torch.Size([100]), 0)
    """
    global _rest
    room = -(-count // _LINE) * _LINE
    with _lock:
        if room > _MAPPING // 2:
            return mapped(room)[:count]
        if room > _rest.numel():
            _rest = mapped(_MAPPING)
        with torch.inference_mode(False):
            piece, _rest = _rest[:count], _rest[room:]
        return piece


def mapped(size: int, large_pages: bool = True) -> Tensor:
    """So many bytes of zeros or more, uint8; what is never touched takes no memory.

    `large_pages`: from the start of a page of 2 MiB on, and whole ones. A page is there whole once
    a byte of it is touched.

    >>> mapped(100, large_pages=False).shape, mapped(100).data_ptr() % (2 << 20)
    (torch.Size([100]), 0)
    """
    if large_pages:
        size = -(-size // _PAGE) * _PAGE
    room = size + (_PAGE if large_pages else 0)
    if os.name != "posix":
        pages = mmap.mmap(-1, room)
    else:
        # private: shared memory, which `mmap` maps otherwise, has a switch of its own that is off
        pages = mmap.mmap(-1, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux alone has them
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them: pages stay small
    with torch.inference_mode(False):  # it is written to in and outside inference mode
        whole = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping while it lives
        first = -whole.data_ptr() % _PAGE if large_pages else 0
        return whole[first : first + size]


def zeros(like: Tensor, shape: Sequence[int], large_pages: bool = False) -> Tensor:
    """Zeros in the dtype and on the device of `like`; on a CPU what is never written to takes
    neither time nor memory, where `torch.zeros` writes it all.

    >>> zeros(torch.ones(1), (2, 3)).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_zeros(shape)
    return mapped(size, large_pages)[:size].view(like.dtype).view(shape)


#: Where files are mapped: the first address of each piece, and the one behind it.
Mappings: TypeAlias = list[tuple[int, int]]
_MAPS = Path("/proc/self/maps")  #: of Linux


def mappings() -> Mappings:
    """Pieces of files that this process has mapped for itself alone; [] where no system says."""
    found: Mappings = []
    with suppress(OSError):
        for line in _MAPS.read_text(errors="replace").splitlines():
            span, access, _, _, inode, *path = line.split(maxsplit=5)
            if access[3] == "p" and inode != "0" and not path[0].startswith("/dev/"):
                first, _, end = span.partition("-")
                found.append((int(first, 16), int(end, 16)))
    return found


def give_back(tensor: Tensor, files: Mappings) -> None:
    """Let the system have the pages that a contiguous tensor was read from, if they are a file's.

    A file that weights are copied from is memory of this process as far as it was read. Whoever
    asks for such pages again gets what the file has: so for tensors that nothing was written to,
    and that were there when `files` were looked up.

    >>> kept = torch.ones(1 << 20)
    >>> give_back(kept, mappings())
    >>> bool(kept.all())
    True
    """
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if any(start <= first and end <= stop for start, stop in files):
        forget(tensor)


def forget(tensor: Tensor) -> None:
    """Let the system have the pages of a contiguous tensor on a CPU that nobody reads any more,
    ahead of its end: what is in it afterwards is not said."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and first < end:
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def trim() -> None:
    """Let the system have what was freed, which the C library keeps for what is made next."""
    if os.name == "posix":
        with suppress(AttributeError):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)
