"""EAGLE-3 heads compute what their formulas say: whole texts, and trees of rows under way."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from outrider import DraftModel, SamplingParams, StopConditions
from outrider.drafters import Beam, DynamicTree
from outrider.engine import step
from outrider.engine.batch import begin
from outrider.engine.request import Request
from outrider.verifiers import VERIFIERS
from tiny import PROMPTS, pair
from tiny_heads import FLAGS, IDS, Reference, driven, eagle3, paths

KINDS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", FLAGS)
@torch.inference_mode()
def test_a_whole_text_is_what_the_formulas_say(kind, flags):
    head = eagle3(kind=KINDS[kind], layers=2, **FLAGS[flags])
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    hidden = [torch.randn(1, len(text), 32) for _ in head.aux_layers]
    states = head(torch.tensor([text[1:]]), head.fuse(hidden)[:, :-1])
    reference = Reference(head, [x[0, :-1] for x in hidden])
    for size in (2, 5, 8):
        expected = reference.logits(text[:size])
        assert torch.allclose(head.logits(states)[0, size - 2], expected, atol=1e-4)
    assert torch.equal(head.ids_K, IDS)


def hidden_of(text):
    """The tiny target's states of all tokens but the last, at the aux layers of the tiny head."""
    model = pair(runner="transformers")[0].runner.model
    told = model(input_ids=torch.tensor([text]), output_hidden_states=True)
    layers = (*told.hidden_states[:2], told.hidden_states[-1])
    return [x[0, : len(text) - 1] for x in layers]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2, 1)], ids=["chain", "tree"])
@torch.inference_mode()
def test_laws_along_a_tree_are_those_of_its_paths(counts, flags):
    """Ragged rows, three steps: what was kept is read anew with the target's states."""
    target, model = pair()[0], driven(**FLAGS[flags])
    drafter, rule = DraftModel(model, counts), VERIFIERS["traversal"]
    requests = [
        Request(prompt, SamplingParams(1.0, seed=row), StopConditions(16))
        for row, prompt in enumerate(PROMPTS[:3])
    ]
    batch, kept = begin(target, drafter, requests, 128), 0
    for _ in range(3):
        draft = step.propose(drafter, batch)
        for row, length in enumerate(batch.context.length_B.tolist()):
            text = batch.context.tokens_BL[row, :length].tolist()
            reference = Reference(model.runner.head, hidden_of(text))
            for node, path in enumerate(paths(draft.tree, row, draft.tokens_BN[row].tolist())):
                if node >= draft.laws.logits_BRV.shape[1]:
                    continue  # a leaf has no law
                law = draft.laws.logits_BRV[row, node]
                assert torch.allclose(law[IDS], reference.logits(text[:-1] + path), atol=1e-4)
                assert (law > -torch.inf).sum() == len(IDS)
        scores = step.score(target, batch, draft, drafter.aux_layers)
        verdict = step.verify(rule, batch, draft, scores)
        kept += int(verdict.count_B.sum())
        batch, _ = step.commit(target, drafter, batch, draft, scores, verdict)
    assert kept  # some of what it drafted is read anew


@torch.inference_mode()
def test_plain_steps_and_short_prompts_are_caught_up_with():
    """A row of one token, and steps at which nothing is drafted: the law is the whole text's."""
    from outrider.types import PLAIN

    target, model = pair()[0], driven()
    drafter = DraftModel(model, (1, 1))
    requests = [
        Request(prompt, SamplingParams(1.0, seed=row), StopConditions(16))
        for row, prompt in enumerate(([6], [2, 7, 1]))
    ]
    batch = begin(target, drafter, requests, 128)
    for shape in (None, PLAIN, PLAIN, PLAIN, None):
        draft = step.propose(drafter, batch, shape)
        scores = step.score(target, batch, draft, drafter.aux_layers)
        verdict = step.verify(VERIFIERS["traversal"], batch, draft, scores)
        context = batch.context
        if shape is None:
            for row, length in enumerate(context.length_B.tolist()):
                text = context.tokens_BL[row, :length].tolist()
                if length > 1:
                    expected = Reference(model.runner.head, hidden_of(text)).logits(text)
                    law = draft.laws.logits_BRV[row, 0]
                    assert torch.allclose(law[IDS], expected, atol=1e-4)
        batch, _ = step.commit(target, drafter, batch, draft, scores, verdict)


@torch.inference_mode()
def test_a_prompt_of_more_tokens_than_there_are_slots_at_first(monkeypatch):
    """It is read in pieces, and what the head is told stands where it has written nothing yet."""
    monkeypatch.setattr("outrider.models.cache.FIRST", 16)
    monkeypatch.setattr("outrider.models.prefill.CHUNK", 64)
    target, model = pair()[0], driven()
    drafter, text = DraftModel(model, (1, 1)), [7 * at % 29 for at in range(200)]
    request = Request(text, SamplingParams(1.0, seed=0), StopConditions(16))
    batch = begin(target, drafter, [request], 256)
    law = step.propose(drafter, batch).laws.logits_BRV[0, 0]
    expected = Reference(model.runner.head, hidden_of(text)).logits(text)
    assert torch.allclose(law[IDS], expected, atol=1e-4)


def test_every_drafter_tells_it_what_it_reads():
    model = driven()
    for drafter in (DraftModel(model), Beam(model), DynamicTree(model)):
        assert drafter.aux_layers == (0, 1, -1)


def test_its_frequencies_go_along_to_another_device_and_stay_precise():
    """Else each step copies them there, and cannot be captured as a CUDA graph."""
    head = eagle3().to("meta", torch.bfloat16)
    assert head.dtype == torch.bfloat16
    frequencies = dict(head.rotary.named_buffers())
    assert frequencies
    assert {(x.device.type, x.dtype) for x in frequencies.values()} == {("meta", torch.float32)}
