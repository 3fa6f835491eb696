"""The engine on a CUDA device: the same texts batched, speculative and as graphs. `-m gpu`."""

import pytest
import torch

from outrider import Engine, Root, StopConditions, verifiers
from outrider.engine.graphs import spec_decode_step
from outrider.models import adapt
from outrider.sampling.sampling_params import SamplingParams
from tiny import DRAFTERS, PROMPTS, begun, decode, llama, perturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEEDED = [SamplingParams(1.0, seed=5 + i) for i in range(len(PROMPTS))]
GREEDY = [SamplingParams(0)] * len(PROMPTS)


def models():
    target = llama()
    draft = perturbed(target, 0.12)
    return adapt(target.to("cuda")), adapt(draft.to("cuda"))


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_texts_are_those_of_plain_decoding(name):
    target, small = models()
    plain, _ = decode(Engine(target, Root()), PROMPTS, GREEDY, StopConditions(24))
    texts, _ = decode(Engine(target, DRAFTERS[name](small)), PROMPTS, GREEDY, StopConditions(24))
    assert texts == plain


@pytest.mark.parametrize("settings", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_graphs_change_no_text(name, settings):
    target, small = models()
    eager = Engine(target, DRAFTERS[name](small))
    graphed = Engine(target, DRAFTERS[name](small), graphs=True)
    want, _ = decode(eager, PROMPTS, settings, StopConditions(40))
    got, run = decode(graphed, PROMPTS, settings, StopConditions(40))
    assert got == want
    assert run.stats.graph_ms > 0


def test_a_wider_cache_is_captured_anew():
    target, small = models()
    prompt = list(range(1, 32)) * 3
    drafter = DRAFTERS["chain"](small)
    want, _ = decode(Engine(target, drafter), [prompt], SEEDED[0], StopConditions(80))
    got, _ = decode(Engine(target, drafter, graphs=True), [prompt], SEEDED[0], StopConditions(80))
    assert got == want


def test_steps_read_no_value_on_the_host():
    """But for the blocks, which are read one step late."""
    target, small = models()
    drafter = DRAFTERS["tree"](small)
    rule = verifiers.default(drafter.kinds, False)
    batch = begun(target, drafter, PROMPTS[:3], SEEDED[:3])
    batch = spec_decode_step(
        target, drafter, rule, batch, drafter.shapes[0]
    ).batch  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        spec_decode_step(target, drafter, rule, batch, drafter.shapes[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
