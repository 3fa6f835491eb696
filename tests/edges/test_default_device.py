"""Where a caller's program has tensors made (`torch.set_default_device`) changes no answer.

The meta device stands for any other: a tensor that is made there by mistake has no values, and what
reads them fails.
"""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
import whispers
from test_head_formats import loaded
from torch.utils._device import _device_constructors
from transformers import GenerationConfig

import outrider
import words
from outrider import Beams, Engine, Request, SamplingParams, Stop, StopConditions
from outrider.drafters import DraftModel
from outrider.engine.beam_search.search import search
from outrider.errors import ConfigurationError
from outrider.integrations.generate import SpeculativeGenerate
from outrider.verifiers import VERIFIERS
from source_families import encoder_decoder
from tiny import DRAFTERS, PROMPTS, decode, llama, pair
from tiny_heads import eagle3, speculators, target

HOW = (
    SamplingParams(0),
    SamplingParams(0.8, seed=3, top_p=0.9, repetition_penalty=1.2, logit_bias={11: 3.3}),
)


@pytest.fixture(params=["set_default_device", "with torch.device"])
def elsewhere(request):
    """Runs a function while tensors are made on the meta device where nobody says where."""

    def run(call):
        if request.param == "with torch.device":
            with torch.device("meta"):
                return call()
        torch.set_default_device("meta")
        try:
            return call()
        finally:
            torch.set_default_device(None)

    return run


def meanwhile(call):
    with torch.device("meta"):
        return call()


def texts(speculator):
    return [speculator.generate("def f(x):", how, Stop(max_new_tokens=8)).texts for how in HOW]


def test_a_tensor_that_names_no_device_would_be_found(elsewhere):
    assert elsewhere(lambda: torch.zeros(1)).is_meta
    assert not torch.zeros(1).is_meta


def test_what_is_loaded_there_runs_where_it_was_told(shipped, elsewhere):
    def run():
        made = outrider.load(dtype="float32", threads=1, pack_weights=True, planner="fixed")
        return texts(made), made.engine.target.device

    assert elsewhere(run) == (texts(shipped), torch.device("cpu"))


def test_steps_are_measured_and_planned_there(shipped):
    def run():
        made = outrider.load(dtype="bfloat16", threads=1)
        several = made.generate(["def f(x):"] * 3, SamplingParams(0), Stop(max_new_tokens=8))
        return several.texts, made.generate("def f(x):", SamplingParams(0), Stop(8)).texts

    several, alone = meanwhile(run)
    assert several == alone * 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_drafts_there(name):
    large, small = pair()
    for how in (SamplingParams(0), SamplingParams(0.8, seed=3, min_p=0.01)):
        engine = Engine(large, DRAFTERS[name](small))

        def run(engine=engine, how=how):
            return decode(engine, PROMPTS, how, StopConditions(12))[0]

        assert meanwhile(run) == run()


@pytest.mark.parametrize("name", VERIFIERS)
def test_every_rule_keeps_drafts_there(name):
    (large, small), ran = pair(), 0
    for counts, options in [((1, 1), {}), ((2, 1), {}), ((2, 1), {"shared_noise": True})]:
        try:
            engine = Engine(large, DraftModel(small, counts, **options), name)
        except ConfigurationError:
            continue
        ran += 1

        def run(engine=engine):
            return decode(engine, PROMPTS, SamplingParams(0.8, seed=3), StopConditions(12))[0]

        assert meanwhile(run) == run()
    assert ran


def test_a_head_is_read_there(tmp_path):
    folder, model = speculators(tmp_path, eagle3((2, 3, 3))), target()

    def run():
        return decode(loaded(folder, model).engine, PROMPTS, SamplingParams(0), StopConditions(12))[
            0
        ]

    assert meanwhile(run) == run()


def test_beams_are_searched_there():
    large, _ = pair()
    requests = [Request(prompt, SamplingParams(0), StopConditions(8)) for prompt in PROMPTS]

    def run():
        found = search(large, DRAFTERS["suffix"](None), requests, Beams(3))
        return [[one.token_ids for one in each] for each in found.hypotheses]

    assert meanwhile(run) == run()


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_sources_are_read_there(family, tmp_path):
    encoder_decoder(family).save_pretrained(tmp_path)
    words.tokenizer().save_pretrained(tmp_path)

    def run():
        made = outrider.load(tmp_path, dtype="float32", threads=1)
        done = made.generate(["w9 w4 w7", "w3"], SamplingParams(0), Stop(8), reference=["w5"] * 2)
        return done.texts

    assert meanwhile(run) == run()


def test_recordings_are_heard_there():
    tones = np.sin(np.linspace(0, 3000, 48_000)).astype(np.float32)
    speculator = whispers.loaded()

    def run():
        return speculator.transcribe(tones).text

    assert meanwhile(run) == run()


def test_generate_of_transformers_drafts_there():
    model, ids = llama(), torch.tensor([PROMPTS[0]])
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2)
    own = SpeculativeGenerate(draft=llama(1))

    def run():
        return model.generate(ids, custom_generate=own, max_new_tokens=8, do_sample=False).tolist()

    assert meanwhile(run) == run()


def placeless(tree):
    """The calls in a module that make tensors where the caller's default is."""
    names = {made.__name__ for made in _device_constructors()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            if node.func.attr in names and not any(word.arg == "device" for word in node.keywords):
                yield node


def test_every_tensor_says_where_it_is_made():
    root = Path(__file__).parents[2]
    files = [*root.glob("src/**/*.py"), *root.glob("packages/*/src/**/*.py")]
    assert len(files) > 300
    found = [
        f"{path}:{call.lineno}"
        for path in files
        for call in placeless(ast.parse(path.read_text("utf-8")))
    ]
    assert found == []
    tried = ast.parse("torch.zeros(3)\ntorch.ones(3, device=x.device)")
    assert [call.lineno for call in placeless(tried)] == [1]
