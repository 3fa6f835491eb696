"""`generate` of encoder-decoders: sources in, answers out, ruled as transformers' `generate` is."""

import copy
from functools import lru_cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import outrider
from outrider import ReferenceLookup, Root, SamplingParams, Stop
from outrider.errors import ConfigurationError, PromptError
from outrider.testing import llama, sources
from outrider.types import Inputs
from source_families import encoder_decoder
from words import text_of, tokenizer

PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False}
SOURCES = [[9, 4, 7, 11, 2], [5, 8, 2], [13, 6, 13, 6, 21, 30, 2]]
GREEDY, END = SamplingParams(0), Stop(14)


class Sided(PreTrainedTokenizerFast):
    """Answers are written in capitals, which have the same ids: two vocabularies, as Marian's."""

    def _switch_to_target_mode(self):
        self.upper = True

    def _switch_to_input_mode(self):
        self.upper = False

    def _encode_plus(self, text, *args, **kwargs):
        if getattr(self, "upper", False):
            assert text == text.upper(), "read by the source's side"
            text = text.lower()
        return super()._encode_plus(text, *args, **kwargs)


@lru_cache
def loaded(family="bart", drafter=None, kind=PreTrainedTokenizerFast):
    model = encoder_decoder(family)
    return outrider.load(model, drafter=drafter, tokenizer=tokenizer(kind), **PLAIN)


def ruled(**settings):
    """A Bart with these settings in its generation configuration, and a speculator of it."""
    model = copy.deepcopy(encoder_decoder("bart"))
    for name, value in ({"forced_eos_token_id": None} | settings).items():
        setattr(model.generation_config, name, value)
    return model, outrider.load(model, tokenizer=tokenizer(), **PLAIN)


def transformers_text(model, rows=SOURCES, **settings):
    """What transformers' `generate` writes for a padded batch, start and padding left out."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[1] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    settings = {"max_new_tokens": 14, "do_sample": False, "num_beams": 1} | settings
    out = model.generate(input_ids=ids, attention_mask=mask, **settings).tolist()
    skip = settings.get("decoder_input_ids", ids[:, :1]).shape[1]
    texts = []
    for line in out:
        line = line[skip:]
        texts.append(line[: line.index(2) + 1] if 2 in line else line)
    return texts


def ids_of(generation):
    return [done.token_ids for done in generation.completions]


RULES = {
    "nothing": {},
    "first": {"forced_bos_token_id": 6},
    "last": {"forced_eos_token_id": 2},
    "ngrams": {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2},
    "least": {"min_length": 8, "begin_suppress_tokens": [31]},
    "words": {"bad_words_ids": [[31], [30, 30], [2]], "repetition_penalty": 1.5},
    "weights": {"sequence_bias": [[[31], -3.0], [[28, 28], -8.0]], "min_new_tokens": 5},
}


@pytest.mark.parametrize("rules", RULES)
def test_answers_are_transformers_under_the_rules_of_its_configuration(rules):
    model, speculator = ruled(**RULES[rules])
    expected = transformers_text(model)
    assert isinstance(speculator.engine.drafter, ReferenceLookup)
    assert ids_of(speculator.generate(SOURCES, GREEDY, END)) == expected
    without = speculator.generate(SOURCES, GREEDY, END, rules=SamplingParams())
    assert ids_of(without) == transformers_text(ruled()[0])
    assert (ids_of(without) != expected) == bool(RULES[rules])


@pytest.mark.parametrize("family", ["t5", "marian", "bert2bert", "t5gemma"])
def test_answers_are_transformers(family):
    speculator, model = loaded(family), encoder_decoder(family)
    assert ids_of(speculator.generate(SOURCES, GREEDY, Stop(14, token_ids=(2,)))) == (
        transformers_text(model, eos_token_id=2)
    )


def test_a_rows_own_rules_go_first():
    model, speculator = ruled(forced_bos_token_id=6, suppress_tokens=[31, 30])
    own = [
        SamplingParams(0),
        SamplingParams(0, forced_bos_token_id=7),
        SamplingParams(0, logit_bias={31: 0.0}),
    ]
    first, second, third = ids_of(speculator.generate(SOURCES, own, END))
    assert (first[0], second[0], third[0]) == (6, 7, 6)
    assert 31 not in first + second
    assert third == transformers_text(model, suppress_tokens=[30])[2]
    assert speculator.rules == SamplingParams(
        logit_bias={31: -float("inf"), 30: -float("inf")}, forced_bos_token_id=6
    )
    assert outrider.load(llama(), **PLAIN).rules == SamplingParams()


def test_a_setting_that_is_not_applied_is_said():
    _, speculator = ruled(encoder_repetition_penalty=2.0)
    with pytest.raises(ConfigurationError, match=r"sets encoder_repetition_penalty.*rules="):
        speculator.generate(SOURCES, GREEDY, END)
    assert speculator.generate(SOURCES, GREEDY, END, rules=speculator.rules).texts


@pytest.mark.parametrize("given", [[[2, 12, 17]], [[12, 17]], ["w12 w17"], "w12 w17", [12, 17]])
def test_answers_that_have_begun(given):
    model, speculator = encoder_decoder("bart"), loaded()
    begun = torch.tensor([[2, 12, 17]] * 1)
    expected = transformers_text(model, SOURCES[:1], decoder_input_ids=begun)
    done = speculator.generate(SOURCES[:1], GREEDY, END, decoder_prompts=given)
    assert ids_of(done) == expected
    assert ids_of(speculator.generate(SOURCES[:1], GREEDY, END)) != expected


def test_text_in_text_out_and_blocks_on_the_way():
    speculator = loaded()
    texts = [text_of(ids[:-1]) for ids in SOURCES]
    done = speculator.generate(texts, GREEDY, END, logprobs=True)
    assert ids_of(done) == ids_of(speculator.generate(SOURCES, GREEDY, END))
    assert done.texts[0] == text_of(ids_of(done)[0][:-1])  # without </s>, which is forced
    assert len(done.completions[0].logprobs) == len(done.completions[0].token_ids)
    stream = speculator.stream(texts, GREEDY, END)
    blocks = list(stream)
    assert stream.result().texts == done.texts
    for row, text in enumerate(done.texts):
        assert "".join(block.text for block in blocks if block.request_id == row) == text
    plain = speculator.plain().generate(texts, GREEDY, END)
    assert plain.texts == done.texts
    assert speculator.generate(texts[0], GREEDY, END).texts == done.texts[:1]


def test_several_answers_of_one_source_read_it_once():
    speculator, read = loaded("marian"), []
    reader = speculator.engine.target.runner.reader
    whole = type(reader).encode

    class Counting:
        def __getattr__(self, name):
            return getattr(reader, name)

        def encode(self, inputs):
            read.append(len(inputs.mask_BS))
            return whole(reader, inputs)

    speculator.engine.target.runner.reader = Counting()
    try:
        how = SamplingParams(1.0, seed=5)
        three = speculator.generate(SOURCES, how, END, num_return_sequences=3)
        assert sum(read) == 3
    finally:
        speculator.engine.target.runner.reader = reader
    assert len({tuple(ids) for ids in ids_of(three)}) == 9
    second = speculator.generate(SOURCES, SamplingParams(1.0, seed=6), END)
    assert ids_of(second) == ids_of(three)[1::3]


def test_a_reference_is_copied_from():
    speculator, end = loaded("whisper"), Stop(14, token_ids=())
    heard = list(sources(speculator.engine.target, 3))
    arrays = [np.asarray(row.features[0]) for row in heard]
    plain = speculator.plain().generate(heard, GREEDY, end)
    assert ids_of(speculator.plain().generate(arrays, GREEDY, end)) == ids_of(plain)
    assert ids_of(speculator.plain().generate(arrays[1], GREEDY, end)) == ids_of(plain)[1:2]
    right = ids_of(plain)
    for reference in (right, [text_of(ids) for ids in right]):
        done = speculator.generate(heard, GREEDY, end, reference=reference)
        assert ids_of(done) == right
        assert done.stats.mean_acceptance_length > 1.5
    wrong = speculator.generate(heard, GREEDY, end, reference=[None, "", [3, 4, 5]])
    assert ids_of(wrong) == right
    one = speculator.generate(heard[:1] * 3, GREEDY, end, reference=text_of(right[0]))
    assert one.stats.mean_acceptance_length > 1.5


def test_a_text_to_copy_from_ends_where_it_ends():
    """Behind a copied text comes its end, in the words of answers."""
    speculator = loaded("bart", kind=Sided)
    asked = speculator.engine.decode
    seen = []

    def decode(requests, **more):
        seen.extend((request.prompt, request.reference) for request in requests)
        return asked(requests, **more)

    object.__setattr__(speculator.engine, "decode", decode)
    try:
        speculator.generate("w5 w6", GREEDY, END, reference="W7 W8", decoder_prompts="W9")
    finally:
        del speculator.engine.decode
    assert seen == [((2, 9), (7, 8, 2))]


def test_a_reference_for_a_model_of_text():
    """RAG, a previous version: what is likely to be written again."""
    speculator = outrider.load(llama(), drafter="reference_lookup", tokenizer=tokenizer(), **PLAIN)
    prompt = [3, 1, 4, 1, 5]
    plain = ids_of(speculator.plain().generate(prompt, GREEDY, END, reference="w3"))
    done = speculator.generate(prompt, GREEDY, END, reference=text_of(plain[0]))
    assert ids_of(done) == plain
    assert done.stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("bias", [0.0, -float("inf")])
def test_ids_beyond_the_answers_vocabulary_are_not_copied(bias):
    """A source may be read in a larger vocabulary than answers are written in."""
    model = encoder_decoder("t5")
    speculator = outrider.load(model, **PLAIN)
    speculator.engine.target.vocab_size = 20  # what a smaller tokenizer leaves of it
    given = [[4, 25, 9, 31, 5, 30, 4]]
    done = speculator.generate(given, SamplingParams(0, logit_bias={4: bias}), END)
    assert max(ids_of(done)[0]) < 20


REFUSED = [
    (lambda s: s.generate([]), PromptError, "no prompt"),
    (lambda s: s.generate(""), PromptError, "prompt 0 is empty"),
    (lambda s: s.generate(SOURCES, decoder_prompts=["w5"]), ConfigurationError, "got 1 for 3"),
    (lambda s: s.generate(SOURCES, reference=[[5], [6]]), ConfigurationError, "got 2 for 3"),
    (lambda s: s.generate(SOURCES, reference=[[5], [6], [99]]), PromptError, "id 99 outside"),
    (lambda s: s.generate(SOURCES, rules={"top_k": 3}), ConfigurationError, "rules must be"),
    (lambda s: s.generate(SOURCES, reference=5), PromptError, "must be text"),
    (lambda s: s.generate(np.zeros((20, 8), "f")), ConfigurationError, "source text"),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED)
def test_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call(loaded())


def test_prompts_may_come_one_by_one():
    for speculator in (loaded(), outrider.load(llama(), tokenizer=tokenizer(), **PLAIN)):
        done = speculator.generate((ids for ids in SOURCES), GREEDY, END)
        assert ids_of(done) == ids_of(speculator.generate(SOURCES, GREEDY, END))


def test_refused_without_a_tokenizer_or_of_another_kind():
    bare = outrider.load(encoder_decoder("t5"), **PLAIN)
    with pytest.raises(ConfigurationError, match="text prompt needs a tokenizer"):
        bare.generate("w5")
    with pytest.raises(ConfigurationError, match="text prompt needs a tokenizer"):
        bare.generate([[5, 6]], reference="w5")
    text = outrider.load(llama(), tokenizer=tokenizer(), **PLAIN)
    with pytest.raises(ConfigurationError, match=r"decoder_prompts=.*behind the prompt"):
        text.generate([[5, 6]], decoder_prompts="w5")
    for heard in (torch.zeros(40, 8), [np.zeros((9, 8))], Inputs(None, None, torch.ones(1, 1))):
        with pytest.raises(ConfigurationError, match="reads text alone"):
            text.generate(heard)
    with pytest.raises(ConfigurationError, match=r"'recall' copies from no reference.*take"):
        text.generate([[5, 6]], reference="w5")
    by_hand = outrider.Speculator(outrider.Engine(bare.engine.target, Root()))
    with pytest.raises(ConfigurationError, match="begin with is not known"):
        by_hand.generate(SOURCES)
    assert by_hand.generate(SOURCES, GREEDY, END, decoder_prompts=[0]).texts
