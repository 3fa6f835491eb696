"""Attention with an indexer: a node's choice among its own prefix, keys that move with the rows."""

import pytest
import torch
from families import build
from transformers import AutoConfig

from outrider import verifiers
from outrider.drafters import DraftModel, Root
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.models import TreeDecoder, adapt, load_checks, runner_of, weight_only
from outrider.models.cpu_kernels import build as kernels
from outrider.models.positions import IndexedRunner
from outrider.models.prefill import causal, ingest, of_tree
from outrider.sampling.sampling_params import SamplingParams
from outrider.tree import from_parents

CAPACITY = 64
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 16,  # many: with few, tokens that no head likes tie
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ("deepseek_v32", "glm_moe_dsa")


def model_of(kind):
    return build(AutoConfig.for_model(kind, **SIZES), "eager")


@pytest.mark.skipif(kernels.unbuilt() is not None, reason=str(kernels.unbuilt()))
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_packed_weights_leave_the_choice_as_it_is(kind):
    """A name of our own for torch's attention made these models attend to everything."""
    blocks = {"q_lora_rank": 32, "kv_lora_rank": 32, "moe_intermediate_size": 32}
    model = build(AutoConfig.for_model(kind, **SIZES | blocks), "sdpa")
    weight_only.keep(model, "int8", "the target")  # products round their inputs everywhere
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(1))
    before = model(ids, use_cache=False).logits[0]
    target = adapt(model)
    nodes = causal(ids, torch.arange(40)[None], CAPACITY)
    after = target.forward(target.open(1, CAPACITY), nodes).logits_BQV[0]
    near = {"rtol": 1e-3, "atol": 0.02 * float(before.abs().max())}
    torch.testing.assert_close(after, before, **near)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_trees_past_the_choice_score_as_their_paths_while_rows_move(kind):
    model = model_of(kind)
    target = TreeDecoder(runner_of(model)(model))
    assert isinstance(target.runner, IndexedRunner)
    random = torch.Generator().manual_seed(1)
    tree = from_parents([-1, 0, 0, 1, 1, 2])
    length = torch.tensor([15, 9])
    texts = [torch.randint(3, 97, (int(n),), generator=random) for n in length]
    tokens = torch.zeros(2, CAPACITY, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    cache = target.open(2, CAPACITY)
    ingest(target, cache, tokens, 15, settled_B=length)
    for path in ([[1, 4], [2, 5]], [[-1, -1]] * 2):
        drafted = torch.randint(3, 97, (2, tree.nodes), generator=random)
        scores = target.forward(cache, of_tree(drafted, tree, length, CAPACITY)).logits_BQV
        for row in range(2):
            for leaf in (3, 4, 5):
                nodes = tree.ancestors_BNN[0, leaf].nonzero()[:, 0]
                whole = torch.cat([texts[row], drafted[row, nodes]])[None]
                own = model(input_ids=whole, use_cache=False).logits[0, len(texts[row]) :]
                assert (scores[row, nodes] - own).abs().max() < 1e-4
        kept = torch.tensor(path)
        cache.keep(length, kept)
        for row in range(2):
            nodes = torch.tensor([0, *[n for n in path[row] if n >= 0]])
            texts[row] = torch.cat([texts[row], drafted[row, nodes]])
        length = length + (kept >= 0).sum(1) + 1
        # both rows leave, and come back in the other order
        cache = target.open(2, CAPACITY).narrow(0).put([0, 1], cache.take([1, 0]))
        length, texts = length.flip(0), texts[::-1]


@torch.inference_mode()
def test_greedy_text_equals_generate_with_trees_and_without():
    model = model_of("deepseek_v32")
    target, draft = adapt(model), adapt(model_of("deepseek_v32"))
    prompts = [[5, 9, 11, 4, 7, 8, 3, 20, 31, 12], [40]]
    expected = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    for drafter in (Root(), DraftModel(draft, (2, 2), shared_noise=True)):
        engine = Engine(target, drafter, verifiers.get("match"))
        texts = [[], []]
        for block in engine.run(prompts, [SamplingParams(0.0)] * 2, StopConditions(12)):
            texts[block.request_id] += block.token_ids
        assert texts == expected


def test_the_check_at_load_reaches_past_the_choice():
    model = model_of("deepseek_v32")
    model.config.index_topk = 2048
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 2048
    target = adapt(model)
    assert load_checks.paths(target, "target") < 1e-4
    seen = []
    for module in model.modules():
        if hasattr(module, "index_topk"):
            assert module.index_topk == 2048
            assert "forward" not in vars(module)
    with target.runner.short_windows(4):
        logits = model(input_ids=torch.arange(5, 25)[None], use_cache=False).logits
        seen.append(logits)
    seen.append(model(input_ids=torch.arange(5, 25)[None], use_cache=False).logits)
    assert not torch.allclose(*seen)
