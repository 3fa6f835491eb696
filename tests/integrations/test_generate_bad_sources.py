"""Calls of encoder-decoders that cannot be honoured: one clear error before any work."""

import copy

import pytest
import torch
from tiny_pairs import VOCAB, batch, pair
from transformers import BartConfig, BartForCausalLM, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from outrider.errors import ConfigurationError, PromptError, VocabularyMismatch
from outrider.integrations.generate import SpeculativeGenerate, speculative
from tiny import llama

SHORT = {"max_new_tokens": 4, "custom_generate": speculative}


def refused(words, error=ConfigurationError):
    return pytest.raises(error, match=words)


def encoded(target):
    """A call that is given states instead of a source."""
    given = batch()
    states = target.get_encoder()(**given).last_hidden_state.detach()
    return {
        "encoder_outputs": BaseModelOutput(last_hidden_state=states),
        "attention_mask": given["attention_mask"],
    }


def test_a_draft_with_an_encoder_needs_something_to_read():
    target, draft = pair("t5")
    given, plain = encoded(target), target.generate(**batch(), max_new_tokens=12)
    with refused("what it shall read is not known.*pass draft_inputs="):
        target.generate(**given, **SHORT, draft_model=draft)
    how = {**given, "max_new_tokens": 12, "draft_model": draft}
    for more in (
        {"source_ids": batch()["input_ids"]},
        {"draft_inputs": batch()},
        {"draft_inputs": batch()["input_ids"]},
    ):
        call = SpeculativeGenerate()
        assert torch.equal(target.generate(custom_generate=call, **how, **more), plain)
        assert call.stats.accepted > 10


def test_lookup_needs_something_to_look_up():
    target, _ = pair("t5")
    given, plain = encoded(target), target.generate(**batch(), max_new_tokens=12)
    with refused(r"copies from a reference, and there is none.*reference="):
        target.generate(**given, **SHORT, drafter="reference_lookup")
    with refused("copies from a reference, and there is none"):
        llama().generate(torch.tensor([[5, 6, 7]]), **SHORT, drafter="reference_lookup")
    lists = [[5, 6, 7], [8, 9], [10]]
    for more in ({"source_ids": lists}, {"reference": lists}, {"reference": plain[0].tolist()}):
        how = {**given, "max_new_tokens": 12, "drafter": "reference_lookup", **more}
        assert torch.equal(target.generate(custom_generate=speculative, **how), plain)


@pytest.mark.parametrize(
    ("given", "words", "error"),
    [
        ({"reference": [[5], [6]]}, "got 2 for 3 rows", ConfigurationError),
        ({"reference": "text"}, "reference must be token ids", ConfigurationError),
        ({"reference": [[5, "a"]]}, "must be token ids", PromptError),
        ({"reference": [[5, VOCAB]]}, f"token id {VOCAB} outside the vocabulary", PromptError),
        ({"source_ids": [[5], [6]]}, "source_ids has 2 rows for 3", ConfigurationError),
        ({"draft_inputs": 5}, "draft_inputs must be a tensor", ConfigurationError),
        ({"draft_inputs": {}}, "draft_inputs must be a tensor", ConfigurationError),
        ({"num_beams": 2, "output_logits": True}, "output_logits or", ConfigurationError),
        ({"output_attentions": True}, "attn_implementation='eager'", ConfigurationError),
        ({"output_hidden_states": True}, "output_hidden_states is not supp", ConfigurationError),
    ],
)
def test_what_cannot_be_honoured_is_refused(given, words, error):
    target, draft = pair("bart")
    how = {"return_dict_in_generate": True, **batch(), **SHORT}
    if "reference" not in given:
        how["draft_model"] = draft
    with refused(words, error):
        target.generate(**how, **given)


def test_a_reference_is_for_those_who_look_into_it():
    target, draft = pair("bart")
    with refused("reference= is what drafter='reference_lookup' copies from; got 'draft_model'"):
        target.generate(**batch(), **SHORT, draft_model=draft, reference=[5, 6])


def test_sources_are_for_encoder_decoders():
    prompt = torch.tensor([[5, 6, 7]])
    for name in ("source_ids", "draft_inputs"):
        with refused(f"{name}= are for encoder-decoders"):
            llama().generate(prompt, **SHORT, **{name: prompt})
    fast = llama().generate(prompt, **SHORT, reference=[5, 6, 7, 8], drafter="reference_lookup")
    assert torch.equal(fast, llama().generate(prompt, max_new_tokens=4))


def test_padding_that_the_family_counts_as_text():
    target, draft = pair("bart")
    prompts = torch.tensor([[2, 20, 21], [0, 2, 22], [0, 2, 23]])
    mask = (prompts > 0).long()
    more = {"decoder_input_ids": prompts, "decoder_attention_mask": mask, "draft_model": draft}
    with refused("BartForConditionalGeneration counts the padding ahead"):
        target.generate(**batch(), **SHORT, **more)
    more["decoder_attention_mask"] = 1 - mask
    with refused("prompt 0 is not left-padded: its decoder_attention_mask"):
        target.generate(**batch(), **SHORT, **more)


def test_drafts_of_another_kind():
    target, _ = pair("bart")
    with refused("output sizes differ", VocabularyMismatch):
        other = T5ForConditionalGeneration(
            copy.deepcopy(pair("t5")[0].config).from_dict(
                {**pair("t5")[0].config.to_dict(), "vocab_size": 2000}
            )
        )
        target.generate(**batch(), **SHORT, draft_model=other.eval())


def test_a_decoder_alone_drafts_on_the_targets_states():
    target, near = pair("bart")
    config = BartConfig.from_dict(target.config.to_dict())
    draft = BartForCausalLM(config).eval()
    draft.model.decoder.load_state_dict(near.model.decoder.state_dict())
    draft.lm_head.weight = near.lm_head.weight
    call = SpeculativeGenerate(draft_model=draft)
    fast = target.generate(**batch(), max_new_tokens=16, custom_generate=call)
    assert torch.equal(fast, target.generate(**batch(), max_new_tokens=16))
    assert call.stats.accepted > 10
