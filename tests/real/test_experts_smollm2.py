"""A mixture of experts made of SmolLM2: packed experts write what dense ones do, drafts or not."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import SamplingParams, Stop
from outrider.models import LlamaRunner, isa

pytestmark = [pytest.mark.real, pytest.mark.slow]
QUESTIONS = (
    "Name the largest planet of the solar system.",
    "Write a Python function that adds two numbers.",
    "Repeat this three times: the quick brown fox jumps over the lazy dog.",
)
HOW = {"threads": 1, "planner": "fixed"}


@pytest.fixture(scope="module")
def mixture(smollm2, tmp_path_factory):
    """A folder of transformers (`benchmarks/experts.py`)."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import experts

    folder = tmp_path_factory.mktemp("mixture") / "mixture"
    experts.write(smollm2, folder, experts=8, chosen=2)
    return folder


def asked(speculator):
    return [
        speculator.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]


def texts(speculator, sampling, count=40):
    told = speculator.generate(asked(speculator), sampling, Stop(count)).completions
    return [one.token_ids for one in told]


def test_greedy_texts_are_transformers_own(mixture):
    made = outrider.load(mixture, dtype="bfloat16", drafter="recall", **HOW)
    assert isinstance(made.engine.target.runner, LlamaRunner)
    told = texts(made, SamplingParams(0))
    theirs = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    same = 0
    for prompt, found in zip(asked(made), told, strict=True):
        ids = torch.tensor([made.tokenizer(prompt)["input_ids"]])
        ended = theirs.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
        same += found == ended.tolist()[: len(found)]
    # where the processor has products of bfloat16 numbers it takes them, and near ties may turn
    assert same == len(told) or isa.has_bf16_products()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_drafted_texts_are_plain_ones(mixture, dtype):
    found = []
    for drafter in ("none", "recall"):
        made = outrider.load(mixture, dtype=dtype, drafter=drafter, shared_noise=True, **HOW)
        seeded = [SamplingParams(0.7, seed=number) for number in range(len(QUESTIONS))]
        found.append((texts(made, SamplingParams(0)), texts(made, seeded)))
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0][0]))) == len(QUESTIONS)


def test_a_file_stays_in_its_blocks(mixture, tmp_path):
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="pip install 'outrider[gguf]'")
    from outrider_lab.peers.gguf_files import written

    path = written(mixture, tmp_path, "Q8_0")
    made = outrider.load(path, drafter="recall", **HOW)
    assert "q8_0; states and sums float32" in made.notes.weights
    assert texts(made, SamplingParams(0)) == texts(made.plain(), SamplingParams(0))
