"""The states that come along are those that the logits were computed from."""

import pytest
import torch
from families import FAMILIES, build

from outrider.errors import ConfigurationError, UnsupportedModel
from outrider.models import (
    ChainRunner,
    LlamaRunner,
    TransformersRunner,
    TreeDecoder,
    hf,
    runner_of,
)
from outrider.models.batch_invariance import BatchInvariance, PaddingPolicy
from outrider.models.prefill import causal, of_tree
from outrider.tree import branching
from tiny import RUNNERS, llama

TOKENS = torch.tensor([[5, 9, 11, 4, 7], [30, 2, 17, 3, 8]])
#: Families that do more to logits than their output layer does: scales and soft caps.
SHAPED = {"Cohere", "Cohere 2", "Gemma 2", "Gemma 3n"}
#: Families that carry several states per token between their layers.
SEVERAL = {"Gemma 3n"}


def scored(model, *, last=None, aux_layers=(-1,), tokens=TOKENS):
    at = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
    nodes = causal(tokens, at, 128)
    return model.forward(model.open(tokens.shape[0], 128), nodes, last=last, aux_layers=aux_layers)


@pytest.mark.parametrize("fallback", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_hidden_states_of_every_family(name, fallback):
    model = build(FAMILIES[name]())
    driven = TreeDecoder((ChainRunner if fallback else runner_of(model))(model))
    base = model.model if model.base_model is model else model.base_model
    own = base(input_ids=TOKENS, use_cache=False, output_hidden_states=True)
    if name in SEVERAL:
        with pytest.raises(UnsupportedModel, match=r"one state per token after layers \(1,\)"):
            scored(driven, aux_layers=(1,))
    aux_layers = (-1,) if name in SEVERAL else (-1, 1, 0)
    logits, (states, *below) = scored(driven, aux_layers=aux_layers)[:2]
    assert torch.allclose(states, own.last_hidden_state, atol=1e-4)
    for layer, got in zip(aux_layers[1:], below, strict=True):
        assert torch.allclose(got, own.hidden_states[layer], atol=1e-4)
    head = model.get_output_embeddings()
    assert torch.equal(head(states), logits) == (name not in SHAPED)
    few, ends = scored(driven, last=2, aux_layers=aux_layers)[:2]
    for end, whole in zip(ends, (states, *below), strict=True):
        assert torch.allclose(end, whole[:, -2:], atol=1e-5)
    assert few.shape[1] == 2
    assert scored(driven, aux_layers=()).hidden == ()
    assert not head._forward_pre_hooks


@torch.inference_mode()
def test_states_of_a_layer_whatever_a_list_of_layers_means(monkeypatch):
    """Versions of transformers count a list's layers in two ways: where one counts otherwise, all
    states are asked for."""
    driven = TreeDecoder(TransformersRunner(llama()))
    expected = scored(driven, aux_layers=(0, 1, -1)).hidden
    monkeypatch.setattr(hf, "_PICKS_LAYERS", False)
    assert hf.layers_asked((1, -1)) == {"output_hidden_states": True}
    assert hf.layers_asked((-1,)) == {}
    found = scored(driven, aux_layers=(0, 1, -1)).hidden
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("runner", RUNNERS)
@torch.inference_mode()
def test_hidden_states_of_trees(runner):
    model = llama()
    driven = TreeDecoder(RUNNERS[runner](model))
    cache = driven.open(2, 128)
    at = torch.arange(3).expand(2, -1)
    driven.forward(cache, causal(TOKENS[:, :3], at, 128), last=1)
    tree, first = branching((2, 2)), torch.tensor([3, 2])
    drafted = torch.arange(2 * tree.nodes).view(2, -1)
    nodes = of_tree(drafted, tree, first, 128)
    logits, (states, low) = driven.forward(cache, nodes, aux_layers=(-1, 1))[:2]
    assert torch.allclose(model.lm_head(states), logits, atol=1e-5)
    for row in range(2):
        path = tree.ancestors_BNN[0, -1].nonzero()[:, 0]
        whole = torch.cat([TOKENS[row, : first[row]], drafted[row, path]])[None]
        own = model.model(input_ids=whole, output_hidden_states=True)
        for got, full in ((states, own.last_hidden_state), (low, own.hidden_states[1])):
            assert torch.allclose(got[row, path], full[0, first[row] :], atol=1e-4)


@pytest.mark.parametrize("runner", [lambda m: LlamaRunner(m, False), TransformersRunner])
@pytest.mark.parametrize("last", [None, 1, 2])
@torch.inference_mode()
def test_dummy_nodes_have_none(runner, last):
    """In half precision a call of two nodes may be widened: here it is, to four."""
    model = llama().bfloat16()
    driven = TreeDecoder(runner(model))
    driven.rounding = BatchInvariance(PaddingPolicy((4, 8), 4))
    logits, (states, low) = scored(driven, last=last, aux_layers=(-1, 1), tokens=TOKENS[:, :2])[:2]
    assert states.shape == low.shape == (2, last or 2, 32)
    assert torch.allclose(model.lm_head(states).float(), logits, atol=0.05)


def test_another_threads_states_are_not_mixed_in():
    """Two threads drive one model: each hears its own call alone."""
    from concurrent.futures import ThreadPoolExecutor

    driven = TreeDecoder(TransformersRunner(llama()))

    def states(row):
        with torch.inference_mode():
            return scored(driven, tokens=TOKENS[row : row + 1]).hidden[0]

    expected = [states(row) for row in (0, 1)]
    with ThreadPoolExecutor(4) as threads:
        for number, got in enumerate(threads.map(states, [0, 1] * 20)):
            assert torch.allclose(got, expected[number % 2], atol=1e-5)


def test_a_model_without_a_named_output_layer_is_refused(monkeypatch):
    model = llama()
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    with pytest.raises(UnsupportedModel, match="names no output layer"):
        scored(TreeDecoder(TransformersRunner(model)))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("layer", [-2, 2])
def test_layers_that_are_not_there_are_refused(runner, layer):
    with pytest.raises(ConfigurationError, match=rf"0 \(the embeddings\) to 1.*got \({layer},\)"):
        scored(TreeDecoder(RUNNERS[runner](llama())), aux_layers=(layer,))
