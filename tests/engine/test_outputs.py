"""The block of a step on a CPU, and a device's, equals the portable one, whatever ends a row."""

import os
from importlib.util import find_spec

import pytest
import torch

from outrider import SamplingParams, ops, verifiers
from outrider.engine import step
from outrider.ops.cpu import commit_tokens
from outrider.ops.reference import walking
from outrider.types import CONTEXT, LENGTH, STOP, Ends
from tiny import DRAFTERS, PROMPTS, begun, pair

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
STOPS = [(), (3,), tuple(range(0, 32, 2)), (5, 6), tuple(range(16))]


def on_a_device(draft, scores, verdict, ends):
    """By Triton's kernel, in its interpreter."""
    from outrider.ops.triton.commit_tokens import commit_tokens as settled

    return settled(draft, scores, verdict, ends)


@pytest.mark.parametrize("name", ["root", "chain", "tree", "beam"])
@pytest.mark.parametrize("broken", [None, "wild", "wild, found once", "dead"])
def test_few_rows_and_many_agree(name, broken, monkeypatch):
    monkeypatch.setattr(commit_tokens, "_FEW_ROWS", 5)
    target, small = pair()
    drafter = DRAFTERS[name](small)
    rule = verifiers.default(drafter.kinds, drafter.shapes[0].is_chain)
    for seed in range(12):
        state = begun(
            target,
            drafter,
            PROMPTS[:5],
            [SamplingParams(1.0, seed=10 * seed + row) for row in range(5)],
            64,
            limit=[len(text) + 1 + (seed + row) % 4 for row, text in enumerate(PROMPTS[:5])],
            stop_ids=STOPS if seed % 3 else None,
        )
        reasons = torch.tensor([LENGTH, CONTEXT] * 2 + [LENGTH])
        state = state._replace(limit_reason_B=reasons)
        state = state._replace(reason_B=torch.tensor([0, 0, 0, seed % 2 * STOP, 0]))
        draft = step.propose(drafter, state)
        scores = step.score(target, state, draft)
        verdict = step.verify(rule, state, draft, scores)
        if broken == "dead":
            dead = torch.rand(draft.tokens_BN.shape, generator=torch.manual_seed(seed)) < 0.3
            scores = scores._replace(dead_BN=dead)
        if broken in ("wild", "wild, found once"):
            logits = scores.laws.logits_BRV.clone()
            logits[seed % 5, -1, 3] = (torch.nan, torch.inf)[seed % 2]
            laws = scores.laws._replace(logits_BRV=logits)
            scores = scores._replace(laws=ops.cache_top_tokens(laws) if "once" in broken else laws)
        ends = Ends(
            state.context.length_B,
            state.limit_B,
            state.limit_reason_B,
            state.stop_BS,
            state.reason_B,
        )
        few = commit_tokens.commit_tokens(draft, scores, verdict, ends)
        many = walking.commit_tokens(draft, scores, verdict, ends)
        for field, ours, theirs in zip(few._fields[:-1], few[:-1], many[:-1], strict=True):
            torch.testing.assert_close(ours, theirs, msg=f"{field} differs: {ours} and {theirs}")
        if INTERPRETED:
            there = on_a_device(draft, scores, verdict, ends)
            for field, ours, theirs in zip(there._fields[:-1], there[:-1], many[:-1], strict=True):
                torch.testing.assert_close(ours, theirs, msg=f"{field}: {ours} and {theirs}")
        assert few.lists is not None
        assert many.lists is None
        told = few._replace(lists=None), many
        fields = ("tokens_BT", "emitted_B", "reason_B", "accepted_B", "drafted_B", "overlap_B")
        for name, ours in zip((*fields, "overlaps_B"), few.lists, strict=True):
            for block in told:
                there = getattr(block, name).tolist()
                if name == "overlap_B":
                    there = pytest.approx(there, rel=1e-5)
                assert ours == there, name
