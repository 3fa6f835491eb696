"""Classifier-free guidance: the guided law, whatever drafts, in chains and trees."""

import pytest
import torch

from outrider import Engine, Root, SamplingParams, StopConditions
from outrider.drafters import DraftModel, PromptLookup
from outrider.errors import ConfigurationError
from outrider.models import TreeDecoder
from outrider.testing import RUNNERS, decode, llama, p_value, perturbed
from outrider_lab.images.guidance import GuidedModel

SCALE, PROMPT, NULL = 2.5, (5, 3, 1), {5: 0, 3: 0}


def models(vocab=6, runner="lean", scale=SCALE):
    model = llama(vocab_size=vocab)
    run = RUNNERS[runner]
    target = GuidedModel(TreeDecoder(run(model)), scale, NULL)
    return model, target, TreeDecoder(run(perturbed(model, 0.2)))


def guided_logits(model, text):
    """Logits behind every token, from transformers' own forward of both rows."""
    both = torch.tensor([text, [NULL.get(token, token) for token in text]])
    with torch.inference_mode():
        given, without = model(both).logits.log_softmax(-1)
    return without + SCALE * (given - without)


def greedy(model, length, prompt=PROMPT):
    text = list(prompt)
    for _ in range(length):
        text.append(int(guided_logits(model, text)[-1].argmax()))
    return text[len(prompt) :]


def law_of_two(model):
    """Probability of every text of two tokens behind PROMPT."""
    vocab = model.config.vocab_size
    first = guided_logits(model, PROMPT)[-1].double().softmax(-1)
    second = [guided_logits(model, (*PROMPT, v))[-1].double().softmax(-1) for v in range(vocab)]
    return (first[:, None] * torch.stack(second)).flatten()


def drafters(draft):
    return {
        "root": Root(),
        "chain": DraftModel(draft, (1, 1, 1)),
        "tree": DraftModel(draft, (3, 2)),
        "guided chain": DraftModel(GuidedModel(draft, 2.0, NULL), (1, 1, 1)),
        "copies": PromptLookup(3),
    }


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", drafters(models()[2]))
def test_greedy_text_is_that_of_guided_logits(name, runner):
    model, target, draft = models(32, runner)
    engine = Engine(target, drafters(draft)[name])
    prompts = [[5, 3, 1], [3], [5, 9, 9, 9, 2]]
    texts, run = decode(engine, prompts, SamplingParams(0), StopConditions(24))
    assert texts == [greedy(model, 24, prompt) for prompt in prompts]
    if "chain" in name or name == "tree":
        assert run.stats.accepted > 0


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", ["chain", "tree", "guided chain"])
def test_sampled_text_has_the_guided_law(name):
    model, target, draft = models()
    engine = Engine(target, drafters(draft)[name])
    p, run = p_value(engine, law_of_two(model), PROMPT, 2, 4000)
    assert p > 1e-3
    assert run.stats.accepted > 0


def test_another_scale_is_seen():
    model, target, draft = models(scale=1.0)
    p, _ = p_value(Engine(target, DraftModel(draft, (1, 1))), law_of_two(model), PROMPT, 2, 4000)
    assert p < 1e-6


def test_coupled_text_depends_on_the_seed_alone():
    _, target, draft = models(32)
    coupled = DraftModel(draft, (1, 1, 1), shared_noise=True)
    rows = [SamplingParams(1.0, seed=seed) for seed in range(6)]
    texts = [
        decode(Engine(target, drafter, "match"), [PROMPT] * 6, rows, StopConditions(20))[0]
        for drafter in (Root(), coupled, DraftModel(draft, (2, 2)))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_token_that_both_rows_forbid_stays_forbidden():
    narrow = TreeDecoder(RUNNERS["lean"](llama(vocab_size=6)), vocab_size=8)  # two without logits
    engine = Engine(GuidedModel(narrow, SCALE, NULL), Root())
    rows = [SamplingParams(5.0, seed=seed) for seed in range(20)]
    texts, _ = decode(engine, [PROMPT] * 20, rows, StopConditions(20))
    assert {token for text in texts for token in text} <= set(range(6))


def test_what_cannot_be_guided():
    target = models()[1].model
    with pytest.raises(ConfigurationError, match="guidance_scale must be a finite number"):
        GuidedModel(target, float("nan"), {})
    with pytest.raises(ConfigurationError, match="guidance_scale must be a finite number"):
        GuidedModel(target, "3", {})
    with pytest.raises(ConfigurationError, match="unconditional maps tokens to tokens"):
        GuidedModel(target, 2.0, {99: 0})
