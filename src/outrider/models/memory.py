"""Memory of the host that is read from end to end in every step: weights, and long caches.

In pages of 4 KiB a processor looks up an address every 64 lines, and fetches nothing ahead across a
page's end; in pages of 2 MiB, which a system gives where it is asked and has them, it reads faster.
"""

import mmap
import os
import threading

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
