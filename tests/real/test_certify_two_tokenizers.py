"""Two real tokenizers, certified: SmolLM2 and the shipped pair for Python code, in float32.

Ours is exact, by draws over common tokens and by whole strings, with SmolLM2 as the target and as
the draft; transformers' sampling over the same two is flagged. The folder `smollm2` of
OUTRIDER_MODELS; four minutes on one core.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import SamplingParams
from outrider.shipped import shipped
from outrider_lab.bench.prompts import read_prompts
from outrider_lab.certify import Power, certify, foreign

pytestmark = pytest.mark.real

NEW = 16


HOW = {"dtype": "float32", "threads": 1, "pack_weights": False, "num_speculative_tokens": 3}


def prompts_for(pair):
    texts = read_prompts(shipped("heldout_prompts.jsonl"))[:16]
    return [pair.tokenizer.encode(text)[-24:] for text in texts]


@pytest.fixture(scope="module")
def pair(smollm2):
    return outrider.load(smollm2, shipped("draft"), **HOW)


@pytest.fixture(scope="module")
def prompts(pair):
    return prompts_for(pair)


def certified(pair):
    power = Power(tokens=768, samples=32, equality_tokens=32, new_tokens=NEW, rows=16, effect=0.1)
    report = certify(pair.engine, prompts_for(pair), SamplingParams(1.0), power)
    assert not report.failed, report.as_dict()
    assert report.verdict == "exact", report.as_dict()
    assert report.setup["alpha"] > 0.05


def test_draws_over_common_tokens_are_exact(pair):
    assert pair.engine.drafter.name == "translated"
    certified(pair)


def test_whole_strings_are_exact(smollm2):
    certified(outrider.load(smollm2, shipped("draft"), drafter="string_match", **HOW))


@pytest.mark.parametrize("drafter", ["translated", "string_match"])
def test_the_larger_model_as_the_draft_is_exact(smollm2, drafter):
    certified(outrider.load(shipped("target"), smollm2, drafter=drafter, **HOW))


def test_transformers_sampling_is_flagged(smollm2, pair, prompts):
    target, draft = (
        AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
        for where in (smollm2, shipped("draft"))
    )
    ours, theirs = (AutoTokenizer.from_pretrained(where) for where in (smollm2, shipped("draft")))
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    target.generation_config.eos_token_id = None

    def generator(prompts):
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                assistant_model=draft, tokenizer=ours, assistant_tokenizer=theirs,
                max_new_tokens=NEW, pad_token_id=0,
            )  # fmt: skip
            found.append(out[0, len(prompt) :].tolist())
        return found

    torch.manual_seed(0)
    power = Power(tokens=512, samples=16, new_tokens=NEW, rows=16)
    report = foreign(generator, pair.engine.target, prompts, SamplingParams(1.0), power)
    print([(test.name, test.statistic, test.p_value) for test in report.tests])
    assert report.verdict == "not exact", report.as_dict()
