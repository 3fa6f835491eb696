"""Graphs outlive the run that captured them: the next one replays them from its first step on."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
import transformers
from recorder import Recorder

from outrider import DraftModel, Engine, StopConditions, ops
from outrider.engine import graph_pool
from outrider.engine.engine_run import EngineRun
from outrider.engine.graph_pool import address, form_of, lasting, moved
from outrider.engine.request import Request
from outrider.engine.speculation_policy import measure
from outrider.models import adapt
from outrider.models.cache import SlotCache
from outrider.models.decoder import TreeDecoder
from outrider.models.seq2seq.runner import Seq2SeqRunner
from outrider.sampling.sampling_params import SamplingParams
from outrider.testing import sources
from outrider.tree import numbers
from source_families import encoder_decoder
from tiny import DRAFTERS, ON_HOST, PROMPTS, TRANSLATED, decode, pair

SEEDED = [SamplingParams(1.0, seed=5 + i) for i in range(3)]
OTHERS = [SamplingParams(0.7, seed=50 + i, top_p=0.9 - 0.1 * i) for i in range(3)]
ENDS = [StopConditions(10), StopConditions(24), StopConditions(17)]
CAPTURED = [name for name in DRAFTERS if name not in (*ON_HOST, *TRANSLATED)]
LONGER = [[*prompt, *range(1, 9)] for prompt in PROMPTS[:3]]


@pytest.fixture(autouse=True)
def off_the_host():
    """Verbs as they run on a device: tensors alone, no value is read."""
    with ops.use("reference"):
        yield


def engines(name, **sizes):
    """The same engine without graphs and with a capture that needs no device."""
    target, small = pair(runner="transformers", **sizes)
    eager, graphed = (Engine(target, DRAFTERS[name](small)) for _ in range(2))
    graphed.capture = Recorder()
    return eager, graphed


@pytest.mark.one_in(6)
@pytest.mark.parametrize("settings", [[SamplingParams(0)] * 3, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_second_run_captures_nothing(name, settings):
    """Of one row and of several that leave, of longer prompts, with other seeds and ends."""
    eager, graphed = engines(name)
    _, first = decode(graphed, PROMPTS[:1], settings[:1], StopConditions(24))
    want, _ = decode(eager, LONGER[:1], settings[1:2], StopConditions(20))
    got, second = decode(graphed, LONGER[:1], settings[1:2], StopConditions(20))
    assert got == want
    assert first.stats.captures == 1
    assert second.stats.captures == 0, graphed.pool.why
    assert second.stats.replays == second.stats.engine_steps  # from the first step on
    want, _ = decode(eager, PROMPTS[:3], settings, ENDS)
    for _ in range(3):  # what was begun too late to pay is captured the second time
        got, run = decode(graphed, PROMPTS[:3], settings, ENDS)
        assert got == want
    assert run.stats.captures == 0
    assert run.stats.replays >= run.stats.engine_steps - 2  # but for those of a single step
    seeds = [SamplingParams(how.temperature, seed=99 - at) for at, how in enumerate(settings)]
    ends = [StopConditions(24), StopConditions(8), StopConditions(13)]
    want, _ = decode(eager, LONGER, seeds, ends)
    assert decode(graphed, LONGER, seeds, ends)[0] == want
    assert decode(graphed, PROMPTS[:3], settings, ENDS)[0] == got


def test_settings_that_a_captured_step_was_not_made_for_are_captured_anew():
    """Filters and biases are other operators, or tables of other sizes."""
    eager, graphed = engines("chain")
    biased = [SamplingParams(1.0, seed=5, logit_bias={3: 2.0}), *SEEDED[1:]]
    repeats = [SamplingParams(1.0, seed=5, repetition_penalty=1.5), *OTHERS[1:]]
    stops = [StopConditions(20, stop_ids=(7, 11)), *ENDS[1:]]
    cases = [(SEEDED, ENDS), (OTHERS, ENDS), (biased, ENDS), (repeats, ENDS), (SEEDED, stops)]
    for settings, ends in [*cases, *cases]:
        want, _ = decode(eager, PROMPTS[:3], settings, ends)
        got, run = decode(graphed, PROMPTS[:3], settings, ends)
        assert got == want
    assert run.stats.replays


def test_stop_tokens_make_no_other_form():
    """Those of a model that has some, of requests that add one, and of text that was made up."""
    eager, graphed = engines("chain")
    decode(graphed, PROMPTS[:1], SEEDED[:1], StopConditions(20))
    for ids in ((7,), (7, 11, 19)):
        want, _ = decode(eager, PROMPTS[:1], SEEDED[:1], StopConditions(20, stop_ids=ids))
        got, run = decode(graphed, PROMPTS[:1], SEEDED[:1], StopConditions(20, stop_ids=ids))
        assert got == want
        assert run.stats.captures == 0


def test_what_was_measured_for_the_planner_is_replayed_by_runs():
    """On a device the same batch is given again and again, and steps are timed as graphs."""
    target, small = pair(runner="transformers", context=512)
    eager, graphed = (Engine(target, DRAFTERS["chain"](small)) for _ in range(2))
    graphed.capture = Recorder()
    batch, step = measure._made_up(graphed, 1, 64), graphed.stepper()
    for _ in range(4):
        step(batch, graphed.shapes[0])
    assert graphed.capture.records == 1
    del batch, step
    want, _ = decode(eager, PROMPTS[:1], SEEDED[:1], StopConditions(20))
    got, run = decode(graphed, PROMPTS[:1], SEEDED[:1], StopConditions(20))
    assert got == want
    assert run.stats.captures == 0
    batch, step = measure._made_up(graphed, 1, 64), graphed.stepper()
    made = [step(batch, graphed.shapes[0]).block.tokens_BT.tolist() for _ in range(3)]
    assert graphed.capture.records == 1
    assert made[0] == made[1] == made[2]  # each from the same rows, wherever they lie


def texts(engine, waves, rows=3):
    """Of requests that come in waves while others run."""
    run = EngineRun(engine, max_num_seqs=rows, capacity=80)
    found = {}
    for wave in waves:
        run.submit_all(wave)
        for _ in range(4):
            for block in run.step():
                found.setdefault(block.request_id, []).extend(block.token_ids)
    while not run.done:
        for block in run.step():
            found.setdefault(block.request_id, []).extend(block.token_ids)
    return found, run


@pytest.mark.parametrize("name", ["chain", "tree", "head"])
def test_rows_that_come_and_go_find_their_graphs_again(name):
    """In a run and in the next one, whoever they are."""
    eager, graphed = engines(name)
    waves = [
        [
            Request(tuple(prompt), SamplingParams(0.8, seed=10 * at + number), StopConditions(n))
            for number, (prompt, n) in enumerate(zip(PROMPTS[:2], (9 + at, 15 - at), strict=True))
        ]
        for at in range(6)
    ]
    want, _ = texts(eager, waves)
    got, run = texts(graphed, waves)
    assert got == want
    assert run.stats.captures <= 3  # one for each number of rows
    del run
    for _ in range(2):
        got, again = texts(graphed, waves)
        assert got == want
        captures = again.stats.captures
        del again
    assert captures == 0


def test_two_runs_at_once_have_graphs_of_their_own():
    eager, graphed = engines("tree")
    each = list(zip(PROMPTS[:3], SEEDED, strict=True))
    wants = [decode(eager, [prompt], how, StopConditions(24))[0][0] for prompt, how in each]

    def turns(runs):
        found = [[] for _ in runs]
        while not all(run.done for run in runs):
            for at, run in enumerate(runs):
                for block in run.step():
                    found[at] += block.token_ids
        return found

    for attempt in range(3):
        runs = [graphed.run([prompt], how, StopConditions(24)) for prompt, how in each]
        assert turns(runs) == wants
        assert [run.stats.captures for run in runs] == [0 if attempt else 1] * len(runs)
    assert len(graphed.pool._sets) == len(runs)


@pytest.mark.parametrize("held", [False, True])
def test_a_run_that_was_left_in_the_middle(held):
    """Its graphs go to the next run once nobody holds it, and not before."""
    eager, graphed = engines("chain")
    want, _ = decode(eager, PROMPTS[:1], SEEDED[:1], StopConditions(24))
    left = graphed.run(PROMPTS[1:2], SEEDED[1:2], StopConditions(40))
    for _ in range(5):
        left.step()
    if not held:
        del left
    got, run = decode(graphed, PROMPTS[:1], SEEDED[:1], StopConditions(24))
    assert got == want
    assert run.stats.captures == int(held)
    if held:  # it goes on as if nothing had been
        rest, _ = decode(eager, PROMPTS[1:2], SEEDED[1:2], StopConditions(40))
        for _ in left:
            pass
        (states,) = left.states
        assert states.length == len(PROMPTS[1]) + len(rest[0])


def test_a_run_that_failed():
    eager, graphed = engines("chain")
    want, _ = decode(eager, PROMPTS[:2], SEEDED[:2], ENDS[:2])
    verbs, fails = graphed.capture.warm, [False]

    def warm(work):
        if fails[0]:
            raise RuntimeError("by hand")
        return verbs(work)

    graphed.capture.warm = warm
    assert decode(graphed, PROMPTS[:2], SEEDED[:2], ENDS[:2])[0] == want
    fails[0] = True
    with pytest.raises(RuntimeError, match="by hand"):
        decode(graphed, PROMPTS[:3], SEEDED, ENDS)
    fails[0] = False
    got, run = decode(graphed, PROMPTS[:2], SEEDED[:2], ENDS[:2])
    assert got == want
    assert run.stats.captures <= 1


@dataclass(frozen=True)
class Remembers(DraftModel):
    """A drafter with a tensor of each run that is none of its memory's: what must not be kept."""

    def open(self, context, capacity):
        hidden[0] = torch.randint(1, 9, (1, 1))
        return super().open(context, capacity)

    def propose(self, memory, context, shape):
        draft = super().propose(memory, context, shape)
        return draft._replace(tokens_BN=draft.tokens_BN.clone().clamp_(max=60) + 0 * hidden[0])


hidden = [torch.zeros(1, 1)]


def test_a_step_that_reads_what_belongs_to_a_run_is_not_kept():
    """A graph that knows its address would go on reading what the first run made."""
    target, small = pair(runner="transformers")
    eager, graphed = (Engine(target, Remembers(small, (1, 1, 1))) for _ in range(2))
    graphed.capture = Recorder()
    for at in range(3):
        want, _ = decode(eager, PROMPTS[:3], SEEDED, ENDS)
        got, run = decode(graphed, PROMPTS[:3], SEEDED, ENDS)
        assert got == want
        assert run.stats.captures >= 1 + (at == 0)
        assert run.stats.replays
    assert "[1, 1] (torch.int64, cpu) that a run made for itself" in graphed.pool.why


@dataclass(frozen=True)
class Holds(DraftModel):
    """One that holds the tensor, which the next run replaces."""

    held: object = None

    def open(self, context, capacity):
        self.held.append(torch.randint(1, 9, (1, 1)))
        del self.held[:-1]
        return super().open(context, capacity)

    def propose(self, memory, context, shape):
        draft = super().propose(memory, context, shape)
        return draft._replace(tokens_BN=draft.tokens_BN + 0 * self.held[0])


def test_graphs_go_when_what_they_read_is_replaced():
    target, small = pair(runner="transformers")
    graphed = Engine(target, Holds(small, (1, 1, 1), held=[]))
    graphed.capture = Recorder()
    for _ in range(3):
        _, run = decode(graphed, PROMPTS[:1], SEEDED[:1], StopConditions(20))
        assert run.stats.captures == 1
    assert "has been replaced" in graphed.pool.why


def test_weights_that_are_replaced_end_what_was_captured():
    """As they are by other adapters, or another type of weights."""
    target, small = pair(runner="transformers")
    graphed = Engine(target, DRAFTERS["chain"](small))
    graphed.capture = Recorder()
    decode(graphed, PROMPTS[:1], SEEDED[:1], StopConditions(20))
    head = target.runner.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.flip(0).contiguous())
    want, _ = decode(
        Engine(target, DRAFTERS["chain"](small)), PROMPTS[:1], SEEDED[:1], StopConditions(20)
    )
    got, run = decode(graphed, PROMPTS[:1], SEEDED[:1], StopConditions(20))
    assert got == want
    assert run.stats.captures == 1


def test_memory_goes_with_the_engine_and_few_sets_stay(monkeypatch):
    _, graphed = engines("chain")
    for capacity in (100, 600, 1100, 2100, 4100, 8200):
        run = EngineRun(graphed, max_num_seqs=1, capacity=capacity)
        run.submit(Request(tuple(PROMPTS[0]), SEEDED[0], StopConditions(8)))
        run.close()
        for _ in run:
            pass
        assert run.batch is None
    pool = graphed.pool
    assert len(pool._sets) <= graph_pool.SETS + 1
    kept = [t for one in pool._sets for image in one.images.values() for t in image.form.tensors]
    each = [weakref.ref(tensor) for tensor in kept]
    assert each
    assert pool.drop()
    assert not pool._sets
    decode(graphed, PROMPTS[:1], SEEDED[:1], StopConditions(8))
    kept = [t for one in pool._sets for image in one.images.values() for t in image.form.tensors]
    each += [weakref.ref(tensor) for tensor in kept]
    del kept, pool, run, graphed
    gc.collect()
    assert not any(ref() is not None for ref in each)


def test_forms():
    cache = SlotCache(1, 1, 8)
    entry = torch.ones(1, 1, 1, 4)
    cache.allocate(0, entry, entry)
    form = form_of((cache, {"a": [torch.zeros(2)]}, "x"))
    other = SlotCache(1, 1, 8)
    other.allocate(0, entry, entry)
    store = (other, {"a": [torch.ones(2)]}, "x")
    assert form_of(store).key == form.key
    taken = moved(store, form.tensors)
    assert taken[0] is other
    assert other.layers[0].keys.data_ptr() == cache.layers[0].keys.data_ptr()
    assert taken[1]["a"][0] is form.tensors[-1]
    assert form_of((cache, {"a": [torch.zeros(3)]}, "x")).key != form.key
    assert form_of((cache, {"a": [torch.zeros(2)]}, "y")).key != form.key
    wide = torch.zeros(1, 1).expand(1, 5)
    assert form_of(wide).key != form_of(torch.zeros(1, 1).expand(1, 5)).key  # cannot be written to


class Wraps(torch.Tensor):
    """Weights of another kind: a tensor around others, without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [each.inner if isinstance(each, cls) else each for each in args]
        return func(*inner, **(kwargs or {}))


def test_weights_that_wrap_others_are_seen():
    weight, x = Wraps(torch.ones(2, 2)), torch.ones(1, 2)
    made = Recorder().record(lambda: torch.mm(x, weight))
    assert {id(tensor) for tensor, _ in made.reads} == {id(x), id(weight)}
    known = lasting([{"weight": weight}], constants=False)
    assert known == {address(weight), address(weight.inner)}
    assert address(weight) != address(Wraps(torch.ones(2, 2)))


def test_what_lasts_is_found_wherever_it_is_held():
    tensors = [torch.zeros(1) for _ in range(5)]
    module = torch.nn.Module()
    module.register_buffer("one", tensors[0])
    module.other = {"list": [tensors[1]]}
    module.work = lambda: tensors[2]
    inner = tensors[2]

    def work(there=tensors[3]):
        return there, inner

    module.work = work
    addresses = lasting([module], constants=False)
    assert {t.untyped_storage().data_ptr() for t in tensors[:4]} <= addresses
    assert tensors[4].untyped_storage().data_ptr() not in addresses
    assert numbers(7).untyped_storage().data_ptr() in lasting([])
    assert numbers(7).untyped_storage().data_ptr() not in lasting([], constants=False)


def test_a_class_whose_package_is_missing_is_not_asked(monkeypatch):
    """As transformers' stand-ins for what wants torchvision: they raise for every attribute."""

    class Missing(type):
        def __getattr__(cls, name):
            raise ImportError("it requires a library that was not found in your environment")

    monkeypatch.setattr(graph_pool, "Processor", Missing("Processor", (), {}), raising=False)
    assert numbers(7).untyped_storage().data_ptr() in lasting([])


@pytest.mark.parametrize("name", ["chain", "tree", "head", "lookahead", "beam"])
def test_nothing_of_an_earlier_run_is_left_in_the_buffers(name):
    """Whatever is in them when a run takes them over, be it NaN, has been written over."""
    eager, graphed = engines(name)
    decode(graphed, PROMPTS[1:2], SEEDED[:1], StopConditions(24))
    images = [image for one in graphed.pool._sets for image in one.images.values()]
    with torch.inference_mode():
        for tensor in (tensor for image in images for tensor in image.form.tensors):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
    want, _ = decode(eager, PROMPTS[:1], SEEDED[1:2], StopConditions(24))
    got, run = decode(graphed, PROMPTS[:1], SEEDED[1:2], StopConditions(24))
    assert got == want
    assert run.stats.captures == 0


@pytest.mark.parametrize("family", ["t5", "marian", "whisper"])
def test_sources_of_one_length_have_one_form(family):
    """What is read of a source is of its row: it is copied to where graphs read it, or they go."""
    models = (encoder_decoder(family, size) for size in (0.0, 0.05))
    target, small = (TreeDecoder(Seq2SeqRunner(model)) for model in models)
    eager, graphed = (Engine(target, DraftModel(small, (1, 1, 1))) for _ in range(2))
    graphed.capture = Recorder()
    first, second = sources(target, 2)
    prompt = [[5, 3]]
    for one in (first, second, first, second):
        want, _ = decode(eager, prompt, SEEDED[:1], StopConditions(16), inputs=[one])
        got, run = decode(graphed, prompt, SEEDED[:1], StopConditions(16), inputs=[one])
        assert got == want
    assert run.stats.captures == 0, graphed.pool.why


def test_a_model_with_windows_has_its_positions_kept():
    """A table of the buffers that is made when it is first asked for."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=6, head_dim=8,
    )  # fmt: skip
    target = adapt(transformers.MistralForCausalLM(config).eval())
    eager, graphed = (Engine(target, DraftModel(target, (2, 1))) for _ in range(2))
    graphed.capture = Recorder()
    for prompt in (PROMPTS[0], LONGER[1], PROMPTS[2]):
        want, _ = decode(eager, [prompt], SEEDED[:1], StopConditions(24))
        got, run = decode(graphed, [prompt], SEEDED[:1], StopConditions(24))
        assert got == want
    assert run.stats.captures == 0, graphed.pool.why
    table = graphed.run(PROMPTS[:1], SEEDED[0], StopConditions(4))
    table.step()
    assert table.batch.cache._positions_BS is not None
