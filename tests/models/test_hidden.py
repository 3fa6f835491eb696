"""The states that come along are those that the logits were computed from."""

import pytest
import torch
from families import FAMILIES, build

from outrider.models import CausalModel, ChainRunner, LlamaRunner, TransformersRunner, runner_of
from outrider.models.nodes import causal, of_tree
from outrider.tree import branching
from tiny import RUNNERS, llama

TOKENS = torch.tensor([[5, 9, 11, 4, 7], [30, 2, 17, 3, 8]])
#: Families that do more to logits than their output layer does: scales and soft caps.
SHAPED = {"Cohere", "Cohere 2", "Gemma 2", "Gemma 3n"}


def scored(model, *, last=None, hidden=True, tokens=TOKENS):
    at = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
    nodes = causal(tokens, at, 128)
    return model.forward(model.open(tokens.shape[0], 128), nodes, last=last, hidden=hidden)


@pytest.mark.parametrize("fallback", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_hidden_states_of_every_family(name, fallback):
    model = build(FAMILIES[name]())
    driven = CausalModel((ChainRunner if fallback else runner_of(model))(model))
    base = model.model if model.base_model is model else model.base_model
    own = base(input_ids=TOKENS, use_cache=False).last_hidden_state
    logits, states = scored(driven)
    assert torch.allclose(states, own, atol=1e-4)
    head = model.get_output_embeddings()
    assert torch.equal(head(states), logits) == (name not in SHAPED)
    few, ends = scored(driven, last=2)
    assert torch.allclose(ends, states[:, -2:], atol=1e-5)
    assert few.shape[1] == 2
    assert scored(driven, hidden=False).hidden_BQE is None
    assert not head._forward_pre_hooks


@pytest.mark.parametrize("runner", RUNNERS)
@torch.inference_mode()
def test_hidden_states_of_trees(runner):
    model = llama()
    driven = CausalModel(RUNNERS[runner](model))
    cache = driven.open(2, 128)
    at = torch.arange(3).expand(2, -1)
    driven.forward(cache, causal(TOKENS[:, :3], at, 128), last=1)
    tree, first = branching((2, 2)), torch.tensor([3, 2])
    drafted = torch.arange(2 * tree.nodes).view(2, -1)
    logits, states = driven.forward(cache, of_tree(drafted, tree, first, 128), hidden=True)
    assert torch.allclose(model.lm_head(states), logits, atol=1e-5)
    for row in range(2):
        path = tree.ancestors_BNN[0, -1].nonzero()[:, 0]
        whole = torch.cat([TOKENS[row, : first[row]], drafted[row, path]])[None]
        own = model.model(input_ids=whole).last_hidden_state[0, first[row] :]
        assert torch.allclose(states[row, path], own, atol=1e-4)


@pytest.mark.parametrize("runner", [lambda m: LlamaRunner(m, False), TransformersRunner])
@pytest.mark.parametrize("last", [None, 1, 2])
@torch.inference_mode()
def test_dummy_nodes_have_none(runner, last):
    """In half precision a call of two nodes is widened to four."""
    model = llama().bfloat16()
    driven = CausalModel(runner(model))
    assert driven.min_queries == 4
    logits, states = scored(driven, last=last, tokens=TOKENS[:, :2])
    assert states.shape == (2, last or 2, 32)
    assert torch.allclose(model.lm_head(states).float(), logits, atol=0.05)


def test_another_threads_states_are_not_mixed_in():
    """Two threads drive one model: each hears its own call alone."""
    from concurrent.futures import ThreadPoolExecutor

    driven = CausalModel(TransformersRunner(llama()))

    def states(row):
        with torch.inference_mode():
            return scored(driven, tokens=TOKENS[row : row + 1]).hidden_BQE

    expected = [states(row) for row in (0, 1)]
    with ThreadPoolExecutor(4) as threads:
        for number, got in enumerate(threads.map(states, [0, 1] * 20)):
            assert torch.allclose(got, expected[number % 2], atol=1e-5)


def test_a_model_without_a_named_output_layer_is_refused(monkeypatch):
    from outrider.errors import UnsupportedModel

    model = llama()
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    with pytest.raises(UnsupportedModel, match="names no output layer"):
        scored(CausalModel(TransformersRunner(model)))
