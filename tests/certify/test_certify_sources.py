"""Certification of encoder-decoders on tiny pairs: sources given or made up, and mistakes."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import whispers
from seq2seq_families import FAMILIES, build

from outrider import Engine, PromptLookup, SamplingParams, Timestamps
from outrider.drafters import SampledTree
from outrider.drafters.trees import optimal
from outrider.errors import ConfigurationError
from outrider.models import adapt
from outrider.types import Inputs
from outrider_lab.certify import Power, certify, foreign, run

FEW = Power(tokens=1536, samples=256, equality_tokens=96, new_tokens=16, rows=96, effect=0.1)
VOCAB, START = 97, 1
PROMPTS = [[START]] * 8


@lru_cache
def pair(family="T5", shares=False):
    """A target and a draft that often agree; the draft may attend to the target's states."""
    models = [build(FAMILIES[family]()) for _ in range(2)]
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in models[1].parameters():
            if weight.dim() > 1:
                weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=random)
    return adapt(models[0]), adapt(models[1], shares=shares)


def tree(family="T5", shares=False):
    target, draft = pair(family, shares)
    return Engine(target, SampledTree(draft, parents=optimal((0.6, 0.2, 0.1), 8, 3)))


def sources(random_seed=3):
    """Source texts of various lengths, for each prompt its own."""
    random = torch.Generator().manual_seed(random_seed)
    found = []
    for row in range(len(PROMPTS)):
        ids = torch.randint(3, VOCAB, (1, 4 + row % 4), generator=random)
        found.append(Inputs(ids, None, torch.ones_like(ids, dtype=torch.bool)))
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shares", [False, True], ids=["own encoder", "shared encoder"])
def test_a_pair_with_sampled_trees_passes(shares):
    report = certify(tree(shares=shares), PROMPTS, SamplingParams(0.8), FEW)
    assert report.verdict == "exact", report.as_dict()


def test_sources_that_are_given_and_copied_from_pass():
    engine = Engine(pair()[0], PromptLookup(3))
    how = SamplingParams(0.9, encoder_no_repeat_ngram_size=2, forced_eos_token_id=2)
    report = certify(engine, PROMPTS, how, FEW, inputs=sources())
    assert report.verdict == "exact", report.as_dict()


def test_rules_of_speech_pass():
    rules = Timestamps(no_timestamps_id=60, end_id=2, max_initial=9)
    how = SamplingParams(1.0, begin_suppress_tokens=(61, 2), timestamps=rules)
    report = certify(tree("Whisper"), [[5, 6, 7]] * 8, how, FEW)
    assert report.verdict == "exact", report.as_dict()
    assert report.setup["sampling"]["timestamps"]["end_id"] == 2


def test_rows_that_read_their_neighbours_source_are_seen(monkeypatch):
    asked = run._Run.decode

    def turned(self, engine, batch, *more):
        others = [prompt.inputs for prompt, _ in [*batch[1:], batch[0]]]
        wrong = [
            (replace(prompt, inputs=other), seed)
            for (prompt, seed), other in zip(batch, others, strict=True)
        ]
        texts = asked(self, engine, wrong, *more)
        return [prompt.text(t.new, t.seed) for (prompt, _), t in zip(batch, texts, strict=True)]

    monkeypatch.setattr(run._Run, "decode", turned)
    report = certify(tree(), PROMPTS, SamplingParams(0.8), FEW)
    assert report.verdict == "not exact"
    assert "greedy certificate" in report.failed


def assisted(model, frames, assistant):
    """First tokens by transformers' own generate of Whisper, with or without its assisted mode."""
    more = {} if assistant is None else {"assistant_model": assistant}

    def generate(prompts, numbers):
        made = []
        for number in numbers:
            ids = model.generate(
                input_features=frames[number : number + 1],
                language="en",
                task="transcribe",
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=2,
                **more,
            )
            made.append(ids[0, :1].tolist())
        return made

    return generate


@pytest.mark.filterwarnings("ignore")
def test_assisted_whisper_that_drops_begin_suppress_is_flagged():
    """transformers' assisted mode sets begin_suppress_tokens to None; its plain sampling keeps
    them."""
    torch.manual_seed(0)
    model, assistant = whispers.whisper(), whispers.whisper(seed=1)
    ids = whispers.tokenizer().get_vocab()
    names = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
    prompt = [ids[name] for name in names]
    begin, never = tuple(range(0, 256, 2)), list(range(257, len(ids)))
    model.generation_config.update(begin_suppress_tokens=list(begin), suppress_tokens=never)
    frames = torch.randn(2, 80, 2 * whispers.STATES)
    heard = torch.ones(1, frames.shape[2], dtype=torch.bool)
    rows = [Inputs(None, one[None].transpose(1, 2), heard) for one in frames]
    how = SamplingParams(
        1.0, logit_bias=dict.fromkeys(never, -torch.inf), begin_suppress_tokens=begin
    )
    few = Power(tokens=32, samples=32, new_tokens=1, rows=8)

    def verified(assistant):
        generator = assisted(model, frames, assistant)
        return foreign(generator, model, [prompt] * 2, how, few, inputs=rows)

    assert not verified(None).failed
    report = verified(assistant)
    assert report.verdict == "not exact"
    assert "support" in report.failed
    with pytest.raises(ConfigurationError, match="got no inputs for a target with an encoder"):
        foreign(assisted(model, frames, None), model, [prompt] * 2, how, few)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [([], "one for each prompt; got 0 for 8 prompts"), (sources()[:3], "got 3 for 8 prompts")],
)
def test_sources_are_one_for_each_prompt(inputs, says):
    with pytest.raises(ConfigurationError, match=says):
        certify(tree(), PROMPTS, SamplingParams(0.8), FEW, inputs=inputs)
