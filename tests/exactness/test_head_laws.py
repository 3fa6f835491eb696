"""Texts whose drafts a head has drawn have the target's law, whatever tokens it does not know."""

from functools import lru_cache

import pytest
import torch
from transformers import LlamaConfig

from outrider import DraftModel, Engine, SamplingParams, verifiers
from outrider.models import LlamaRunner, TreeDecoder
from outrider.models.heads.autoregressive_head import AutoregressiveHead
from outrider.models.heads.blockwise import Blockwise, ParallelHead
from outrider.models.heads.dflash import DFlash, DFlashConfig, MaskedBlockHead
from outrider.models.heads.eagle3 import Eagle3, Eagle3Config
from outrider.models.heads.model import HeadModel
from outrider.testing.runs import p_value, text_law
from outrider_lab.certify import Power, certify
from tiny import Mislabelled, llama, pair
from tiny_heads import driven

SIZE, PROMPT = 6, (1, 3, 2)
FEW = Power(tokens=1536, samples=256, equality_tokens=96, new_tokens=16, rows=96, effect=0.1)


@lru_cache
def model():
    return llama(vocab_size=SIZE)


def head():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    ids = torch.tensor([0, 2, 3, 5])
    made = Eagle3(Eagle3Config(config, (0, 1, -1), 4), ids_K=ids)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return HeadModel(AutoregressiveHead(made.eval().requires_grad_(False)), SIZE)


def blockwise():
    torch.manual_seed(2)
    ids = torch.tensor([1, 2, 4, 5])
    made = Blockwise(2, 32, 16, model().lm_head.weight[ids], ids)
    return HeadModel(ParallelHead(made.requires_grad_(False)), SIZE)


def dflash():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    ids = torch.tensor([0, 2, 3, 4, 5])
    made = DFlash(DFlashConfig(config, (0, 1), 4, 1, 5), ids_K=ids).eval().requires_grad_(False)
    return HeadModel(MaskedBlockHead(made), SIZE)


CASES = [
    (head, (1, 1, 1), "rejection"),
    (head, (1, 1, 1), "block"),
    (head, (2, 2), "traversal"),
    (blockwise, (1, 1), "block"),
    (blockwise, (2, 2), "traversal"),
    (dflash, (2, 1, 1), "traversal"),
]


def chance(drafter, rule):
    engine = Engine(TreeDecoder(LlamaRunner(model(), False)), drafter, verifiers.get(rule))
    found, run = p_value(engine, text_law(model(), PROMPT, 3), PROMPT, 3, 1500)
    assert 0 < run.stats.accepted < run.stats.drafted
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("made", "counts", "rule"), CASES)
def test_texts_have_the_targets_law(made, counts, rule):
    assert chance(DraftModel(made(), counts), rule) > 1e-4


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("made", "counts", "rule"), [CASES[1], CASES[4]])
def test_a_head_that_declares_another_law_is_seen(made, counts, rule):
    assert chance(Mislabelled(DraftModel(made(), counts)), rule) < 1e-6


def test_a_head_is_certified():
    prompts = [[3, 1, 4, 1, 5, 9 + i % 8, i % 23, 2, 6] for i in range(16)]
    engine = Engine(pair()[0], DraftModel(driven(), (1, 1, 1)), verifiers.get("block"))
    assert certify(engine, prompts, SamplingParams(1.0), FEW).verdict == "exact"
