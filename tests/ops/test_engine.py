"""The engine with Triton's kernels in charge, in the interpreter: the texts of the reference."""

import pytest

from outrider import Engine, SamplingParams, StopConditions
from outrider.ops import use
from tiny import DRAFTERS, PROMPTS, decode, pair

MIXED = [SamplingParams(0), SamplingParams(0.8, top_k=5, seed=2)]


def check(name, sampling, most):
    target, small = pair()

    def texts(backend):
        with use(backend):
            return decode(
                Engine(target, DRAFTERS[name](small)), PROMPTS[:2], sampling, StopConditions(most)
            )[0]

    assert texts("triton") == texts("reference")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["chain", "sampled tree", "hub tree", "coupled tree"])
def test_texts_equal_the_references(kernels, name):
    check(name, SamplingParams(1.0, seed=3), 2)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SamplingParams(0), SamplingParams(1.0, seed=3), MIXED])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafters_texts_equal_the_references(kernels, name, sampling):
    check(name, sampling, 8)
