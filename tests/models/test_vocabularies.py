"""Pairs with one tokenizer and differently padded outputs, and pairs with two tokenizers."""

import pytest
import torch
from families import based, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from outrider import ConfigurationError, SamplingParams, Stop, VocabularyMismatch, load
from outrider.drafters import StringMatch

WORDS = [f"w{number}" for number in range(90)]
QUICK = {"threads": 1, "pack_weights": False, "dtype": "float32"}


def tokenizer(words):
    table = {"<pad>": 0, "<s>": 1, "</s>": 2, **{word: 3 + i for i, word in enumerate(words)}}
    inner = Tokenizer(WordLevel(table, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def save(folder, words, size, seed, head_dim=8):
    model = build(based("qwen3", vocab_size=size, head_dim=head_dim), "sdpa", seed)
    model.save_pretrained(folder)
    tokenizer(words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Qwen-style pair: 93 tokens, outputs padded to 96 and to 128."""
    root = tmp_path_factory.mktemp("pairs")
    return {
        "target": save(root / "target", WORDS, 128, 0),
        "draft": save(root / "draft", WORDS, 96, 0),
        "wide": save(root / "wide", WORDS, 256, 1),
        "moved": save(root / "moved", [WORDS[1], WORDS[0], *WORDS[2:]], 96, 2),
        "other": save(root / "other", [*WORDS[:-1], "novel"], 96, 3),
        "narrow": save(root / "narrow", WORDS, 96, 4),
    }


@pytest.mark.parametrize("draft", ["draft", "wide"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_differently_padded_outputs_give_the_targets_text(folders, draft, temperature):
    pair = load(folders["target"], folders[draft], shared_noise=True, **QUICK)
    assert pair.engine.target.vocab_size == pair.engine.drafter.model.vocab_size == 93
    prompts = ["w5 w6 w7 w5", "w40"]
    how, stop = SamplingParams(temperature, seed=4), Stop(20)
    fast = pair.generate(prompts, how, stop)
    assert fast.texts == pair.plain(shared_noise=True).generate(prompts, how, stop).texts
    assert max(max(c.token_ids) for c in fast.completions) < 93


PROMPTS = ["w5 w6 w7 w5", "w40", "w1 w2 w3", "w80 w81 w80 w81 w80", "w9 w9"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("draft", "common"), [("moved", 90), ("other", 89)])
def test_another_tokenizer_is_translated(folders, draft, common, temperature):
    """Ragged rows of which some end early; the text is plain decoding's with the same noise."""
    pair = load(folders["target"], folders[draft], **QUICK)
    assert pair.engine.drafter.name == "translated"
    assert f"{common} of the 90 tokens of {folders['target']}" in pair.notes.vocabulary
    assert str(folders[draft]) in pair.notes.vocabulary
    how = [SamplingParams(temperature, seed=row) for row in range(5)]
    ends = [Stop(7 + 5 * row % 11) for row in range(5)]
    plain = pair.using(pair.engine.drafter, "match").plain()
    for drafter in (pair.engine.drafter, StringMatch(pair.engine.drafter.model, 3)):
        fast = pair.using(drafter, "match").generate(PROMPTS, how, ends)
        assert fast.texts == plain.generate(PROMPTS, how, ends).texts


def test_a_draft_with_the_targets_law_under_other_ids_is_always_kept(folders, tmp_path):
    """One law, its ids moved: what is drafted is what the target says."""
    model = AutoModelForCausalLM.from_pretrained(folders["target"])
    order = torch.arange(128)
    order[3:93] = order[3:93].flip(0)
    with torch.no_grad():
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table.copy_(table.clone()[order])
    model.save_pretrained(tmp_path)
    tokenizer(WORDS[::-1]).save_pretrained(tmp_path)
    pair = load(folders["target"], tmp_path, **QUICK)
    done = pair.generate(PROMPTS, [SamplingParams(t) for t in (0, 0, 1, 1, 1)], Stop(21, (), ()))
    assert done.stats.accepted > 0.9 * done.stats.drafted > 0  # the last block ends at the limit


def test_a_draft_tokenizer_is_given_by_hand(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders["moved"])
    words = tokenizer([WORDS[1], WORDS[0], *WORDS[2:]])
    pair = load(folders["target"], model, draft_tokenizer=words, **QUICK)
    assert pair.engine.drafter.name == "translated"
    assert load(folders["target"], model, **QUICK).engine.drafter.name == "draft_model"
    with pytest.raises(ConfigurationError, match="draft_tokenizer is for a draft model"):
        load(folders["target"], draft_tokenizer=words, **QUICK)
    with pytest.raises(ConfigurationError, match="tokenizer must be a tokenizer of transformers"):
        load(folders["target"], model, draft_tokenizer=7, **QUICK)


def test_no_common_token_is_refused_and_both_tokenizers_named(folders, tmp_path):
    save(tmp_path, [f"x{number}" for number in range(90)], 96, 5)
    for drafter in (None, "draft_model", "string_match"):
        with pytest.raises(VocabularyMismatch, match="share no token") as caught:
            load(folders["target"], tmp_path, drafter=drafter, **QUICK)
        assert str(folders["target"]) in str(caught.value)
        assert str(tmp_path) in str(caught.value)


def test_options_that_the_default_has_no_use_for_are_refused_with_others_named(folders):
    with pytest.raises(ConfigurationError, match=r"no use for branching.*draft_model"):
        load(folders["target"], folders["other"], branching=(2, 2), **QUICK)
    with pytest.raises(ConfigurationError, match="draft must be a draft model with another"):
        load(folders["target"], folders["draft"], drafter="string_match", **QUICK)


def test_outputs_narrower_than_the_tokenizer_are_refused(folders):
    other = build(based("qwen3", vocab_size=80, head_dim=8))
    with pytest.raises(VocabularyMismatch, match="80 outputs, but the tokenizer has 93"):
        load(folders["target"], other, **QUICK)


def test_chat_messages_go_through_the_template(folders):
    speculator = load(folders["target"], folders["draft"], **QUICK)
    messages = [{"role": "user", "content": "w5 w6"}]
    with pytest.raises(ValueError, match="no chat template"):
        speculator.generate(messages)
    speculator.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} w1 {% endfor %}"
        "{% if add_generation_prompt %}w2{% endif %}"
    )
    how, stop = SamplingParams(0), Stop(6)
    said = speculator.generate(messages, how, stop)
    assert said.texts == speculator.generate("w5 w6 w1 w2", how, stop).texts
    assert speculator.generate([messages, messages], how, stop).texts == said.texts * 2
    with pytest.raises(ValueError, match="without role and content"):
        speculator.generate([{"text": "w5"}], how, stop)


def test_several_sequences_seeds_and_log_probabilities(folders):
    import torch

    speculator = load(folders["target"], folders["draft"], **QUICK)
    how = SamplingParams(0.8, top_k=9, seed=5, repetition_penalty=1.2)
    done = speculator.generate(
        ["w5 w6", "w7"], how, Stop(8), num_return_sequences=3, logprobs=True
    ).completions
    assert len(done) == 6
    assert done[0].token_ids != done[1].token_ids
    model = build(based("qwen3", vocab_size=128, head_dim=8), "sdpa", 0)
    for number, completion in enumerate(done):
        text = [8, 9] if number < 3 else [10]
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            with torch.no_grad():
                row = model(torch.tensor([text])).logits[0, -1, :93]
            for seen in set(text):
                row[seen] = row[seen] * 1.2 if row[seen] < 0 else row[seen] / 1.2
            row = row / 0.8
            row[row < row.topk(9).values[-1]] = -torch.inf
            assert float(row.log_softmax(0)[token]) == pytest.approx(logprob, abs=1e-3)
            text.append(token)
    with pytest.raises(ValueError, match=r"num_return_sequences must .* at least 1"):
        speculator.generate("w5", how, num_return_sequences=0)
