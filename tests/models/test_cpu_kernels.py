"""Compiled kernels compute what stands between a Llama's products, rows alike in every call."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from outrider.models import LlamaRunner, TreeDecoder
from outrider.models.cache import SlotCache
from outrider.models.cpu_kernels import (
    build,
    cross_attention,
    int8,
    layer_kernels,
    tile_kernels,
)
from outrider.models.prefill import causal
from outrider.testing import models
from outrider.types import Nodes

BF16 = torch.bfloat16
KINDS = (BF16, torch.float32)
SIZES = (48, 64)  #: of heads: the second is answered in tiles in bfloat16, where there are any
EACH = [pytest.param(size, kind, id=f"{size}-{kind}") for size in SIZES for kind in KINDS]


@pytest.fixture
def compiler():
    if build.unbuilt():
        pytest.skip(f"kernels are not compiled here: {build.unbuilt()}")


def call_of(heads, kv_heads, size, nodes, kind=BF16):
    shape = SimpleNamespace(heads=heads, kv_heads=kv_heads, size=size, eps=1e-5)
    tables = torch.randn(2, 512, size, generator=torch.Generator().manual_seed(size)).to(kind)
    return layer_kernels.CpuKernels(shape, *tables).open(nodes), tables


def tiled(size, kind=BF16):
    """Whether heads of this size are answered in tiles: queries and weights are rounded there."""
    return size % 32 == 0 and tile_kernels.unsupported_reason(torch.zeros(1, dtype=kind)) is None


def filled(rows, kv_heads, size, slots, kind=BF16):
    """A cache full of old entries."""
    cache = SlotCache(1, rows, slots)
    keys, values = cache.layers[0].buffers(kv_heads, size, torch.zeros(1, dtype=kind))
    keys.normal_()
    values.normal_()
    return cache, keys, values


def in_double(qkv, tables, nodes, keys, values, heads, kv_heads):
    """The same by torch in float64, and keys as they come to stand; queries as tiles have them."""
    batch, queries, _ = qkv.shape
    size, wide = keys.shape[-1], nodes.visible_BQW.shape[-1]
    cos, sin = (table[nodes.positions_BQ][:, :, None].double() for table in tables)
    x, kind = qkv.view(batch, queries, -1, size).double(), qkv.dtype
    turned = x * cos + x.roll(size // 2, -1) * sin
    keys, values = keys.clone(), values.clone()
    for row, slots in enumerate(nodes.slots_BQ):
        keys[row][:, slots] = turned[row, :, heads : heads + kv_heads].transpose(0, 1).to(kind)
        values[row][:, slots] = x[row, :, heads + kv_heads :].transpose(0, 1).to(kind)
    near = [t[:, :, :wide].double().repeat_interleave(heads // kv_heads, 1) for t in (keys, values)]
    mask = nodes.visible_BQW[:, None]
    asked = turned[:, :, :heads].transpose(1, 2)
    if tiled(size, kind):
        asked = asked.to(kind).double()
    out = F.scaled_dot_product_attention(asked, *near, mask)
    return out.transpose(1, 2).reshape(batch, queries, -1), keys, values


def random_nodes(batch, queries, tree):
    """Ragged rows of up to 180 tokens; a tree's nodes see each other at random."""
    first = torch.randint(1, 180, (batch, 1))
    slots = first + torch.arange(queries)
    nodes = causal(torch.zeros_like(slots), slots, 256)
    if not tree:
        return nodes
    seen = nodes.visible_BQW & (torch.rand(batch, queries, 256) < 0.5)
    seen.scatter_(2, slots[..., None], True)
    return Nodes(slots, slots, slots, seen, first[:, 0])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "batch", "queries"),
    [
        (4, 4, 64, 8, 1),
        (9, 3, 64, 2, 5),
        (4, 2, 16, 3, 7),
        (2, 2, 128, 2, 3),
        (4, 1, 80, 1, 40),  # many queries: what they read is widened once
        (9, 3, 64, 2, 70),
        (4, 4, 32, 2, 9),
        (4, 1, 160, 1, 6),
        (2, 1, 256, 1, 20),
    ],
)
@torch.inference_mode()
def test_attention_is_attention(heads, kv_heads, size, batch, queries, tree, kind):
    torch.manual_seed(heads + queries)
    nodes = random_nodes(batch, queries, tree)
    qkv = torch.randn(batch, queries, (heads + 2 * kv_heads) * size).to(kind)
    cache, keys, values = filled(batch, kv_heads, size, 300, kind)
    call, tables = call_of(heads, kv_heads, size, nodes, kind)
    expected, *stored = in_double(qkv, tables, nodes, keys, values, heads, kv_heads)
    out = call.attend(qkv, cache.layers[0])
    rtol, atol = (2**-7, 2e-3 if tiled(size) else 1e-3) if kind == BF16 else (1e-5, 2e-6)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(keys.double(), stored[0].double(), rtol=rtol, atol=1e-6)
    assert torch.equal(values, stored[1])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_norms_and_gates(kind):
    torch.manual_seed(0)
    rtol = 2**-7 if kind == BF16 else 1e-6
    call, _ = call_of(2, 2, 16, random_nodes(1, 1, False), kind)
    state, more, weight = torch.randn(3, 5, 48).to(kind)
    total, normed = call.norm(state[None], more[None], weight[0])
    assert torch.equal(total[0], state + more)
    expected = F.rms_norm((state + more).double(), (48,), weight[0].double(), 1e-5)
    torch.testing.assert_close(normed[0].double(), expected, rtol=rtol, atol=0)
    alone, _ = call.norm(state[None], None, weight[0])
    assert torch.equal(alone[0], state)
    both = 30 * torch.randn(4, 96).to(kind)
    gate, up = both.double().chunk(2, -1)
    expected = F.silu(gate) * up
    torch.testing.assert_close(call.gate(both).double(), expected, rtol=rtol, atol=1e-30)


@pytest.mark.usefixtures("compiler")
@torch.inference_mode()
def test_numbers_of_another_kind_are_refused():
    """They would be read as what they are not, and behind the end of what is there."""
    nodes = random_nodes(1, 2, False)
    call, qkv = call_of(2, 2, 16, nodes, torch.float32)[0], torch.randn(1, 2, 96)
    half = filled(1, 2, 16, 300)[0]
    with pytest.raises(TypeError, match=r"float32.*cache of torch.bfloat16"):
        call.attend(qkv, half.layers[0])
    with pytest.raises(TypeError, match=r"float32.*got.*bfloat16"):
        call.attend(qkv.to(BF16), filled(1, 2, 16, 300)[0].layers[0])
    with pytest.raises(TypeError, match=r"float32.*got.*bfloat16"):
        call.norm(qkv, qkv.to(BF16), torch.ones(96))
    with pytest.raises(TypeError, match=r"float32.*got.*bfloat16"):
        call.gate(qkv.to(BF16))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("size", "kind"), EACH)
@torch.inference_mode()
def test_what_is_not_a_number_stays_in_its_row(size, kind):
    torch.manual_seed(1)
    nodes = random_nodes(3, 2, False)
    qkv = torch.randn(3, 2, 6 * size).to(kind)
    cache, _, _ = filled(3, 2, size, 300, kind)
    clean = call_of(2, 2, size, nodes, kind)[0].attend(qkv, cache.layers[0])
    qkv[1] = torch.nan
    call, weight = call_of(2, 2, size, nodes, kind)[0], torch.ones(6 * size, dtype=kind)
    out = call.attend(qkv, cache.layers[0])
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    for x in (call.norm(qkv, qkv, weight)[1], call.gate(qkv)):
        assert x.isnan().flatten(1).all(1).tolist() == [False, True, False]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@torch.inference_mode()
def test_tiles_give_no_query_what_it_does_not_see(value):
    """A weight of 0 times infinity would be no number."""
    if not tiled(64):
        pytest.skip("no tiles")
    torch.manual_seed(3)
    at = 90 + torch.arange(40)[None]
    nodes, qkv = causal(at, at, 200), torch.randn(1, 40, 3, 2, 64).to(BF16)
    cache, *_ = filled(1, 2, 64, 300)
    clean = call_of(2, 2, 64, nodes)[0].attend(qkv.flatten(2), cache.layers[0])
    qkv[:, 25, 2] = value
    out = call_of(2, 2, 64, nodes)[0].attend(qkv.flatten(2), cache.layers[0])
    assert torch.equal(out[:, :25], clean[:, :25])
    assert not out[:, 25:].isfinite().any()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("size", "kind"), EACH)
@torch.inference_mode()
def test_a_node_that_sees_nothing_says_nothing(size, kind):
    nodes = random_nodes(2, 1, False)
    nodes.visible_BQW[1] = False
    cache, _, _ = filled(2, 2, size, 300, kind)
    qkv = torch.randn(2, 1, 6 * size).to(kind)
    out = call_of(2, 2, size, nodes, kind)[0].attend(qkv, cache.layers[0])
    assert out[0].any()
    assert not out[1].any()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("slots", [40, 200])
def test_slots_that_are_not_there_are_refused(slots):
    at = torch.tensor([[slots - 1, slots]])
    nodes = causal(at, at, slots)
    cache, keys, _ = filled(1, 2, 64, slots)
    before = keys.clone()
    with torch.inference_mode(), pytest.raises(IndexError, match=f"beyond the {slots} slots"):
        call_of(2, 2, 64, nodes)[0].attend(torch.randn(1, 2, 384).to(BF16), cache.layers[0])
    assert torch.equal(keys, before)


def compiled_attention(call, qkv, cache):
    return call.attend(qkv, cache.layers[0])


def summed_otherwise(call, qkv, cache):
    """Another order of sums where a call has more than one row: what must not be."""
    out = call.attend(qkv, cache.layers[0])
    return out if len(qkv) == 1 else (out.float() * (1 + 2**-8)).to(out.dtype)


def rows_alike(attend, size, kind):
    """Whether a row has the same bits node by node, in pieces, beside others, in wide calls."""
    torch.manual_seed(5)
    heads = 9  # three queries a key: two share it and one has it alone
    qkv = torch.randn(3, 80, (heads + 2 * 3) * size).to(kind)
    old = torch.randn(2, 3, 3, 400, size).to(kind)
    found = []
    for rows, pieces, wide, threads in [
        ([1], [80], 288, 1),
        ([1], [1] * 80, 288, 1),
        ([0, 1, 2], [5, 1, 74], 400, 2),
        ([1, 2], [4] * 20, 304, 1),
    ]:
        cache, *entries = filled(len(rows), 3, size, 400, kind)
        for buffer, was in zip(entries, old, strict=True):
            buffer.copy_(was[rows])
        parts, start = [], 200  # behind 256 slots weights are made anew
        torch.set_num_threads(threads)
        for count in pieces:
            at = torch.arange(start, start + count).expand(len(rows), -1)
            call, _ = call_of(heads, 3, size, causal(at, at, wide), kind)
            here = slice(start - 200, start - 200 + count)
            parts.append(attend(call, qkv[rows, here].contiguous(), cache)[rows.index(1)])
            start += count
        found.append(torch.cat(parts))
    return all(torch.equal(x, found[0]) for x in found)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("size", "kind"), EACH)
@torch.inference_mode()
def test_rows_are_alike_in_every_call(size, kind):
    threads = torch.get_num_threads()
    try:
        assert rows_alike(compiled_attention, size, kind)
        assert not rows_alike(summed_otherwise, size, kind)
    finally:
        torch.set_num_threads(threads)


def below_a_text(places, size, text=131, kind=BF16):
    """Attention [H E] of the last node of a path whose nodes lie so far behind a text.

    The values of the path are large and cancel: what is left shows the order of the sum.
    """
    torch.manual_seed(9)
    qkv = torch.randn(1, len(places), 3, 4, size)
    qkv[:, :, 1] = qkv[:, :1, 1]  # one key, so that all have one weight
    qkv[:, :, 2] *= 1e4
    qkv[:, 1::2, 2] = -qkv[:, ::2, 2]
    cache, _, _ = filled(1, 4, size, 400, kind)
    slots = text + torch.tensor([places])
    visible = (torch.arange(350) < text).repeat(1, len(places), 1)
    for node in range(len(places)):
        visible[0, node, slots[0, : node + 1]] = True
    nodes = Nodes(slots, torch.full_like(slots, text), slots, visible, slots[:, 0])
    call, _ = call_of(4, 4, size, nodes, kind)
    return call.attend(qkv.to(kind).flatten(2), cache.layers[0])[0, -1]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("size", "kind"), EACH)
@torch.inference_mode()
def test_a_node_of_a_tree_adds_as_its_path_alone(size, kind):
    alone = below_a_text([0, 1, 2, 3, 4, 5], size, kind=kind)
    assert torch.equal(below_a_text([0, 2, 3, 7, 8, 21], size, kind=kind), alone)
    assert torch.equal(below_a_text([1, 20, 21, 22, 37, 60], size, kind=kind), alone)
    if not tiled(size, kind):  # a step of tiles may add them alike
        other = below_a_text([5, 2, 1, 3, 4, 0], size, kind=kind)
        assert not torch.equal(other, alone)  # in another order


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("size", "kind"), EACH)
@pytest.mark.parametrize("text", [0, 20, 32, 95, 120, 230, 256])
@torch.inference_mode()
def test_long_paths_of_trees_begin_anywhere_in_a_step(size, kind, text):
    """Forty nodes in a row, and with a gap before each of them."""
    alone = below_a_text(list(range(40)), size, text, kind)
    for places in ([2 * node for node in range(40)], [*range(7), *range(9, 42)]):
        assert torch.equal(below_a_text(places, size, text, kind), alone)


@pytest.mark.usefixtures("compiler")
def test_a_llama_in_bfloat16_is_compiled():
    settings = {"head_dim": 16, "num_key_value_heads": 2}
    model = models.llama(**settings)
    ids = torch.randint(32, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids).logits
        theirs = model.to(BF16)(ids).logits - expected
        driven = TreeDecoder(LlamaRunner(model, False))
        assert driven.runner.means == "a lean decoder, compiled"
        nodes = causal(ids, torch.arange(60)[None], 128)
        logits, states = driven.forward(driven.open(1, 128), nodes, aux_layers=(0, 1, -1))[:2]
        few, last = driven.forward(driven.open(1, 128), nodes, last=2, aux_layers=(1, -1))[:2]
    assert (logits - expected).norm() < 1.05 * theirs.norm()  # no worse than transformers rounds
    assert torch.equal(few, logits[:, -2:])
    assert torch.equal(last[0], states[1][:, -2:])
    assert torch.equal(last[1], states[2][:, -2:])


@pytest.mark.usefixtures("compiler")
def test_a_llama_in_float32_is_compiled():
    model = models.llama(head_dim=16, num_key_value_heads=2)
    ids = torch.randint(32, (1, 60), generator=torch.Generator().manual_seed(1))
    nodes = causal(ids, torch.arange(60)[None], 128)
    with torch.inference_mode():
        driven = TreeDecoder(LlamaRunner(model, False))
        assert driven.runner.means == "a lean decoder, compiled"
        logits = driven.forward(driven.open(1, 128), nodes)[0]
        torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: models.llama(head_dim=16).half(), "bfloat16 and float32 on a CPU"),
        (lambda: models.llama(head_dim=8).to(BF16), "multiples of 16"),
        (lambda: models.llama(head_dim=16, hidden_act="gelu").to(BF16), "silu"),
    ],
)
def test_what_does_not_fit_runs_torchs_operators_and_says_so(model, why):
    means = LlamaRunner(model(), False).means
    assert means.startswith("a lean decoder, torch's operators: ")
    assert why in means


def test_every_function_is_called_as_its_source_declares():
    for name, types in (
        ("outrider_cross", cross_attention._CROSS),
        ("outrider_int8", int8._PRODUCT),
        ("outrider_tiles", tile_kernels._PRODUCT),
    ):
        assert build.argument_types(name, build.TEXTS) == types
        assert build.argument_types(name, build.TEXTS) != types[1:]
    fields = re.search(r"typedef struct \{([^}]*)\} Sizes;", build.TEXTS["attend.h"])[1]
    fields = re.sub(r"/\*.*?\*/|int64_t|\s", "", fields).replace(";", ",").strip(",").split(",")
    assert [(name, ctypes.c_int64) for name in fields] == layer_kernels._AttentionSizes._fields_
