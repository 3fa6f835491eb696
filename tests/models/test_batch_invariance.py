"""Calls of a model in half precision round alike: what is tried at load, and what follows of it.

Kernels with another path for some shapes are planted, so that it does not matter which paths this
processor has. Without what was found the same calls must differ.
"""

import json
import shutil

import pytest
import torch
from torch.nn import functional as F

from outrider.models import (
    LlamaRunner,
    TransformersRunner,
    attention,
    batch_invariance,
    calibrate,
    layer,
    linear,
)
from outrider.models.batch_invariance import BatchInvariance, PaddingPolicy
from outrider.models.decoder import TreeDecoder
from outrider.models.prefill import causal, ingest, width
from outrider.testing import models

BF16 = torch.bfloat16
fused = F.scaled_dot_product_attention


def turned(q, keys, values, mask):
    """The same attention, summed from the other end and rounded at another place."""
    x = fused(q.float(), keys.flip(2).float(), values.flip(2).float(), mask.flip(-1).float())
    return x.to(q.dtype)


def planted(switch):
    """Attention that turns around where `switch(rows, slots, batch)` says so."""

    def attend(q, keys, values, mask):
        other = switch(q.shape[2], keys.shape[2], q.shape[0])
        return turned(q, keys, values, mask) if other else fused(q, keys, values, mask)

    return attend


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(batch_invariance, "_found", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def found(switch):
    batch_invariance._found.clear()
    shutil.rmtree(calibrate.cache_dir(), ignore_errors=True)
    return batch_invariance.of_attention(planted(switch), 1, 8, BF16)


def test_planted_paths_of_attention_are_found():
    usual = found(lambda rows, slots, batch: False)
    few = found(lambda rows, slots, batch: rows < 6)
    assert few.rows.padded(1) >= 6
    assert few.rows.padded(20) == usual.rows.padded(20)
    odd = found(lambda rows, slots, batch: rows == 12 and slots > 300)
    assert 12 not in odd.rows.few
    many = found(lambda rows, slots, batch: rows > 40)
    assert many.rows.step == 0
    assert 20 < many.rows.few[-1] <= 40
    steps = found(lambda rows, slots, batch: rows > 64 and rows % 8)
    assert steps.rows.step % 8 == 0
    wide = found(lambda rows, slots, batch: slots in (192, 640))
    assert {192, 640} <= {*wide.skipped}
    assert {*wide.skipped} - {192, 640} <= {*usual.skipped}
    assert wide.width(130) > 192
    assert wide.width(600) > 640


def test_what_was_found_is_kept():
    calls = []

    def attend(q, keys, values, mask):
        calls.append(1)
        return attention.fused(q, keys, values, mask)

    first = batch_invariance.of_attention(attend, 2, 8, BF16)
    tried = len(calls)
    assert batch_invariance.of_attention(attend, 2, 8, BF16) == first
    batch_invariance._found.clear()  # as in another process
    assert batch_invariance.of_attention(attend, 2, 8, BF16) == first
    assert len(calls) == tried > 100
    batch_invariance.of_attention(attend, 3, 8, BF16)
    assert len(calls) > tried


@pytest.mark.parametrize(
    "wrong",
    [
        *("null", "[]", "3", "NAME: null", "NAME: [[],[1]]", 'NAME: [["a"],[1]]', "NAME: [1,1]"),
        *("NAME: [[2,1],[1]]", "NAME: [[0],[1]]", "NAME: [[1],[]]", "NAME: [[1],[1],[]]"),
    ],
)
def test_a_file_of_another_shape_is_measured_anew(wrong):
    def found():
        batch_invariance._found.clear()
        return batch_invariance.of_product(lambda w: lambda x: F.linear(x, w), 4, 4, BF16, "own")

    first = found()
    (path,) = calibrate.cache_dir().glob("rounding-*.json")
    whole = path.read_text()
    (name,) = json.loads(whole)
    path.write_text("{" + wrong.replace("NAME", f'"{name}"') + "}" if "NAME" in wrong else wrong)
    assert found() == first
    assert path.read_text() == whole


def test_nothing_is_tried_in_float32(monkeypatch):
    monkeypatch.setattr(batch_invariance, "_kept", None)
    driven = TreeDecoder(LlamaRunner(models.llama(), False))
    assert driven.rounding == BatchInvariance()
    assert driven.width(130) == 256


def test_planted_paths_of_products_are_found_and_padded(monkeypatch):
    made = linear._made

    def switching(weight, bias, packed):
        run = made(weight, bias, packed)
        half = weight.shape[1] // 2
        parts = made(weight[:, :half], None, False), made(weight[:, half:], None, False)

        def product(x):
            rows = x.shape[:-1].numel()
            if rows < 3 or rows > 40:
                return parts[0](x[..., :half]) + parts[1](x[..., half:])
            return run(x)

        return product

    weight, x = torch.randn(24, 32).to(BF16), torch.randn(100, 32).to(BF16)
    monkeypatch.setattr(linear, "_made", switching)
    rows = linear.rows_of(weight.shape, BF16, packed=False)
    assert rows.padded(1) >= 3
    assert rows.step == 0
    assert rows.few[-1] <= 40
    product = linear.product(weight, None, packed=False)
    whole = product(x.view(4, 25, 32)).view(100, -1)
    for some in (slice(0, 1), slice(3, 5), slice(50, 57), slice(10, 90)):
        assert torch.equal(product(x[some]), whole[some])
    raw = switching(weight, None, False)
    assert not torch.equal(raw(x[:20]), torch.cat([raw(row[None]) for row in x[:20]]))


def few_or_wide(rows, slots, batch):
    return rows < 3 or slots == 256


def lean():
    model = models.llama(num_key_value_heads=2, max_position_embeddings=512)
    return TreeDecoder(LlamaRunner(model.to(BF16), False))


def compiled():
    model = models.llama(num_key_value_heads=2, head_dim=16, max_position_embeddings=512)
    return TreeDecoder(LlamaRunner(model.to(BF16), False))


def transformers_own():
    model = models.llama(max_position_embeddings=512).to(BF16)
    return TreeDecoder(TransformersRunner(model))


@torch.inference_mode()
def alike(make):
    """Whether a row has the same bits alone, beside a longer one, node by node and in chunks."""
    model = make()
    random = torch.Generator().manual_seed(3)
    own = torch.randint(32, (150,), generator=random)
    other = torch.randint(32, (400,), generator=random)

    def scores(beside, chunk, sizes):
        rows = 2 if beside else 1
        tokens = torch.zeros(rows, 512, dtype=torch.int64)
        tokens[-1, :150], tokens[:-1, :400] = own, other
        lengths = torch.tensor([300, 100][-rows:])
        cache, parts = model.open(rows, model.width(400)), []
        for start in range(0, int(lengths.max()), chunk):
            stop = min(start + chunk, int(lengths.max()))
            ingest(model, cache, tokens, stop, settled_B=lengths, start=start)
        for size in sizes:
            at = lengths[:, None] + torch.arange(size)
            wide = width(model, int(lengths.max()), size, cache.capacity)
            nodes = causal(tokens.gather(1, at), at, wide)
            parts.append(model.forward(cache, nodes).logits_BQV[-1])
            lengths += size
        return torch.cat(parts)

    whole = scores(False, 512, [40])
    calls = [(False, 512, [1] * 25), (False, 33, [5, 9, 26]), (True, 512, [1, 4] * 4)]
    return all(torch.equal(x, whole[: len(x)]) for x in (scores(*call) for call in calls))


@pytest.mark.parametrize("make", [lean, compiled, transformers_own])
def test_a_row_has_the_same_bits_in_any_call(make, monkeypatch):
    assert alike(make)  # by the paths that this processor has
    patch(monkeypatch)
    assert alike(make)


@pytest.mark.parametrize("make", [lean, transformers_own])
def test_without_what_was_found_calls_differ(make, monkeypatch):
    patch(monkeypatch)
    monkeypatch.setattr(batch_invariance, "of_attention", lambda *_: BatchInvariance())
    assert not alike(make)


def test_long_blocks_are_cut_where_they_round_otherwise(monkeypatch):
    patch(monkeypatch, lambda rows, slots, batch: rows > 40)
    assert alike(lean)
    monkeypatch.setattr(batch_invariance, "of_attention", lambda *_: BatchInvariance())
    assert not alike(lean)


def patch(monkeypatch, switch=few_or_wide):
    """Plant another path below the lean runner and below transformers' own attention."""
    batch_invariance._found.clear()  # what was tried without it
    shutil.rmtree(calibrate.cache_dir(), ignore_errors=True)
    attend = planted(switch)

    def below(q, keys, values, attn_mask=None, **options):
        with torch.no_grad():
            return attend(q, keys, values, attn_mask)

    monkeypatch.setattr(layer, "attend", attend)
    monkeypatch.setattr(F, "scaled_dot_product_attention", below)


def test_counts_of_two_rules():
    first, second = PaddingPolicy((4, 5, 6, 8), 4), PaddingPolicy((2, 3, 4, 5, 6), 1)
    both = first.beside(second)
    assert both.few == (4, 5, 6, 8)
    assert both.padded(9) == 12
