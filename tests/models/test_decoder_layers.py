"""All layers in one compiled call: what they compute one by one, a row alike in any call."""

import copy

import pytest
import torch
from families import based
from rows_with_sources import Rows
from test_bart import HEADS, SHAPES, made
from transformers import AutoModelForCausalLM

from outrider.models import LlamaRunner, TreeDecoder, adapt, weight_only
from outrider.models.cpu_kernels import build, decoder_layers
from outrider.models.linear import can_pack
from outrider.models.prefill import causal, of_tree
from outrider.tree import from_parents

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


def lean_llama(kind="llama", dtype="int8", **sizes):
    """A model of packed weights, with biases and norms that are not what a new one has."""
    torch.manual_seed(2)
    sizes = {"head_dim": 16, "intermediate_size": 64, "sliding_window": None} | sizes
    model = AutoModelForCausalLM.from_config(based(kind, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    weight_only.keep(model, dtype, "it")
    return model


def one_by_one(model):
    apart = TreeDecoder(copy.copy(model.runner))
    apart.runner.whole = None
    return apart


def read(model, widths, rows=3, last=None):
    """A text in calls of so many nodes, and a tree behind it: logits, and states of all layers."""
    cache, found, start = model.open(rows, 200), [], 0
    at_BQ = torch.arange(200).expand(rows, -1)
    tokens_BQ = (at_BQ * 7 + torch.arange(rows)[:, None] * 5) % 90 + 5
    for width in widths:
        span = slice(start, start + width)
        nodes = causal(tokens_BQ[:, span], at_BQ[:, span], 200)
        found.append(model.forward(cache, nodes, last=last, aux_layers=(0, 1, -1)))
        start += width
    tree = from_parents([-1, 0, 0, 1, 2, 2, 4])
    nodes = of_tree(tokens_BQ[:, start : start + 7], tree, torch.full((rows,), start), 200)
    return [*found, model.forward(cache, nodes, aux_layers=(1, -1))]


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_a_llama_in_one_call_has_the_bits_of_calls_one_by_one(kind, dtype):
    model = TreeDecoder(LlamaRunner(lean_llama(kind, dtype), False))
    assert model.runner.whole is not None
    for last in (None, 2):
        each = zip(
            *(read(m, [70, 1, 5], last=last) for m in (model, one_by_one(model))), strict=True
        )
        for one, other in each:
            told, expected = [one.logits_BQV, *one.hidden], [other.logits_BQV, *other.hidden]
            for mine, theirs in zip(told, expected, strict=True):
                assert torch.equal(mine, theirs)


@torch.inference_mode()
def test_some_layers_of_a_llama_are_one_call_too():
    model = TreeDecoder(LlamaRunner(lean_llama(num_hidden_layers=4), False))
    model.runner.keep_layers((0, 3))
    mine, theirs = (read(m, [9])[-1] for m in (model, one_by_one(model)))
    assert torch.equal(mine.logits_BQV, theirs.logits_BQV)


@torch.inference_mode()
def test_a_llamas_cache_that_grows_is_found_again():
    """Buffers that were longer made lie elsewhere than the addresses that were noted."""
    model = TreeDecoder(LlamaRunner(lean_llama(max_position_embeddings=9000), False))
    ids, found = torch.arange(40)[None] % 90, []
    for runner in (model, one_by_one(model)):
        cache = runner.open(1, 8000)
        for start, wide in ((0, 40), (10, 6000)):
            at = torch.arange(start, start + 10)[None]
            told = runner.forward(cache, causal(ids[:, at[0]], at, wide))
        found.append(told.logits_BQV)
    assert torch.equal(*found)


@torch.inference_mode()
def test_a_llamas_call_is_refused_where_it_would_read_what_is_not_there():
    runner = LlamaRunner(lean_llama(), False)
    model = TreeDecoder(runner)
    cache = model.open(2, 64)
    at = torch.arange(3).expand(2, -1)
    model.forward(cache, causal(at + 5, at, 64))
    with pytest.raises(ValueError, match="3 rows over a cache"):
        model.forward(cache, causal(at[:1].expand(3, -1) + 5, at[:1].expand(3, -1), 64))
    with pytest.raises(IndexError, match="beyond the slots"):
        model.forward(cache, causal(at + 5, at + 62, 64))
    call = runner._between.open(causal(at + 5, at, 64))
    for state in (
        torch.zeros(2, 3, 48),
        torch.zeros(2, 3, 32).double(),
        torch.zeros(3, 2, 32).transpose(0, 1),
        torch.zeros(2, 2, 32),
    ):
        with pytest.raises(ValueError, match="float32 states"):
            runner.whole(call, cache, state, None, ())
    parts = [layer.parts() for layer in runner._layers]
    for wrong in (parts[0]._replace(products=parts[0].products[::-1]), parts[0]._replace(norms=())):
        with pytest.raises(ValueError, match="products"):
            decoder_layers.LlamaLayers([wrong], runner, runner._norm)
    with pytest.raises(ValueError, match="a norm"):
        decoder_layers.LlamaLayers(parts, runner, runner._norm.double())
