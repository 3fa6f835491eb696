"""Layers of the target as its draft, on the target's own cache."""

from functools import lru_cache

import pytest
import torch
from transformers import DynamicCache

from outrider import (
    ConfigurationError,
    Engine,
    SamplingParams,
    Stop,
    StopConditions,
    load,
    ops,
    verifiers,
)
from outrider.drafters import DrafterParts, DraftOptions, Root, make
from outrider.engine import step
from outrider.errors import UnsupportedModel
from outrider.models import TreeDecoder, layer_subset
from outrider.testing import RUNNERS, encoder_decoders, p_value, text_law
from outrider_lab.drafters.layer_skip import LayerSkip, part
from tiny import PROMPTS, Mislabelled, Restless, begun, decode, llama

VOCAB, LAYERS, KEPT = 5, 4, (0, 1, 3)


@lru_cache
def model(vocab=32):
    return llama(vocab_size=vocab, num_hidden_layers=LAYERS)


@lru_cache
def target(runner="lean", vocab=32):
    return TreeDecoder(RUNNERS[runner](model(vocab)))


def expected(text, kept):
    """[V]: the law behind a text, of some layers that see the entries of the whole model."""
    ids = torch.tensor([text])
    with torch.inference_mode():
        past = model()(ids[:, :-1], use_cache=True).past_key_values if len(text) > 1 else None
        few = DynamicCache()
        for at, number in enumerate(kept):
            if past is not None:
                layer = past.layers[number]
                few.update(layer.keys, layer.values, at)
        cut = layer_subset.cut(model(), kept)
        return cut(ids[:, -1:], past_key_values=few, use_cache=True).logits[0, -1].softmax(-1)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kept", [KEPT, (0, 1), (2,)])
def test_the_declared_law_is_that_of_the_layers_on_the_targets_entries(kept, runner):
    drafter = LayerSkip(part(target(runner), kept), (1, 1))
    how = [SamplingParams(1.0, seed=row) for row in range(len(PROMPTS))]
    state = begun(target(runner), drafter, PROMPTS, how)
    for _ in range(3):
        draft = step.propose(drafter, state)
        for row, length in enumerate(state.context.length_B.tolist()):
            text = state.context.tokens_BL[row, :length].tolist()
            found = ops.probs(draft.laws)[row, 0]
            torch.testing.assert_close(found, expected(text, kept), atol=1e-5, rtol=0)
        scores = step.score(target(runner), state, draft)
        verdict = step.verify(verifiers.get("rejection"), state, draft, scores)
        state, _ = step.commit(target(runner), drafter, state, draft, scores, verdict)


@pytest.mark.parametrize("runner", RUNNERS)
def test_all_layers_draft_what_the_target_says(runner):
    """Nothing that a draft has written is left over, and nothing of the text is lacking."""
    drafter = LayerSkip(part(target(runner), range(LAYERS)), (1, 1, 1))
    _, run = decode(Engine(target(runner), drafter), PROMPTS, limits=StopConditions(40))
    assert run.stats.accepted / run.stats.drafted > 0.97  # a text may end inside a draft


def test_entries_of_the_text_stay_as_they_are():
    drafter = LayerSkip(part(target(), KEPT), (2, 1))
    state = begun(target(), drafter, PROMPTS, [SamplingParams(0)] * len(PROMPTS))
    before = [stack.clone() for stack in state.cache.stacks]
    step.propose(drafter, state)
    written = False
    for old, new in zip(before, state.cache.stacks, strict=True):
        for row, prompt in enumerate(PROMPTS):
            own = slice(0, len(prompt) - 1)
            assert torch.equal(old[:, row, :, own], new[:, row, :, own])
            written |= not torch.equal(old[:, row], new[:, row])
    assert written


@pytest.mark.one_in(4)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2)])
def test_texts_are_plain_decodings(counts, runner):
    made = target(runner)
    drafter = Restless(LayerSkip(part(made, KEPT), counts))
    rows = [SamplingParams(0.9, seed=row) for row in range(len(PROMPTS))]
    for how, rule in ((SamplingParams(0), None), (rows, verifiers.get("match"))):
        plain = decode(Engine(made, Root(), rule), PROMPTS, how)[0]
        assert decode(Engine(made, drafter, rule), PROMPTS, how)[0] == plain


LENGTH, PROMPT = 2, (1, 3, 2)


@lru_cache
def law():
    return text_law(model(VOCAB), PROMPT, LENGTH)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("counts", [(1, 1), (2, 1)])
def test_the_law_is_the_targets_and_a_lie_is_seen(counts):
    small = target(vocab=VOCAB)
    drafter = LayerSkip(part(small, KEPT), counts)
    assert p_value(Engine(small, drafter), law(), PROMPT, LENGTH, 1500)[0] > 1e-4
    liar = Engine(small, Mislabelled(drafter))
    assert p_value(liar, law(), PROMPT, LENGTH, 1500)[0] < 1e-9


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ({}, "which of the target's 4 layers to leave out"),
        ({"skip": (1, 4)}, "numbers from 0 to 3; got 4"),
        ({"exit": 0}, "exit must be a whole number of at least 1"),
        ({"exit": 9}, "got 9"),
        ({"skip": range(4)}, "name some of them"),
        ({"skip": "two"}, "skip must be"),
    ],
)
def test_layers_that_are_not_there_are_refused(own, what):
    with pytest.raises(ConfigurationError, match=what):
        make("layer_skip", DrafterParts(target=target()), DraftOptions(own=own))


def test_an_encoder_decoder_has_layers_as_a_draft_model_alone():
    whole, _ = encoder_decoders("bart")
    with pytest.raises(UnsupportedModel, match="use draft_layers"):
        make("layer_skip", DrafterParts(target=whole), DraftOptions(own={"exit": 1}))


def test_it_is_asked_for_by_name():
    made = make(
        "layer_skip", DrafterParts(target=target()), DraftOptions(own={"skip": 2, "exit": 3})
    )
    assert made.model.of == (0, 1)
    fixed = {"dtype": "float32", "threads": 1, "pack_weights": False}
    speculator = load(drafter="layer_skip", drafter_options={"skip": (2, 5)}, **fixed)
    assert 2 not in speculator.engine.drafter.model.of
    greedy, stop = SamplingParams(temperature=0), Stop(12)
    plain = speculator.plain().generate("def add(a, b):", greedy, stop)
    assert speculator.generate("def add(a, b):", greedy, stop).texts == plain.texts
