"""Memory for weights: pieces that do not overlap, given back when nothing uses them."""

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch

from outrider.models.cpu_kernels import packed_linear


@pytest.mark.parametrize("count", [1, 64, 100, 5 << 20, 17 << 20, (32 << 20) + 1])
def test_a_piece_is_as_long_as_asked_and_begins_a_line(count):
    piece = packed_linear.empty(count)
    assert piece.shape == (count,)
    assert piece.dtype == torch.uint8
    assert piece.data_ptr() % 64 == 0


def switched_on():
    """Whether this system gives large pages to what asks for them."""
    told = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return told.exists() and "[never]" not in told.read_text()


@pytest.mark.skipif(not switched_on(), reason="the system gives no pages of 2 MiB")
def test_the_system_knows_the_mapping_as_one_that_may_have_large_pages():
    """Shared memory would not be: `hg` is on what was advised, `sh` on what is shared."""
    piece = packed_linear.empty(40 << 20).fill_(1)
    at, found = piece.data_ptr(), None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= at < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            found = line.split()[1:]
    assert found is not None
    assert "hg" in found
    assert "sh" not in found


def test_pieces_do_not_overlap():
    sizes = [1, 63, 64, 65, 4096, 3 << 20, 100, 20 << 20, 7]
    pieces = [packed_linear.empty(size).fill_(number) for number, size in enumerate(sizes)]
    for number, piece in enumerate(pieces):
        assert bool((piece == number).all())


def test_a_mapping_ends_with_what_lies_in_it(monkeypatch):
    mapped = []
    kept = packed_linear.mmap.mmap

    class Watched(kept):
        def __init__(self, *given, **named):
            super().__init__()
            mapped.append(weakref.ref(self))

    monkeypatch.setattr(packed_linear.mmap, "mmap", Watched)
    piece = packed_linear.empty(40 << 20)
    gc.collect()
    assert mapped[0]() is not None
    del piece
    gc.collect()
    assert mapped[0]() is None


def test_what_is_left_of_a_mapping_made_in_inference_mode_is_written_outside_it(monkeypatch):
    monkeypatch.setattr(packed_linear, "_rest", torch.empty(0, dtype=torch.uint8))
    with torch.inference_mode():
        first = packed_linear.empty(100)
    first.fill_(1)
    packed_linear.empty(100).fill_(2)
    assert first.unique().tolist() == [1]
