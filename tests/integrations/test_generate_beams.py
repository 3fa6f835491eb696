"""`model.generate` with beams: transformers' own sequences and scores, by fewer rows."""

from itertools import cycle, product

import pytest
import torch
from tiny_pairs import FAMILIES, batch, pair

from outrider.integrations.generate import SpeculativeGenerate
from outrider.testing import llama

SETTINGS = {
    "plain": {"num_beams": 4},
    "several sequences": {"num_beams": 5, "num_return_sequences": 3, "length_penalty": 2.0},
    "early": {"num_beams": 3, "early_stopping": True, "length_penalty": -0.5},
    "never": {"num_beams": 3, "early_stopping": "never"},
    "bans": {"num_beams": 3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "penalty": {"num_beams": 4, "repetition_penalty": 1.6, "bad_words_ids": [[9], [11]]},
}
DRAFTING = {
    "root": {"drafter": "none"},
    "draft": {"num_speculative_tokens": 3},
    "lookup": {"drafter": "prompt_lookup"},
}


def same(model, inputs, drafting, **how):
    """Whether sequences and scores are those of plain generate; the statistics."""
    how = {"max_new_tokens": 12, "do_sample": False} | how
    told = {"return_dict_in_generate": True, "output_scores": True}
    plain = model.generate(**inputs, **how, **told)
    call = SpeculativeGenerate(**drafting)
    fast = model.generate(**inputs, custom_generate=call, **how, **told)
    assert torch.equal(fast.sequences, plain.sequences)
    torch.testing.assert_close(fast.sequences_scores, plain.sequences_scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(**inputs, custom_generate=call, **how), plain.sequences)
    return call.stats


#: Every setting and every family in the default tests, every setting of every family in slow ones.
DEFAULT = set(zip(SETTINGS, cycle(FAMILIES), strict=False))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow)
        for case in product(SETTINGS, FAMILIES)
    ],
)
def test_encoder_decoders(name, family):
    target, draft = pair(family)
    for drafting in DRAFTING.values():
        more = drafting if "drafter" in drafting else drafting | {"draft_model": draft}
        same(target, batch(), more, **SETTINGS[name])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_padded_prompts_of_a_decoder(name):
    model = llama()
    ids = torch.tensor([[0, 0, 3, 9, 4], [5, 6, 7, 5, 6], [0, 11, 12, 13, 14]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    how = {"eos_token_id": 7, "pad_token_id": 0} | SETTINGS[name]
    if "repetition_penalty" in how:
        how.pop("bad_words_ids")
    for drafting in ({"drafter": "none"}, {"drafter": "prompt_lookup"}):
        same(model, inputs, drafting, **how)


@pytest.mark.parametrize("seed", range(4))
def test_padding_is_no_token_of_a_penalty_in_any_row(seed):
    model = llama()
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 30, (3, 6), generator=random)
    ids[0, :2] = ids[2, :5] = 0
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    how = {"num_beams": 3, "repetition_penalty": 1.3, "pad_token_id": 0, "eos_token_id": 7}
    same(model, inputs, {"drafter": "prompt_lookup"}, **how)


def test_a_good_draft_saves_calls():
    target, _ = pair("t5")
    plain = same(target, batch(), {"drafter": "none"}, num_beams=3)
    drafted = same(target, batch(), {"draft_model": target}, num_beams=3)
    assert drafted.steps < plain.steps


def test_the_encoder_runs_once():
    target, _ = pair("bart")
    how = batch() | {"num_beams": 4, "max_new_tokens": 8}
    target.generate(**how, custom_generate=SpeculativeGenerate(drafter="none"))  # tries the model
    calls = []
    handle = target.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    try:
        target.generate(**how, custom_generate=SpeculativeGenerate(drafter="none"))
    finally:
        handle.remove()
    assert len(calls) == 1
