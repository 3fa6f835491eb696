"""The lean runner computes what transformers computes, and trees score as their paths do."""

import pytest
import torch
from families import based
from transformers import AutoModelForCausalLM

from outrider.models import LlamaRunner, TransformersRunner, TreeDecoder, adapt
from outrider.models.linear import can_pack
from outrider.models.llama import fits
from outrider.models.prefill import causal as line, ingest, of_tree, width
from outrider.tree import branching, from_parents
from tiny import RUNNERS, llama

SHAPES = {
    "plain": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own head size": {"head_dim": 16},
    "tied embeddings": {"tie_word_embeddings": True},
    "gelu": {"hidden_act": "gelu"},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
PACKINGS = [False, True] if can_pack() else [False]
TREES = {
    "root": branching(()),
    "chain": branching((1, 1, 1)),
    "branching": branching((3, 2, 1)),
    "irregular": from_parents([-1, 0, 0, 1, 1, 2, 4, 4, 6]),
}


def own_logits(model, ids):
    """transformers' forward over one sequence, no cache, no mask of ours."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("packed", PACKINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_lean_runner_equals_transformers(shape, packed):
    model = llama(seed=3, **SHAPES[shape])
    assert fits(model)
    ids = [(7 * i + 3) % 32 for i in range(60)]
    causal = TreeDecoder(LlamaRunner(model, packed))
    at = torch.arange(60)[None]
    with torch.inference_mode():
        logits = causal.forward(causal.open(1, 128), line(torch.tensor([ids]), at, 128)).logits_BQV
    torch.testing.assert_close(logits[0], own_logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [8, 16])  # torch's operators, and compiled
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_its_like_equal_transformers(kind, size):
    """Biases, and norms of heads, that are not what a new model has."""
    torch.manual_seed(2)
    config = based(kind, head_dim=size, sliding_window=None)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    runner = adapt(model).runner
    assert isinstance(runner, LlamaRunner)
    causal = TreeDecoder(runner)
    ids = [(7 * i + 3) % 32 for i in range(60)]
    at = torch.arange(60)[None]
    with torch.inference_mode():
        logits = causal.forward(causal.open(1, 128), line(torch.tensor([ids]), at, 128)).logits_BQV
    torch.testing.assert_close(logits[0], own_logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ],
)
def test_windows_are_not_lean(kind, settings):
    model = AutoModelForCausalLM.from_config(based(kind, **settings)).eval()
    assert isinstance(adapt(model).runner, TransformersRunner)


def test_models_the_lean_runner_does_not_compute_take_the_other_one():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = llama(rope_parameters=dynamic)
    assert not fits(model)
    assert isinstance(adapt(model).runner, TransformersRunner)
    assert isinstance(adapt(llama()).runner, LlamaRunner)


def score(causal, cache, prompts, tree, drafted):
    """Logits [B, N, V] of a tree below ragged prompts whose last token is pending."""
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    with torch.inference_mode():
        ingest(causal, cache, tokens, int(lengths.max()) - 1, settled_B=lengths - 1)
        first = lengths - 1
        nodes = torch.cat([tokens.gather(1, first[:, None]), drafted], 1)
        wide = width(causal, int(lengths.max()), tree.nodes, cache.capacity)
        return causal.forward(cache, of_tree(nodes, tree, first, wide)).logits_BQV


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("shape", ["plain", "grouped queries", "llama3 rope"])
@pytest.mark.parametrize("name", TREES)
def test_ragged_trees_score_as_their_paths(name, shape, runner):
    model = llama(seed=4, **SHAPES[shape])
    tree_scores_as_its_paths(model, RUNNERS[runner](model), TREES[name])


def tree_scores_as_its_paths(model, runner, tree):
    """Below ragged rows, by transformers' forward over each path."""
    causal = TreeDecoder(runner)
    prompts = [[5, 1, 9, 2, 6, 5, 3], [8], [4, 4, 1]]
    torch.manual_seed(0)
    drafted = torch.randint(0, 32, (len(prompts), tree.nodes - 1))
    logits = score(causal, causal.open(len(prompts), 128), prompts, tree, drafted)
    for row, prompt in enumerate(prompts):
        for node in range(tree.nodes):
            path = tree.ancestors_BNN[0, node, 1:].nonzero()[:, 0]
            expected = own_logits(model, prompt + drafted[row, path].tolist())[-1]
            torch.testing.assert_close(logits[row, node], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("rows", [1, 3])
def test_an_accepted_path_scores_as_if_it_had_always_been_there(rows, runner):
    model, tree = llama(seed=5), TREES["irregular"]
    causal = TreeDecoder(RUNNERS[runner](model))
    prompts = [[5, 1, 9, 2, 6], [8], [4, 4, 1]][:rows]
    torch.manual_seed(1)
    drafted = torch.randint(0, 32, (rows, tree.nodes - 1))
    cache = causal.open(rows, 128)
    score(causal, cache, prompts, tree, drafted)
    paths = [[1, 4, 7], [2, 5], []][:rows]
    table = torch.full((rows, 4), -1)
    for row, path in enumerate(paths):
        table[row, : len(path)] = torch.tensor(path, dtype=torch.int64)
    first = torch.tensor([len(p) - 1 for p in prompts])
    following = torch.tensor([11, 12, 13])[:rows, None]
    with torch.inference_mode():
        cache.keep(first, table)
        if rows > 1:  # the cache of some rows, in another order
            order = torch.tensor([2, 0])
            cache, first, following = cache.take(order.tolist()), first[order], following[order]
            prompts, paths = [prompts[2], prompts[0]], [paths[2], paths[0]]
            drafted = drafted[order]
        at = first[:, None] + 1 + torch.tensor([len(p) for p in paths])[:, None]
        logits = causal.forward(cache, line(following, at, 128)).logits_BQV
    for row, (prompt, path) in enumerate(zip(prompts, paths, strict=True)):
        kept = [int(drafted[row, n - 1]) for n in path]
        expected = own_logits(model, prompt + kept + following[row].tolist())[-1]
        torch.testing.assert_close(logits[row, 0], expected, rtol=1e-4, atol=1e-4)


def test_padded_output_layers_are_cut_to_the_tokenizer():
    causal = TreeDecoder(LlamaRunner(llama(), False), vocab_size=30)
    at = torch.zeros(1, 1, dtype=torch.int64)
    assert causal.forward(causal.open(1, 128), line(at, at, 128)).logits_BQV.shape == (1, 1, 30)


def test_the_last_nodes_alone_are_scored_alike():
    causal = TreeDecoder(LlamaRunner(llama(), False))
    at = torch.arange(6)[None]
    with torch.inference_mode():
        whole = causal.forward(causal.open(1, 128), line(at + 2, at, 128)).logits_BQV
        end = causal.forward(causal.open(1, 128), line(at + 2, at, 128), last=2).logits_BQV
    torch.testing.assert_close(end, whole[:, -2:], rtol=1e-5, atol=1e-5)
