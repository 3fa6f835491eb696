"""Linear layers of a model's own forward are padded and cut for the time of a call alone."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from outrider import Engine, PromptLookup, Root, SamplingParams, StopConditions
from outrider.models import TransformersRunner, TreeDecoder, batch_invariance, linear
from outrider.models.batch_invariance import PaddingPolicy
from outrider.models.cpu_kernels import tile_kernels
from outrider.models.model_lock import evaluating, parts_of

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(batch_invariance, "_found", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def qwen(dtype=BF16, **changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1,
        "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**settings | changes)).to(dtype).eval()


def linears(model):
    return [part for part in model.modules() if type(part) is torch.nn.Linear]


@pytest.fixture
def narrow(monkeypatch):
    """A processor whose products round alike for 3 to 8 rows, and other ones otherwise.

    Yields the counts of rows that layers were called with.
    """
    monkeypatch.setattr(tile_kernels, "unsupported_reason", lambda like: "none here")
    monkeypatch.setattr(linear, "rows_of", lambda *_, **__: PaddingPolicy(tuple(range(3, 9)), 0))
    counts, own = [], torch.nn.functional.linear

    def switching(x, weight, bias=None):
        rows = x.shape[:-1].numel()
        counts.append(rows)
        out = own(x, weight, bias)
        most = 1.5 if rows < 3 else 0.5 if rows > 8 else 1
        return out * torch.linspace(1, most, out.shape[-1]).to(x.dtype)

    monkeypatch.setattr(torch.nn.functional, "linear", switching)
    return counts


def texts(model, drafter, prompts):
    """Greedy ones of the prompts in a batch."""
    run = Engine(TreeDecoder(TransformersRunner(model)), drafter, "match").run(
        prompts, [SamplingParams(0)] * len(prompts), StopConditions(24, ())
    )
    found = [[] for _ in prompts]
    for block in run:
        found[block.request_id] += block.token_ids
    return found


PROMPTS = [[(7 * at + row) % 96 for at in range(3 + 9 * row)] for row in range(5)]


def test_a_batch_writes_what_each_row_writes_alone(narrow):
    model = qwen()
    alone = [texts(model, Root(), [prompt])[0] for prompt in PROMPTS]
    assert texts(model, Root(), PROMPTS) == alone
    assert texts(model, PromptLookup(4), PROMPTS) == alone
    assert set(narrow) <= set(range(3, 9))
    assert not any("forward" in vars(layer) for layer in linears(model))


def test_layers_left_to_themselves_round_otherwise(narrow, monkeypatch):
    monkeypatch.setattr(linear, "rows_of", lambda *_, **__: PaddingPolicy())
    model = qwen()
    assert not parts_of(model).products
    alone = [texts(model, Root(), [prompt])[0] for prompt in PROMPTS]
    assert texts(model, Root(), PROMPTS) != alone


@pytest.mark.usefixtures("narrow")
def test_layers_are_whole_again_behind_the_last_of_overlapping_calls():
    model = qwen()
    parts = parts_of(model)
    assert len(parts.products) == len(linears(model))
    first, second = evaluating(model, parts), evaluating(model, parts)
    first.__enter__()
    with pytest.raises(KeyError), second:
        raise KeyError
    assert all("forward" in vars(layer) for layer in linears(model))
    assert len(parts_of(model).products) == len(parts.products)  # of whoever comes meanwhile
    first.__exit__(None, None, None)
    assert not any("forward" in vars(layer) for layer in linears(model))


def assert_live(layer, product, x):
    """A product sees what becomes of its layer's weights, and gradients find them."""
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(2)
    with torch.inference_mode():
        assert product(x).eq(2).all()
    product(x).sum().backward()
    assert layer.bias.grad.eq(len(x)).all()


@pytest.mark.usefixtures("narrow")
def test_weights_are_read_as_they_are_and_gradients_go_through():
    model = qwen()
    layer, product = parts_of(model).products[0]
    x = torch.randn(5, 64).to(BF16)
    assert_live(layer, product, x)


@pytest.mark.usefixtures("narrow")
def test_what_is_not_looked_after():
    model = qwen()
    first, *rest = linears(model)
    first.forward = lambda x: x  # somebody's own
    assert [layer for layer, _ in parts_of(model).products] == rest
    assert not parts_of(qwen(torch.float32)).products


@pytest.mark.exhaustive
def test_on_this_processor_a_batch_writes_what_each_row_writes_alone():
    """Wide enough for a processor's kernels of large products; 60 rows and more in a call."""
    model = qwen(
        hidden_size=576, intermediate_size=768, num_attention_heads=9, num_key_value_heads=3
    )
    prompts = [[(11 * at + 5 * row) % 96 for at in range(60 + row)] for row in range(4)]
    alone = [texts(model, Root(), [prompt])[0] for prompt in prompts]
    assert texts(model, Root(), prompts) == alone
    assert texts(model, PromptLookup(8), prompts) == alone


def test_on_this_processor_layers_are_read_as_they_lie_if_it_has_tiles():
    model = qwen()
    layer, product = next(iter(parts_of(model).products), (None, None))
    if tile_kernels.unsupported_reason(torch.zeros(1).to(BF16)) is not None:
        pytest.skip("no tiles")
    x = torch.randn(70, 64).to(BF16)
    with torch.inference_mode():
        found = product(x)
        assert torch.equal(torch.cat([product(row) for row in x.split(1)]), found)
        torch.testing.assert_close(found, layer(x), rtol=2**-7, atol=2**-7)
        with torch.autocast("cpu", torch.bfloat16):
            assert product(x.float()).dtype == BF16  # torch's own
    assert_live(layer, product, x)
    with torch.inference_mode():
        layer.weight = torch.nn.Parameter(torch.eye(64).roll(1, 0).to(BF16).T)  # lies otherwise
        assert torch.equal(product(x), F.linear(x, layer.weight, layer.bias))
        model.float()  # after the product was made
        assert torch.equal(product(x.float()), layer(x.float()))


class Elsewhere(torch.Tensor):
    """A weight of another kind, as quantised ones are: its numbers are not where it says."""


def test_weights_of_another_kind_are_left_to_torch():
    layer = torch.nn.Linear(64, 64).to(BF16)
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Elsewhere))
    assert not tile_kernels.lies_right(layer.weight)
    assert "Elsewhere" in tile_kernels.unsupported_reason(layer.weight)
