"""Drafts with another tokenizer: what they draw from is what they declare, by enumeration.

A target of six tokens and a draft of five, three of which are common. The draft's law at a prefix
comes from transformers' own forward over the text as the draft's tokenizer cuts it.
"""

from itertools import product

import enumeration as e
import numpy as np
import pytest
import torch

from letters import Letters, translated
from outrider import SamplingParams, verifiers
from outrider.models import LlamaRunner, TreeDecoder
from outrider.testing import llama
from outrider_lab.certify.laws import CertifiedText, law

TARGET, DRAFT = ("a", "b", "ab", "c", "bb", "d"), ("c", "a", "ba", "b", "cc")
COMMON = {0: 1, 1: 3, 3: 0}  #: draft ids of "a", "b", "c"
PROMPT, DEPTH = (0, 1, 3, 1), 2
LARGEST, TOLERANCE = 1e-2, 1e-12


@pytest.fixture(scope="module")
def draft():
    return llama(3, vocab_size=len(DRAFT))


def logits(model, tokenizer, text):
    """Of the next token, in float64."""
    ids = tokenizer("".join(TARGET[t] for t in text))["input_ids"]
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1].double()


@pytest.fixture(scope="module")
def world(draft):
    """The target's laws, and the draft's over common tokens, at every prefix of two tokens."""
    made = e.World(len(TARGET), DEPTH, 0, ("random",))
    own, target = Letters(DRAFT), llama(5, vocab_size=len(TARGET))
    made.draft[:] = 0
    for length in range(DEPTH + 1):
        for text in product(range(len(TARGET)), repeat=length):
            code = 0
            for token in text:
                code = len(TARGET) * code + 1 + token
            told = logits(draft, own, PROMPT + text)
            chosen = told[list(COMMON.values())].softmax(-1)
            made.draft[0, code, list(COMMON)] = chosen
            with torch.inference_mode():
                scores = target(torch.tensor([PROMPT + text])).logits[0, -1]
            made.target[0, code] = scores.double().softmax(-1)
    return made


def test_the_law_is_the_drafts_over_common_tokens(draft, world):
    model = translated(TreeDecoder(LlamaRunner(draft, False)), TARGET, DRAFT)
    for text in product(range(len(TARGET)), repeat=DEPTH):
        got = law(model, [CertifiedText(PROMPT, text)], SamplingParams(1.0))[0]
        code = 1 + text[0]
        expected = world.draft[0, [0, code]]
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)


FORESTS = {
    "chain": lambda world: e.without(world, (1, 1)),
    "tree": lambda world: e.without(world, (2, 1)),
}


def distance(rule, trees):
    law, _ = e.emitted(verifiers.get(rule), trees)
    return float(np.abs(law - e.truth(trees.world, DEPTH)).sum(-1).max()) / 2


@pytest.mark.parametrize(
    ("name", "rule"),
    [("chain", "rejection"), ("chain", "block"), ("tree", "rejection"), ("tree", "traversal")],
)
def test_sampled_rules_are_exact(world, name, rule):
    assert distance(rule, FORESTS[name](world)) < TOLERANCE


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_law_that_is_not_renormalised_is_not(world, rule):
    """Drawn over the common tokens, declared with the mass that the others had."""
    trees = FORESTS["chain"](world)
    kept = world.draft[trees.case_R[:, None], trees.code_RN.clip(0)]
    trees.law_RNV = 0.6 * kept
    trees.law_RNV[..., 2] += 0.4  # "ab", which the draft cannot say
    assert distance(rule, trees) > LARGEST
