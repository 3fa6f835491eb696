"""Pairs with one tokenizer and differently padded outputs work; other tokenizers are refused."""

import pytest
from families import based, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from outrider import Sampling, Stop, VocabularyMismatch, load

WORDS = [f"w{number}" for number in range(90)]
QUICK = {"threads": 1, "packed": False, "dtype": "float32"}


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
    pair = load(folders["target"], folders[draft], coupled=True, **QUICK)
    assert pair.engine.target.vocab_size == pair.engine.drafter.model.vocab_size == 93
    prompts = ["w5 w6 w7 w5", "w40"]
    how, stop = Sampling(temperature, seed=4), Stop(20)
    fast = pair.generate(prompts, how, stop)
    assert fast.texts == pair.plain(coupled=True).generate(prompts, how, stop).texts
    assert max(max(c.token_ids) for c in fast.completions) < 93


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("moved", "2 tokens have different ids, first 'w0': 3 against 4"),
        ("other", "2 tokens exist on one side only, first 'novel' .draft model."),
    ],
)
def test_another_tokenizer_is_refused_and_the_difference_named(folders, draft, words):
    with pytest.raises(VocabularyMismatch, match=words):
        load(folders["target"], folders[draft], **QUICK)


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
    how, stop = Sampling(0), Stop(6)
    said = speculator.generate(messages, how, stop)
    assert said.texts == speculator.generate("w5 w6 w1 w2", how, stop).texts
    assert speculator.generate([messages, messages], how, stop).texts == said.texts * 2
    with pytest.raises(ValueError, match="without role and content"):
        speculator.generate([{"text": "w5"}], how, stop)


def test_several_sequences_seeds_and_log_probabilities(folders):
    import torch

    speculator = load(folders["target"], folders["draft"], **QUICK)
    how = Sampling(0.8, top_k=9, seed=5, repetition_penalty=1.2)
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
