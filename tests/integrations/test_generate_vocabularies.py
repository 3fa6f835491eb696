"""model.generate with a draft model that has another tokenizer, under transformers' own names."""

import pytest
import torch

from letters import DRAFT, TARGET, Letters
from outrider import ConfigurationError
from outrider.integrations.generate import SpeculativeGenerate, generate, speculative
from tiny import llama, perturbed

GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
WORDS = {"tokenizer": Letters(TARGET), "assistant_tokenizer": Letters(DRAFT)}


@pytest.fixture(scope="module")
def target():
    return llama()


@pytest.fixture(scope="module")
def draft():
    return perturbed(llama(), 0.12)


def prompts():
    return torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def test_greedy_text_is_plain_generates_and_drafts_are_kept(target, draft):
    plain = target.generate(prompts(), **GREEDY)
    made = target.generate(
        prompts(), custom_generate=speculative, draft_model=draft, **WORDS, **GREEDY
    )
    assert torch.equal(made, plain)
    assert speculative.stats.accepted > 0
    assert torch.equal(generate(target, prompts(), assistant_model=draft, **WORDS, **GREEDY), plain)
    fixed = SpeculativeGenerate(draft_model=draft, drafter="string_match", **WORDS)
    assert torch.equal(target.generate(prompts(), custom_generate=fixed, **GREEDY), plain)
    with pytest.raises(ConfigurationError, match="drafter 'string_match' has no use for branching"):
        target.generate(prompts(), custom_generate=fixed, branching=(2, 1), **GREEDY)


def test_trees_over_common_tokens_and_sampling(target, draft):
    plain = target.generate(prompts(), **GREEDY)
    shaped = SpeculativeGenerate(
        draft_model=draft, drafter="draft_model", branching=(2, 2), **WORDS
    )
    assert torch.equal(target.generate(prompts(), custom_generate=shaped, **GREEDY), plain)
    sampled = {**GREEDY, "do_sample": True, "top_k": 0}
    made = target.generate(prompts(), custom_generate=shaped, **sampled)
    assert made.shape == plain.shape
    assert shaped.stats.accepted > 0


def test_one_vocabulary_twice_is_no_translation(target, draft):
    same = {"tokenizer": Letters(TARGET), "assistant_tokenizer": Letters(TARGET)}
    shaped = SpeculativeGenerate(draft_model=draft, branching=(2, 2), **same)
    made = target.generate(prompts(), custom_generate=shaped, **GREEDY)
    assert torch.equal(made, target.generate(prompts(), **GREEDY))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"assistant_tokenizer": WORDS["assistant_tokenizer"]}, r"pass tokenizer=\.\.\., too"),
        ({**WORDS, "draft_tokenizer": Letters("ab")}, "contradicts"),
        ({**WORDS, "assistant_tokenizer": 5}, "must be a tokenizer of transformers"),
        ({**WORDS, "draft_model": None}, "draft_tokenizer is for a draft model"),
        ({**WORDS, "draft_model": None, "draft_layers": (0,)}, "only draft models of text alone"),
        ({**WORDS, "assistant_tokenizer": Letters("XYZ")}, "share no token"),
    ],
)
def test_what_cannot_be_translated_is_refused(target, draft, given, words):
    how = {"draft_model": draft, **given, **GREEDY}
    with pytest.raises(ConfigurationError, match=words):
        target.generate(prompts(), custom_generate=speculative, **how)
