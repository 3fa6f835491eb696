"""Models that belong to somebody else: changed between calls, in training, shared by threads."""

import copy
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
from families import EAGER_ONLY, FAMILIES, build

from outrider import Engine, Root, SamplingParams, StopConditions
from outrider.errors import ConfigurationError
from outrider.integrations.generate import speculative
from outrider.models import adapt
from outrider.models.model_lock import evaluating

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def made(name, seed=0):
    model = build(FAMILIES[name](), "eager" if name in EAGER_ONLY else "sdpa", seed)
    model.generation_config.pad_token_id = 0
    return model


def prompt(length=20, seed=7):
    return torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(seed))


def same(model, ids, **more):
    plain = model.generate(ids, **GREEDY)
    return torch.equal(model.generate(ids, custom_generate=speculative, **more, **GREEDY), plain)


def test_a_resized_vocabulary_is_seen():
    target, draft = made("Llama"), made("Llama", 1)
    assert same(target, prompt(), draft_model=draft)
    target.resize_token_embeddings(120, mean_resizing=False)
    with torch.no_grad():  # one of the new ids wins whatever the text is
        target.lm_head.weight[110] = target.lm_head.weight.abs().max() * 20
        target.lm_head.weight[111] = -target.lm_head.weight[110]
    assert same(target, prompt(), draft_model=draft)
    assert same(target, torch.tensor([[3, 110, 5]]), draft_model=draft)
    draft.resize_token_embeddings(64, mean_resizing=False)
    assert same(target, prompt(), draft_model=draft)


def test_a_changed_window_is_seen():
    model = made("Mistral (window)")
    assert same(model, prompt())
    model.config.sliding_window = 5
    assert same(model, prompt())


def test_a_model_is_freed_with_its_last_name():
    model, draft = made("Llama"), made("Llama", 1)
    model.generate(prompt(), custom_generate=speculative, draft_model=draft, **GREEDY)
    seen = [weakref.ref(model), weakref.ref(draft)]
    gc.disable()
    try:
        del model, draft
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_models_in_training_decode_without_dropout_and_stay_in_training():
    target, draft = made("GPT-2"), made("GPT-2", 1)
    plain = target.generate(prompt(), **GREEDY)
    for model in (target, draft):
        model.train()
        model.transformer.h[0].eval()  # a frozen block keeps its own mode
    before = [[m.training for m in model.modules()] for model in (target, draft)]
    fast = target.generate(prompt(), custom_generate=speculative, draft_model=draft, **GREEDY)
    assert torch.equal(fast, plain)
    assert [[m.training for m in model.modules()] for model in (target, draft)] == before


@pytest.mark.parametrize("chain_only", [False, True])
def test_a_loaded_model_keeps_its_mode_between_passes(chain_only):
    model = made("GPT-2")
    plain = model.generate(prompt(), **GREEDY)[0, 20:].tolist()
    model.train()
    run = Engine(adapt(model, chain_only=chain_only), Root()).run(
        prompt().tolist(), SamplingParams(temperature=0), StopConditions(8)
    )
    assert [token for block in run for token in block.token_ids] == plain
    assert model.training
    assert all(module.training for module in model.modules())


def test_a_part_in_training_decodes_without_dropout():
    model = made("GPT-2")
    plain = model.generate(prompt(), **GREEDY)[0, 20:].tolist()
    model.transformer.h.train()
    run = Engine(adapt(model), Root()).run(prompt().tolist(), SamplingParams(0), StopConditions(8))
    assert [token for block in run for token in block.token_ids] == plain
    assert model.transformer.h[0].training
    assert not model.training


def test_a_call_inside_another_finds_what_was_switched_since():
    model = made("GPT-2")
    with evaluating(model):
        model.transformer.h.train()
        with evaluating(model):
            assert not any(module.training for module in model.modules())
    assert model.transformer.h[0].training


@pytest.mark.parametrize("name", ["Mistral (window)", "BLOOM", "GPT-Neo", "Falcon (ALiBi)"])
def test_an_error_in_the_middle_of_a_pass_leaves_the_model_as_it_was(name):
    model = made(name)
    plain = model.generate(prompt(), **GREEDY)
    model.train()
    attributes = [sorted(vars(module)) for module in model.modules()]
    calls = count()

    def fail(*_):
        if next(calls) > 2:
            raise RuntimeError("out of memory")

    hook = list(model.modules())[-1].register_forward_pre_hook(fail)
    for _ in range(2):  # in the check of the first call, then on the way
        with pytest.raises((RuntimeError, ConfigurationError), match="out of memory"):
            model.generate(prompt(), custom_generate=speculative, **GREEDY)
    hook.remove()
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert all(module.training for module in model.modules())
    assert torch.equal(model.eval().generate(prompt(), **GREEDY), plain)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "name", ["Mistral (window)", "BLOOM", "GPT-Neo", "MPT", "Falcon (ALiBi)", "GPT-2"]
)
def test_threads_that_share_a_model_get_its_text(name):
    """First calls, which check the model, and later ones; a model in training, too."""
    model = made(name)
    texts = [prompt(seed=seed) for seed in range(6)]
    plain = [model.generate(ids, **GREEDY) for ids in texts]
    other = copy.deepcopy(model)
    model.train()

    def call(number):
        return [
            m.generate(texts[number], custom_generate=speculative, **GREEDY)
            for m in (model, other, model)
        ]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(call, range(6)))
    finally:
        sys.setswitchinterval(interval)
    for found, expected in zip(results, plain, strict=True):
        assert all(torch.equal(one, expected) for one in found)
    assert all(module.training for module in model.modules())
    assert all(
        torch.equal(other.generate(i, **GREEDY), p) for i, p in zip(texts, plain, strict=True)
    )
