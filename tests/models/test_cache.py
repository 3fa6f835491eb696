"""Slots: entries are written where they are told, and only an accepted path moves."""

import pytest
import torch

from outrider import Engine, SamplingParams, StopConditions
from outrider.drafters import DraftModel, DynamicTree
from outrider.models import LlamaRunner, TransformersRunner, TreeDecoder, cache
from outrider.models.cache import SlotCache
from tiny import PROMPTS, decode, llama, pair, perturbed

CAPACITY = 12
HEADS = {"stacked": [2, 2, 2], "loose": [2, 1, 4], "mixed": [2, 2, 1]}


def filled(rows, heads):
    """A cache whose entry at (layer, row, head, slot) is a number made of these."""
    cache = SlotCache(len(heads), rows, CAPACITY)
    cache.begin(torch.arange(CAPACITY).expand(rows, -1), CAPACITY, 0)
    for index, (layer, count) in enumerate(zip(cache.layers, heads, strict=True)):
        entries = torch.arange(rows * count * CAPACITY).view(rows, count, CAPACITY, 1)
        entries = (entries + 10_000 * index).float().expand(-1, -1, -1, 3)
        layer.update(entries.clone(), -entries.clone())
    return cache


def buffers(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rows", [1, 3])
def test_keep_moves_the_path_next_to_its_root(rows, heads):
    cache = filled(rows, heads)
    assert (len(cache.stacks) == 1) == (len(set(heads)) == 1)
    before = buffers(cache)
    first = torch.tensor([2, 0, 5])[:rows]
    path = torch.tensor([[2, 5, 6], [1, 3, -1], [-1, -1, -1]])[:rows]
    cache.keep(first, path)
    for (keys, values), (old_keys, old_values) in zip(buffers(cache), before, strict=True):
        for row in range(rows):
            here = int(first[row])
            for slot in range(CAPACITY):
                depth = slot - here
                node = int(path[row, depth - 1]) if 1 <= depth <= 3 else -1
                source = here + node if node >= 0 else slot
                assert torch.equal(keys[row, :, slot], old_keys[row, :, source])
                assert torch.equal(values[row, :, slot], old_values[row, :, source])


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_take_selects_rows_and_shares_nothing(heads):
    cache = filled(3, heads)
    before = buffers(cache)
    few = cache.take([2, 0])
    for (keys, values), (old_keys, old_values) in zip(buffers(few), before, strict=True):
        assert torch.equal(keys, old_keys[[2, 0]])
        assert torch.equal(values, old_values[[2, 0]])
    few.keep(torch.tensor([1, 1]), torch.tensor([[3], [2]]))
    few.begin(torch.tensor([[4], [6]]), CAPACITY, 0)
    for layer, count in zip(few.layers, heads, strict=True):
        layer.update(torch.zeros(2, count, 1, 3), torch.zeros(2, count, 1, 3))
    for (keys, values), (old_keys, old_values) in zip(buffers(cache), before, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_write_touches_its_slots_only(rows):
    cache = filled(rows, [2])
    before = buffers(cache)[0][0]
    slots = torch.tensor([[3, 4], [0, 1], [9, 10]])[:rows]
    cache.begin(slots, 8, 0)
    keys, _ = cache.layers[0].update(torch.full((rows, 2, 2, 3), 7.0), torch.zeros(rows, 2, 2, 3))
    assert keys.shape == (rows, 2, 8, 3)
    whole = cache.layers[0].keys
    for row in range(rows):
        for slot in range(CAPACITY):
            written = slot in slots[row].tolist()
            expected = torch.full((2, 3), 7.0) if written else before[row, :, slot]
            assert torch.equal(whole[row, :, slot], expected)


def test_an_empty_cache_can_be_kept_and_taken():
    cache = SlotCache(2, 3, CAPACITY)
    cache.keep(torch.zeros(3, dtype=torch.int64), torch.full((3, 2), -1))
    assert cache.take([1]).rows == 1


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_grows_and_keeps_its_entries(rows, heads, monkeypatch):
    whole = filled(rows, heads)
    monkeypatch.setattr(cache, "FIRST", 4)
    grown = SlotCache(len(heads), rows, CAPACITY)
    assert grown.size == 4
    for start, stop, size in ((0, 4, 4), (4, 6, 8), (6, CAPACITY, CAPACITY)):
        grown.begin(torch.arange(start, stop).expand(rows, -1), stop, 0)
        assert grown.size == size
        for layer, full in zip(grown.layers, whole.layers, strict=True):
            layer.update(full.keys[:, :, start:stop], full.values[:, :, start:stop])
    for path in ([2, 5, 6], [1, -1, -1]):
        for one in (whole, grown):
            one.keep(torch.full((rows,), 3), torch.tensor([path] * rows))
    for (keys, values), (old_keys, old_values) in zip(buffers(grown), buffers(whole), strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("runner", ["lean", "transformers"])
@pytest.mark.parametrize("shape", ["chain", "tree", "dynamic"])
def test_texts_do_not_depend_on_when_a_cache_grows(runner, shape, monkeypatch):
    target, small = pair(runner=runner)
    drafter = {
        "chain": DraftModel(small, (1, 1, 1)),
        "tree": DraftModel(small, (2, 2)),
        "dynamic": DynamicTree(small, 8, 3, 3),
    }[shape]
    settings = [SamplingParams(0), SamplingParams(1.0, seed=1), SamplingParams(0.8, seed=2)]

    def text():
        return decode(Engine(target, drafter), PROMPTS[:3], settings, StopConditions(200))

    expected, before = text()
    monkeypatch.setattr(cache, "FIRST", 130)
    grown, run = text()
    assert grown == expected
    assert run.stats.accepted == before.stats.accepted > 0
    assert run.batch.cache.size > 130


@pytest.mark.parametrize("runner", [lambda m: LlamaRunner(m, False), TransformersRunner])
def test_a_long_context_does_not_take_its_memory_at_once(runner):
    model = llama(max_position_embeddings=131_072)
    target, small = (TreeDecoder(runner(m)) for m in (model, perturbed(model, 0.12)))
    run = Engine(target, DraftModel(small, (2, 1))).run(
        [PROMPTS[0]], SamplingParams(0), StopConditions(None)
    )
    for _ in range(3):
        next(run)
    kept = run.batch.cache
    assert kept.capacity > 131_072
    assert kept.layers[0].keys.shape[2] == cache.FIRST
    assert run.batch.memory.layers[0].keys.shape[2] == cache.FIRST


def test_a_finished_run_leaves_no_cache_behind():
    """Without the cyclic collector: buffers of finished runs would pile up until it comes."""
    import gc
    import weakref

    from outrider import Engine, SamplingParams, StopConditions
    from tiny import DRAFTERS, PROMPTS, pair

    target, small = pair()
    engine = Engine(target, DRAFTERS["tree"](small))
    gc.collect()
    gc.disable()
    try:
        run = engine.run(list(PROMPTS[:3]), [SamplingParams(1.0, seed=1)] * 3, StopConditions(6))
        blocks = run.step()
        cache = weakref.ref(run.batch.cache)
        assert len([*blocks, *run]) > len(blocks)
        del run
        assert cache() is None
    finally:
        gc.enable()
