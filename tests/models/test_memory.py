"""Memory for weights and caches: pieces that do not overlap, given back when nothing uses them."""

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch

from outrider.models import memory
from outrider.models.cache import FIRST, SlotCache


@pytest.mark.parametrize("count", [1, 64, 100, 5 << 20, 17 << 20, (32 << 20) + 1])
def test_a_piece_is_as_long_as_asked_and_begins_a_line(count):
    piece = memory.empty(count)
    assert piece.shape == (count,)
    assert piece.dtype == torch.uint8
    assert piece.data_ptr() % 64 == 0


def switched_on():
    """Whether this system gives large pages to what asks for them."""
    told = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return told.exists() and "[never]" not in told.read_text()


def flags(tensor):
    """Of the mapping that a tensor lies in."""
    at, inside = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= at < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not switched_on(), reason="the system gives no pages of 2 MiB")
def test_the_system_knows_the_mapping_as_one_that_may_have_large_pages():
    """Shared memory would not be: `hg` is on what was advised, `sh` on what is shared."""
    found = flags(memory.empty(40 << 20).fill_(1))
    assert "hg" in found
    assert "sh" not in found


@pytest.mark.skipif(not switched_on(), reason="the system gives no pages of 2 MiB")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_single_long_row_lies_in_large_pages(rows):
    """Beside it a short one would have a whole page for each head."""
    cache = SlotCache(1, rows, 3 * FIRST)
    keys, _ = cache.layers[0].buffers(2, 16, torch.zeros(1))
    assert "hg" not in flags(keys)
    keys[:, :, 5] = 7
    cache.begin(torch.tensor([[5]] * rows), 6, 6)
    cache.begin(torch.tensor([[FIRST]] * rows), FIRST + 1, FIRST + 1)
    longer = cache.layers[0].keys
    assert longer.shape[2] == 2 * FIRST
    assert longer.unique().tolist() == [0, 7]
    assert ("hg" in flags(longer)) == (rows == 1)


def test_pieces_do_not_overlap():
    sizes = [1, 63, 64, 65, 4096, 3 << 20, 100, 20 << 20, 7]
    pieces = [memory.empty(size).fill_(number) for number, size in enumerate(sizes)]
    for number, piece in enumerate(pieces):
        assert bool((piece == number).all())


def test_a_mapping_ends_with_what_lies_in_it(monkeypatch):
    mapped = []
    kept = memory.mmap.mmap

    class Watched(kept):
        def __init__(self, *given, **named):
            super().__init__()
            mapped.append(weakref.ref(self))

    monkeypatch.setattr(memory.mmap, "mmap", Watched)
    piece = memory.empty(40 << 20)
    gc.collect()
    assert mapped[0]() is not None
    del piece
    gc.collect()
    assert mapped[0]() is None


def test_what_is_left_of_a_mapping_made_in_inference_mode_is_written_outside_it(monkeypatch):
    monkeypatch.setattr(memory, "_rest", torch.empty(0, dtype=torch.uint8))
    with torch.inference_mode():
        first = memory.empty(100)
    first.fill_(1)
    memory.empty(100).fill_(2)
    assert first.unique().tolist() == [1]
