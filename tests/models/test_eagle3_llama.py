"""Lean heads compute what their modules compute: every flag, trees of ragged rows, long texts."""

import copy

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

import outrider
from outrider import DraftModel, SamplingParams, StopConditions
from outrider.engine import step
from outrider.engine.batch import begin
from outrider.engine.request import Request
from outrider.models.cache import SlotCache
from outrider.models.heads.autoregressive_head import AutoregressiveHead
from outrider.models.heads.eagle3 import Eagle3, Eagle3Llama, fits
from outrider.models.heads.model import HeadModel
from outrider.models.linear import can_pack
from outrider.models.prefill import causal, of_tree
from outrider.tree import branching
from tiny import PROMPTS, pair
from tiny_heads import FLAGS, SIZES, VOCAB, eagle3, speculators, target

PACKINGS = [False, True] if can_pack() else [False]
TREE = branching((3, 2, 1))


def half(head):
    """The same weights in bfloat16, with heads of a size that kernels are compiled for."""
    return copy.deepcopy(head).to(torch.bfloat16)


def both(head, packed=False, positions=0):
    """Entries of two rows' prompts and of trees below them, by the module and by the lean form."""
    wide, dtype = 128, head.dtype
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, 40), generator=random)
    states = torch.randn(2, 40, head.width, generator=random).to(dtype)
    at = torch.arange(30).expand(2, -1)
    text = causal(tokens[:, :30], at, wide)
    tree = of_tree(tokens[:, : TREE.nodes], TREE, torch.tensor([29, 17]), wide)
    found = []
    for form in (head, Eagle3Llama(head, packed, positions)):
        cache, made = SlotCache(head.depth, 2, wide), []
        for nodes in (text, tree):
            cache.begin(nodes.slots_BQ, wide, 0)
            out = form.entries(nodes, states[:, : nodes.tokens_BQ.shape[1]], cache)
            made += [*out, form.logits(out)]
        found.append(made)
    return found


@pytest.mark.parametrize("packed", PACKINGS)
@pytest.mark.parametrize("flags", FLAGS)
@torch.inference_mode()
def test_it_computes_what_the_module_computes(flags, packed):
    head = eagle3(layers=2, **FLAGS[flags])
    assert fits(head)
    for module, lean in zip(*both(head, packed), strict=True):
        torch.testing.assert_close(lean, module, rtol=1e-4, atol=1e-4)
    hidden = [torch.randn(1, 3, 32) for _ in head.aux_layers]
    lean = Eagle3Llama(head, packed, 0).fuse(hidden)
    torch.testing.assert_close(lean, head.fuse(hidden), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
@torch.inference_mode()
def test_a_flag_that_is_lost_shows(flag):
    """The control of the test above: a lean form that leaves a flag out is told apart."""
    head, other = eagle3(), eagle3(**{flag: True})
    other.load_state_dict(head.state_dict())
    far = [(a - b).abs().max() for a, b in zip(both(head)[0], both(other)[1], strict=True)]
    assert max(far) > 0.1


@torch.inference_mode()
def test_in_half_precision_it_is_as_near_to_the_truth_as_the_module(monkeypatch):
    monkeypatch.setitem(SIZES, "head_dim", 16)
    exact = eagle3()
    truth = both(exact)[0]
    module, lean = both(half(exact))
    for expected, theirs, ours in zip(truth, module, lean, strict=True):
        error = (ours.float() - expected).norm() / expected.norm()
        assert error < 1.5 * (theirs.float() - expected).norm() / expected.norm() + 1e-3


@torch.inference_mode()
def test_texts_may_be_longer_than_its_configuration_says():
    """Positions reach as far as the target's; beyond them it goes on, worse."""
    head = eagle3()
    head.config.layer.max_position_embeddings = 20
    far, near = both(head, positions=256), both(head)
    torch.testing.assert_close(far[1], far[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(near[1][0], near[0][0], atol=1e-3)
    torch.testing.assert_close(near[1][0][:, :19], near[0][0][:, :19], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_drafts_are_those_of_the_module_step_by_step():
    first = pair()[0]
    head = eagle3()
    drafted = []
    for form in (head, Eagle3Llama(head, False, 256)):
        drafter = DraftModel(HeadModel(AutoregressiveHead(form), VOCAB), (2, 1))
        requests = [
            Request(prompt, SamplingParams(0.7, seed=row), StopConditions(16))
            for row, prompt in enumerate(PROMPTS[:3])
        ]
        batch = begin(first, drafter, requests, 128)
        rule, seen = outrider.verifiers.VERIFIERS["traversal"], []
        for _ in range(4):
            draft = step.propose(drafter, batch)
            scores = step.score(first, batch, draft, drafter.aux_layers)
            verdict = step.verify(rule, batch, draft, scores)
            batch, _ = step.commit(first, drafter, batch, draft, scores, verdict)
            seen.append(draft.tokens_BN.tolist())
        drafted.append(seen)
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize(("kind", "form"), [(LlamaConfig, Eagle3Llama), (Qwen3Config, Eagle3)])
def test_load_takes_it_where_it_fits(tmp_path, kind, form):
    folder = speculators(tmp_path, eagle3(kind=kind, aux_layers=(1, 2, 3)))
    made = outrider.load(
        target(), folder, dtype="float32", threads=1, pack_weights=False, planner="fixed"
    )
    assert type(made.engine.drafter.model.runner.head) is form
    ends = SamplingParams(temperature=0), outrider.Stop(12)
    texts = [one.generate(PROMPTS[0], *ends).completions for one in (made, made.plain())]
    assert texts[0][0].token_ids == texts[1][0].token_ids


def test_rotary_tables_that_change_with_the_text_are_left_to_the_module():
    head = eagle3()
    head.config.layer.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert not fits(head)
