"""The engine on a CUDA device: the same texts batched, speculative and as graphs. `-m gpu`."""

import pytest
import torch

from outrider import DraftModel, Engine, Root, StopConditions, verifiers
from outrider.engine import graphs
from outrider.engine.step import spec_decode_step
from outrider.errors import ConfigurationError
from outrider.models import adapt
from outrider.sampling.sampling_params import SamplingParams
from tiny import DRAFTERS, PROMPTS, TRANSLATED, begun, decode, llama, perturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
#: Those that work where the target is on a CPU.
ELSEWHERE = [name for name in DRAFTERS if name.startswith(("recall", "either"))]
HERE = [name for name in DRAFTERS if name not in ELSEWHERE]
CAPTURED = [name for name in HERE if name not in TRANSLATED]
SEEDED = [SamplingParams(1.0, seed=5 + i) for i in range(len(PROMPTS))]
GREEDY = [SamplingParams(0)] * len(PROMPTS)


def models():
    target = llama()
    draft = perturbed(target, 0.12)
    return adapt(target.to("cuda")), adapt(draft.to("cuda"))


@pytest.mark.parametrize("name", HERE)
def test_greedy_texts_are_those_of_plain_decoding(name):
    target, small = models()
    plain, _ = decode(Engine(target, Root()), PROMPTS, GREEDY, StopConditions(24))
    texts, _ = decode(Engine(target, DRAFTERS[name](small)), PROMPTS, GREEDY, StopConditions(24))
    assert texts == plain


@pytest.mark.parametrize("settings", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_change_no_text(name, settings):
    target, small = models()
    eager = Engine(target, DRAFTERS[name](small), graphs=False)
    graphed = Engine(target, DRAFTERS[name](small), graphs=True)
    want, _ = decode(eager, PROMPTS, settings, StopConditions(40))
    got, run = decode(graphed, PROMPTS, settings, StopConditions(40))
    assert got == want
    assert run.stats.graph_ms > 0
    assert run.stats.captures
    assert run.stats.replays
    assert not run.stats.why_eager


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_works_on_a_cpu_alone_says_so(name):
    target, small = models()
    with pytest.raises(ConfigurationError, match=r"on a CPU; got a target on cuda:0; use"):
        decode(Engine(target, DRAFTERS[name](small)), PROMPTS[:1], GREEDY[:1], StopConditions(4))


@pytest.mark.parametrize("name", TRANSLATED)
def test_what_reads_the_host_is_refused_early_and_runs_without(name):
    target, small = models()
    with pytest.raises(ConfigurationError, match=r"reads values on the host.*leave graphs out"):
        Engine(target, DRAFTERS[name](small), graphs=True)
    _, run = decode(
        Engine(target, DRAFTERS[name](small)), PROMPTS[:2], GREEDY[:2], StopConditions(8)
    )
    assert "reads values on the host" in run.stats.why_eager


def test_a_wider_cache_is_captured_anew(monkeypatch):
    monkeypatch.setattr(graphs, "ROOM", 128)
    target, small = models()
    prompt = list(range(1, 32)) * 3
    drafter = DRAFTERS["chain"](small)
    want, _ = decode(Engine(target, drafter, graphs=False), [prompt], SEEDED[0], StopConditions(80))
    got, run = decode(Engine(target, drafter, graphs=True), [prompt], SEEDED[0], StopConditions(80))
    assert got == want
    assert run.stats.captures == 2


def test_graphs_are_the_default_and_text_comes_while_rows_leave():
    target, small = models()
    ends = [StopConditions(5 + 9 * i) for i in range(len(PROMPTS))]
    for drafter in (Root(), DRAFTERS["tree"](small)):
        eager, usual = Engine(target, drafter, graphs=False), Engine(target, drafter)
        want, _ = decode(eager, PROMPTS, SEEDED, ends)
        got, run = decode(usual, PROMPTS, SEEDED, ends)
        assert got == want
        assert run.stats.replays


class Waits(DraftModel):
    """One that reads a value in every step and does not say so."""

    def propose(self, memory, context, shape):
        assert int(context.length_B[0]) > 0
        return super().propose(memory, context, shape)


class Fails(DraftModel):
    """One whose steps torch refuses to capture."""

    def propose(self, memory, context, shape):
        context.length_B.cpu()
        return super().propose(memory, context, shape)


@pytest.mark.parametrize("kind", [Waits, Fails])
def test_a_step_that_cannot_be_captured_goes_on_without(kind):
    target, small = models()
    want, _ = decode(Engine(target, DRAFTERS["chain"](small)), PROMPTS, SEEDED, StopConditions(24))
    engine = Engine(target, kind(small, (1, 1, 1, 1)))
    got, run = decode(engine, PROMPTS, SEEDED, StopConditions(24))
    assert got == want
    assert run.stats.why_eager
    assert not run.stats.replays
    assert torch.rand(3, device="cuda").isfinite().all()  # the device works as before
    again = Engine(target, DRAFTERS["chain"](small))  # and other steps are captured
    got, run = decode(again, PROMPTS, SEEDED, StopConditions(24))
    assert got == want
    assert run.stats.replays


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


@pytest.mark.parametrize("settings", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_second_run_captures_nothing(name, settings):
    """Of one row, and of another prompt; and of several rows that leave one by one."""
    target, small = models()
    eager = Engine(target, DRAFTERS[name](small), graphs=False)
    graphed = Engine(target, DRAFTERS[name](small), graphs=True)
    decode(graphed, PROMPTS[:1], settings[:1], StopConditions(24))
    want, _ = decode(eager, PROMPTS[1:2], settings[1:2], StopConditions(40))
    got, run = decode(graphed, PROMPTS[1:2], settings[1:2], StopConditions(40))
    assert got == want
    assert run.stats.captures == 0, graphed.pool.why
    assert run.stats.replays == run.stats.engine_steps
    ends = [StopConditions(12 + 9 * i) for i in range(len(PROMPTS))]
    want, _ = decode(eager, PROMPTS, settings, ends)
    captures = []
    for _ in range(5):  # what had too few steps to pay is captured in a later one
        got, run = decode(graphed, PROMPTS, settings, ends)
        assert got == want
        captures.append(run.stats.captures)
    assert captures[-1] == 0, (captures, graphed.pool.why)
