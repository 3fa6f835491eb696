"""All layers in one compiled call: what they compute one by one, a row alike in any call."""

import pytest
import torch
from rows_with_sources import Rows
from test_bart import HEADS, SHAPES, made

from outrider.models import adapt
from outrider.models.cpu_kernels import build, decoder_layers
from outrider.models.linear import can_pack
from outrider.models.prefill import causal

pytestmark = pytest.mark.skipif(
    bool(build.unbuilt()) or not can_pack(), reason="needs compiled kernels"
)


@pytest.mark.parametrize("kind", SHAPES)
@torch.inference_mode()
def test_one_call_is_the_calls_one_by_one(kind):
    lean, apart = (adapt(made(kind, **HEADS), packed=True) for _ in range(2))
    assert lean.runner.whole is not None
    apart.runner.whole = None
    source = lean.probe(3)
    at = torch.arange(9).expand(3, -1)
    nodes = causal(at * 7 % 90 + 5, at, 64)
    one, each = (
        model.forward(model.open(3, 64, source), nodes, last=4, aux_layers=(0, 2, -1))
        for model in (lean, apart)
    )
    told, expected = [one.logits_BQV, *one.hidden], [each.logits_BQV, *each.hidden]
    for mine, theirs in zip(told, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_row_has_the_same_bits_beside_others_and_at_every_width():
    lean = adapt(made("marian", **HEADS), packed=True)
    several = lean.probe(3)._replace(encoded=None)
    ids = torch.arange(24)[None] * 7 % 90 + 5
    at = torch.arange(24)[None]

    def scores(inputs, rows, widths):
        cache, parts, start = lean.open(rows, 64, inputs), [], 0
        for width in widths:
            span = slice(start, start + width)
            nodes = causal(ids[:, span].expand(rows, -1), at[:, span].expand(rows, -1), 64)
            parts.append(lean.forward(cache, nodes).logits_BQV)
            start += width
        return torch.cat(parts, 1)[-1]

    whole = scores(several, 3, [24])
    assert torch.equal(whole, scores(several, 3, [1, 4, 2, 5, 12]))
    assert torch.equal(whole, scores(several.take([2]), 1, [1] * 24))
    assert not torch.equal(whole, scores(several.take([1]), 1, [24]))


@torch.inference_mode()
def test_what_is_not_compiled_is_named_and_what_does_not_fit_refused():
    lean = adapt(made("bart", **HEADS), packed=True)
    products = [one for layer in lean.runner._layers for one in layer.products()]
    assert decoder_layers.unsupported_reason(products, "gelu") is None
    assert "relu" in decoder_layers.unsupported_reason(products, "gelu_new")
    assert "packed" in decoder_layers.unsupported_reason([lambda x: x], "relu")
    narrow = adapt(made("bart", **HEADS | {"decoder_ffn_dim": 48}), packed=True).runner
    assert narrow.whole is None
    rows = Rows(lean, 2)
    rows.join(0, lean.probe(1), [3, 4])
    wide = causal(torch.tensor([[5], [6]]), torch.tensor([[1], [1]]), 64)
    with pytest.raises(IndexError, match="states over sources"):
        lean.forward(rows.cache, wide)
