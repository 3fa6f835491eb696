"""Memory for weights and caches: pieces that do not overlap, given back when nothing uses them."""

import gc
import mmap
import re
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider.models import memory
from outrider.models.cache import FIRST, SlotCache
from outrider.models.cpu_kernels.packed_linear import PackedWeight, unsupported_reason


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


def resident(path):
    """Bytes of a file's mappings that are in memory as this process's."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux alone tells it")
_MANY = 8 << 20  #: bytes


@linux
def test_pages_of_a_file_are_given_back_and_read_anew(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"first": torch.full((_MANY,), 3, dtype=torch.uint8), "second": torch.ones(4)}, path)
    read = load_file(path)
    assert read["first"].unique().tolist() == [3]
    assert resident(path) >= _MANY
    memory.give_back(read["first"], [])
    assert resident(path) >= _MANY
    memory.give_back(read["first"], memory.mappings())
    assert resident(path) < _MANY // 8
    assert read["first"].unique().tolist() == [3]
    assert read["second"].tolist() == [1] * 4


@linux
@pytest.mark.parametrize("make", [torch.ones, lambda count: memory.mapped(4 * count).fill_(1)])
def test_memory_that_is_no_files_is_left_alone(make):
    kept = make(_MANY // 4)
    memory.give_back(kept, memory.mappings())
    assert bool(kept.all())


def test_zeros_on_a_device_or_of_nothing():
    assert memory.zeros(torch.empty(1, device="meta"), (2, 3)).is_meta
    assert memory.zeros(torch.ones(1, dtype=torch.bfloat16), (2, 0)).shape == (2, 0)
    assert memory.zeros(torch.ones(1, dtype=torch.bfloat16), (2, 3)).dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """The most bytes that one operation made anew."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.most = max(self.most, made.nbytes)
        return made


@pytest.mark.skipif(bool(unsupported_reason("q8_0", 1, 32, "cpu")), reason="nothing is compiled")
@pytest.mark.parametrize("form", ["f32", "bf16", "f16", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_is_packed_a_part_at_a_time(form, turned):
    """Of whatever type, and in the bits of all at once."""
    weight = torch.randn(96, 40_000).T if turned else torch.randn(40_000, 96)
    with Largest() as seen:
        packed = PackedWeight.from_dense(weight, form)
    assert seen.most <= 1 << 20 < weight.nbytes // 8
    few = torch.tensor([0, 2687, 2688, 39_935, 39_936, 39_999])  # ends of parts, and of groups
    assert torch.equal(packed.rows(few), PackedWeight.from_dense(weight[few], form).dequantize())


@linux
@pytest.mark.skipif(bool(unsupported_reason("q8_0", 1, 32, "cpu")), reason="nothing is compiled")
def test_a_model_that_was_passed_keeps_what_was_written_to_it(tmp_path):
    """Its tensors may be a file's, too: pages of those would come back as the file has them."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 512}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table.mul_(2)
    before = table.clone()
    outrider.load(model, dtype="int8", threads=1)
    assert torch.equal(table, before)


class Resident(TorchDispatchMode):
    """The most bytes of this process that were in memory behind an operation, beyond those at first
    (as far as it does not free any)."""

    def __init__(self):
        super().__init__()
        self.first, self.most = self.now(), 0

    @staticmethod
    def now():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.most = max(self.most, self.now() - self.first)
        return made


def filled(rows, capacity):
    """A cache of 16 layers whose first slots are all written to, and the bytes of these."""
    cache = SlotCache(16, rows, capacity)
    for layer in cache.layers:
        layer.buffers(2, 64, torch.zeros(1))
    (stack,) = cache.stacks
    stack.copy_(torch.randn(1, 1, 2, FIRST, 64).expand_as(stack))
    cache.width = FIRST
    return cache, stack.nbytes


@linux
@pytest.mark.parametrize("shared", [False, True])
def test_a_cache_grows_layer_by_layer(shared):
    """What was there is not there twice, unless it is another cache's. (A single row comes to lie
    in pages of 2 MiB, which are there whole.)"""
    cache, size = filled(2, 4 * FIRST)
    before = cache.stacks[0].clone()
    held = cache.stacks[0] if shared else None
    cache.shared = shared
    with Resident() as seen:
        cache.begin(torch.tensor([[FIRST]] * 2), FIRST + 1, FIRST + 1)
    assert torch.equal(cache.stacks[0][..., :FIRST, :], before)
    assert held is None or torch.equal(held, before)
    assert (seen.most > 0.9 * size) if shared else (seen.most < 0.2 * size)


@linux
@pytest.mark.parametrize("leaving", [False, True])
def test_rows_that_join_are_copied_layer_by_layer(leaving):
    """A cache that nobody reads any more is given back meanwhile; any other keeps its rows."""
    slab = SlotCache(16, 4, FIRST).narrow(0)
    first, size = filled(1, FIRST)
    slab.put([0], first)
    second, _ = filled(1, FIRST)
    before = second.stacks[0].clone()
    second.leaving = leaving
    with Resident() as seen:
        slab.put([1], second)
    assert torch.equal(slab.stacks[0][:, 1:2], before)
    assert torch.equal(slab.stacks[0][:, :1], first.stacks[0])
    assert leaving or torch.equal(second.stacks[0], before)
    assert (seen.most < 0.2 * size) if leaving else (seen.most > 0.9 * size)
