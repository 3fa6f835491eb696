"""Models with states: trees scored as paths, texts that no draft changes, rows that come and go."""

import copy

import pytest
import torch
from recurrent_models import SIZES, VOCAB, made, perturbed
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from letters import translated
from outrider import Stop, verifiers
from outrider.drafters import DraftModel, PromptLookup, Recall, Root
from outrider.engine.engine import Engine
from outrider.engine.engine_run import EngineRun
from outrider.engine.request import Request, StopConditions
from outrider.errors import UnsupportedModel
from outrider.loading import load
from outrider.models import (
    TreeDecoder,
    load_checks,
    recurrent,
    runner_of,
    unsupported,
    weight_only,
)
from outrider.models.prefill import causal, ingest, of_tree
from outrider.models.recurrent.states import RING, RecurrentStates
from outrider.sampling.sampling_params import SamplingParams
from outrider.tree import chain, from_parents

#: One of each kind of mixer; the others are told apart by their modelling files alone.
KINDS = ["falcon_h1", "kimi_linear", "lfm2", "qwen3_5_text"]
WRITING = ["lfm2", "qwen3_5_text"]  # whose texts are looked at
EVERY = [
    pytest.param(kind, marks=() if kind in KINDS else pytest.mark.slow) for kind in sorted(SIZES)
]
CAPACITY = 256
TREE = from_parents([-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7])
LEAVES = (3, 8, 10)


def driven(kind, **more):
    model = made(kind, **more)
    return model, TreeDecoder(runner_of(model)(model))


def tokens(*shape, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, shape, generator=random)


def test_layers_hand_out_the_caches_handles():
    """Mixers ask the cache for a state, or its layers: that depends on transformers' version."""
    _, target = driven("qwen3_5_text")
    cache = target.open(1, CAPACITY)
    for number, layer in enumerate(cache.layers):
        assert layer.conv_states[0] == cache.get_conv_state(number)
        assert layer.recurrent_states[1] == cache.get_recurrent_state(number, 1)
        assert layer.record_past == cache.is_recording_past(number)


def step_by_step(model, text, path):
    """Transformers' own logits [n, V]: the text in one call, then the path token by token."""
    kind, place = model.config.model_type, {}
    if kind in ("rwkv", "xlstm"):
        name, cache = "state" if kind == "rwkv" else "cache_params", None
    else:
        name = "cache_params" if "mamba" in kind else "past_key_values"
        cache = MiniMaxCache() if kind == "minimax" else DynamicCache(config=model.config)
    output = model(input_ids=text[None], use_cache=True, **{name: cache})
    found = []
    for number, token in enumerate(path):
        if name == "past_key_values":
            place = {"position_ids": torch.tensor([[len(text) + number]])}
        if kind in ("rwkv", "xlstm"):
            cache = output[name]
        output = model(input_ids=token.view(1, 1), use_cache=True, **{name: cache}, **place)
        found.append(output.logits[0, -1])
    return torch.stack(found)


def gap(scores, expected):
    return float((scores - expected).abs().max() / expected.abs().max())


def test_every_family_is_tried():
    # with an image encoder around a text model of these: test_more_multi_modal.py and the sweep
    whole = {
        "lfm2_vl",
        "lfm3_vl",
        "minicpm_ocr",
        "minicpmv4_6",
        "minicpmv4_7",
        "nemotron_h_omni",
        "qwen3_5",
        "qwen3_5_moe",
    }
    assert set(SIZES) | whole == recurrent.FAMILIES


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", EVERY)
@torch.inference_mode()
def test_trees_score_as_transformers_token_by_token(kind):
    """Three rows, read in two parts, three rounds in which they keep paths of unequal lengths."""
    model, target = driven(kind)
    length = torch.tensor([97, 21, 5])
    prompts = tokens(3, 97)
    texts = [prompts[row, :n] for row, n in enumerate(length.tolist())]
    cache = target.open(3, CAPACITY)
    for start, stop in ((0, 60), (60, 97)):
        ingest(target, cache, prompts, stop, start=start, settled_B=length)
    worst = 0.0
    for number in range(2):
        drafted = tokens(3, TREE.nodes, seed=number + 1)
        nodes = of_tree(drafted, TREE, length, CAPACITY)
        scores = target.forward(cache, nodes).logits_BQV
        for row in range(3):
            for leaf in LEAVES:
                path = TREE.ancestors_BNN[0, leaf].nonzero()[:, 0]
                expected = step_by_step(model, texts[row], drafted[row, path])
                worst = max(worst, gap(scores[row, path], expected))
        kept = torch.tensor([[1, 4, 7], [3, -1, -1], [-1, -1, -1]])
        target.keep(cache, length, kept)
        for row, path in enumerate(kept.tolist()):
            some = torch.tensor([0, *[node for node in path if node >= 0]])
            texts[row] = torch.cat([texts[row], drafted[row, some]])
        length = length + 1 + (kept >= 0).sum(1)
    assert worst < 1e-4


def drafters(model):
    draft = TreeDecoder(runner_of(model)(perturbed(model)))
    return {
        "plain": Root(),
        "prompt lookup": PromptLookup(),
        "recall": Recall(8),
        "chain": DraftModel(draft, (1, 1, 1, 1)),
        "tree": DraftModel(draft, (3, 2, 1)),
    }


def written(target, drafter, requests, max_num_seqs=3, rule=None):
    """The texts, and what it took; rows leave and others take their places."""
    run = EngineRun(Engine(target, drafter, rule), max_num_seqs, CAPACITY + 64)
    run.submit_all(requests)
    run.close()
    found = [[] for _ in requests]
    for block in run:
        found[block.request_id] += block.token_ids
    return found, run.stats


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *[(kind, 24) for kind in WRITING],
        *[pytest.param(kind, 200, marks=pytest.mark.slow) for kind in sorted(SIZES)],
    ],
)
def test_greedy_text_is_that_of_generate(kind, count):
    model, target = driven(kind)
    prompts = [tokens(n, seed=n) for n in (23, 9, 70)]
    expected = [
        model.generate(prompt[None], max_new_tokens=count, do_sample=False)[0, len(prompt) :]
        for prompt in prompts
    ]
    greedy = SamplingParams(0.0)
    requests = [Request(tuple(p.tolist()), greedy, StopConditions(count)) for p in prompts]
    for name, drafter in drafters(model).items():
        texts, stats = written(target, drafter, requests)
        assert texts == [text.tolist() for text in expected], name
        if name in ("chain", "tree"):
            assert stats.mean_acceptance_length > 1.2


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in WRITING else pytest.mark.slow)
        for kind in sorted(SIZES)
    ],
)
def test_seeded_texts_are_the_same_for_all_drafters_alone_and_in_company(kind):
    """Six rows of unequal prompts and budgets in three rows: they join and leave."""
    model, target = driven(kind)
    sizes = [(12, 12), (90, 3), (3, 20), (1, 9), (65, 6), (2, 14)]
    requests = [
        Request(
            tuple(tokens(size, seed=seed).tolist()),
            SamplingParams(0.7, seed=seed),
            StopConditions(budget),
        )
        for seed, (size, budget) in enumerate(sizes)
    ]
    coupled = verifiers.get("match")
    expected = [written(target, Root(), [one], rule=coupled)[0][0] for one in requests]
    draft = TreeDecoder(runner_of(model)(perturbed(model)))
    for drafter in (Recall(8), DraftModel(draft, (2, 2), shared_noise=True)):
        assert written(target, drafter, requests, rule=coupled)[0] == expected


@pytest.mark.parametrize("kind", EVERY)
@torch.inference_mode()
def test_a_prompt_has_the_same_scores_however_it_is_cut(kind):
    _, target = driven(kind)
    prompt, first = tokens(1, 150), torch.tensor([150])
    nodes = of_tree(tokens(1, TREE.nodes, seed=5), TREE, first, CAPACITY)
    found = []
    for cuts in ((150,), (64, 128, 150), (128, 150), (1, 65, 66, 149, 150)):
        cache, start = target.open(1, CAPACITY), 0
        for stop in cuts:
            ingest(target, cache, prompt, stop, start=start, settled_B=first)
            start = stop
        found.append(target.forward(cache, nodes).logits_BQV)
    assert max(gap(one, found[0]) for one in found) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_are_copied_moved_and_grown_with_their_states(kind):
    """A state has the same bits in another seat, in another cache, and with a longer ring."""
    _, target = driven(kind)
    length = torch.tensor([40, 33])
    prompts = tokens(2, 40)
    cache = target.open(2, CAPACITY)
    ingest(target, cache, prompts, 40, settled_B=length)
    tree = chain(7)
    drafted = tokens(2, tree.nodes, seed=2)
    target.forward(cache, of_tree(drafted, tree, length, CAPACITY))
    length = length + torch.tensor([3, 6])
    nodes = of_tree(tokens(2, TREE.nodes, seed=3), TREE, length, CAPACITY)
    copies = cache.take([1, 0, 1])
    slab = target.open(4, CAPACITY).narrow(0).put([0, 1, 2], copies)
    slab = slab.put([0], slab.take([2])).narrow(2)
    slab.recurrent._fit(slab.recurrent.max_rows, 4 * RING)
    turned = nodes._replace(**{n: getattr(nodes, n).flip(0) for n in nodes._fields})
    expected = target.forward(cache, nodes).logits_BQV
    assert gap(target.forward(slab, turned).logits_BQV.flip(0), expected) < 1e-4
    assert torch.equal(slab.recurrent.base_B[:2].flip(0), cache.recurrent.base_B)
    for layer, log in cache.recurrent.logs.items():
        assert torch.equal(slab.recurrent.logs[layer].state[:2].flip(0), log.state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", ["a call", "copies", "a longer ring"])
@torch.inference_mode()
def test_what_a_call_leaves_out_is_settled_by_what_comes_next(kind, between):
    """Layers that a call does not run, as drafts of some layers leave them, are settled late."""
    _, target = driven(kind)
    length, prompts = torch.tensor([40, 33]), tokens(2, 40)
    found = []
    for left_out in (False, True):
        cache = target.open(2, CAPACITY)
        ingest(target, cache, prompts, 40, settled_B=length)
        target.forward(cache, of_tree(tokens(2, 8, seed=2), chain(7), length, CAPACITY))
        behind = length + torch.tensor([3, 6])
        nodes = of_tree(tokens(2, TREE.nodes, seed=3), TREE, behind, CAPACITY)
        if left_out:
            cache.recurrent.begin(nodes)  # and no layer is run
            if between == "copies":
                cache = cache.take([0, 1])
            if between == "a longer ring":
                cache.recurrent._fit(cache.recurrent.max_rows, 4 * RING)
        found.append(target.forward(cache, nodes).logits_BQV)
    assert torch.equal(*found)


@torch.inference_mode()
def test_text_that_is_settled_may_be_read_again():
    """As a draft model does whose rows have read unequal parts of their texts."""
    _, target = driven(KINDS[0])
    prompt, length = tokens(1, 50), torch.tensor([50])
    cache = target.open(1, CAPACITY)
    ingest(target, cache, prompt, 49, settled_B=length - 1)
    at = torch.arange(30, 50)[None]
    again = target.forward(cache, causal(prompt[:, 30:], at, CAPACITY), last=1).logits_BQV
    whole = target.open(1, CAPACITY)
    at = torch.arange(50)[None]
    once = target.forward(whole, causal(prompt, at, CAPACITY), last=1).logits_BQV
    assert gap(again, once) < 1e-5


def test_a_folder_is_loaded_checked_and_written_with(tmp_path):
    model = made("qwen3_5_text")
    model.save_pretrained(tmp_path)
    prompt = tokens(30, seed=1)
    expected = model.generate(prompt[None], max_new_tokens=30, do_sample=False)[0, 30:]
    speculator = load(tmp_path, drafter="recall", dtype="float32", threads=1, pack_weights=False)
    told = speculator.generate([prompt.tolist()], SamplingParams(0.0), Stop(30))
    assert told.completions[0].token_ids == expected.tolist()


def test_what_reads_a_text_again_or_cuts_a_model_is_refused():
    model, target = driven("lfm2")
    with pytest.raises(UnsupportedModel, match="whose layers keep states"):
        unsupported.check_cut(model.config, apart=True)
    with pytest.raises(UnsupportedModel, match="whose layers keep states"):
        translated(target)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", EVERY)
def test_the_check_at_load_sees_states_that_go_wrong(kind, monkeypatch):
    _, target = driven(kind)
    assert load_checks.paths(target, "target") < 1e-4
    assert load_checks.trees(target, "target") < 1e-4
    monkeypatch.setattr(RecurrentStates, "keep", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="does not score"):
        load_checks.paths(target, "target")


@torch.inference_mode()
def drift(kind):
    """2,000 tokens one by one, and as paths of trees of which the rest is rejected: the largest
    difference of a state, relative to its layer's largest number."""
    _, target = driven(kind, max_position_embeddings=4096)
    text, room = tokens(1, 2000), 2048
    random = torch.Generator().manual_seed(5)

    def read(tree):
        cache, first = target.open(1, room), torch.tensor([0])
        while int(first) < text.shape[1] - 12:
            drafted = torch.randint(3, VOCAB, (1, tree.nodes), generator=random)
            drafted[0, 0] = text[0, first]
            path = [1, 4, 7][: int(torch.randint(0, 4, (1,), generator=random))]
            path = path if tree.nodes > 1 else []
            for depth, node in enumerate(path, start=1):
                drafted[0, node] = text[0, int(first) + depth]
            target.forward(cache, of_tree(drafted, tree, first, room))
            if path:
                target.keep(cache, first, torch.tensor([path]))
            first = first + 1 + len(path)
        # up to one place, whatever the last path was
        rest = text[:, int(first) :]
        at = torch.arange(int(first), text.shape[1])[None]
        for number in range(rest.shape[1]):
            some = slice(number, number + 1)
            target.forward(cache, causal(rest[:, some], at[:, some], room))
        return cache.recurrent

    plain, verified = read(from_parents([-1])), read(TREE)
    assert torch.equal(plain.base_B, verified.base_B)
    return max(gap(verified.logs[n].state, log.state) for n, log in plain.logs.items())


@torch.inference_mode()
def test_a_limit_of_steps_is_that_of_the_whole_forward():
    """Where it bites transformers' own decoding follows another model than its whole forward."""
    model, target = driven("nemotron_h", time_step_min=0.4)
    assert load_checks.paths(target, "target") < 1e-4
    text, path = tokens(20), tokens(5, seed=1)
    whole = model(input_ids=torch.cat([text, path])[None]).logits[0, 20:]
    assert gap(step_by_step(model, text, path), whole) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "falcon_h1",
        "jamba",
        "kimi_linear",
        "minimax",
        "qwen3_5_text",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
    ],
)
def test_states_do_not_drift_over_thousands_of_tokens(kind):
    assert drift(kind) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_check_at_load_knows_products_that_round(dtype):
    """A state's last bits decide how the next layer's inputs are rounded: more than in float32."""
    if (why := weight_only.unsupported_reason(torch.device("cpu"))) is not None:
        pytest.skip(f"no kernels: {why}")
    model = made("granitemoehybrid")
    kept = copy.deepcopy(model)
    weight_only.keep(kept, dtype, "it")
    target = TreeDecoder(runner_of(kept)(kept))
    assert load_checks.paths(target, "target") < 0.1
    assert target.trees
