"""transformers' own assisted sampling as a foreign generator, on tiny pairs.

With one vocabulary it is exact. With two (pinned 5.23) the pruned head's columns follow the order
of `get_vocab()`, the scatter into the target's ids ascending order: tokens change places.
"""

import pytest
import torch

from outrider import SamplingParams
from outrider_lab.certify import Power, foreign
from tiny import VOCAB, llama, perturbed

transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 1, 4, 1, 5, 9 + i % 8, i % 23 + 2, 2, 6] for i in range(24)]


def power(tokens):
    return Power(tokens=tokens, samples=200, equality_tokens=64, new_tokens=12, rows=24, effect=0.2)


def generator(target, assistant, new_tokens=12, **how):
    def generate(prompts):
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            # a fresh copy of the settings: assisted generation writes into them
            out = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=assistant,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                **how,
            )
            found.append(out[0, len(prompt) :].tolist())
        return found

    return generate


def tokenizer(words):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocab, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token=words[0])


def settings(model):
    model.generation_config.eos_token_id = None
    model.generation_config.num_assistant_tokens = 3
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_same_vocabulary_passes():
    torch.manual_seed(0)
    target = settings(llama())
    draft = settings(perturbed(llama(), 0.5))
    report = foreign(
        generator(target, draft), llama(), PROMPTS, SamplingParams(1.0), power(4000), draft=draft
    )
    assert not report.failed, report.as_dict()
    assert report.verdict == "exact"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_vocabularies_are_flagged():
    torch.manual_seed(0)
    words = [f"w{i}" for i in range(VOCAB)]
    target = settings(llama())
    # the assistant lacks nothing of the target but has words of its own: its head is pruned
    other = words + [f"x{i}" for i in range(8)]
    assistant = settings(llama(3, vocab_size=len(other)))
    how = {"tokenizer": tokenizer(words), "assistant_tokenizer": tokenizer(other)}
    report = foreign(generator(target, assistant, **how), llama(), PROMPTS, power=power(1500))
    assert report.verdict == "not exact", report.as_dict()
