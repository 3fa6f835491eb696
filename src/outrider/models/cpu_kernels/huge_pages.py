"""Memory for weights in pages of 2 MiB, where the system gives them when asked.

A step reads all weights once. In pages of 4 KiB a processor looks up an address every 64 lines, and
fetches nothing ahead across a page's end. What is smaller than a page shares a mapping with what is
made next to it; a mapping is given back when nothing in it is used any more.
"""

import mmap
import threading

import torch
from torch import Tensor

_PAGE = 2 << 20
_MAPPING = 32 << 20  #: bytes that are asked for at once
_LINE = 64  #: bytes of a processor's cache line
_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)  #: of the mapping that small pieces are cut from


def empty(count: int) -> Tensor:
    """So many bytes, uint8, from a whole cache line on, not set to anything.

    >>> empty(100).shape, empty(100).data_ptr() % 64
    (torch.Size([100]), 0)
    """
    global _rest
    room = -(-count // _LINE) * _LINE
    with _lock:
        if room > _MAPPING // 2:
            return _mapping(room)[:count]
        if room > _rest.numel():
            _rest = _mapping(_MAPPING)
        with torch.inference_mode(False):
            piece, _rest = _rest[:count], _rest[room:]
        return piece


def _mapping(room: int) -> Tensor:
    """Whole pages of at least so many bytes."""
    size = -(-room // _PAGE) * _PAGE
    mapped = mmap.mmap(-1, size + _PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux alone
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them: pages stay small
    with torch.inference_mode(False):  # pieces of it are written to in and outside inference mode
        whole = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping while it lives
        first = -whole.data_ptr() % _PAGE
        return whole[first : first + size]
