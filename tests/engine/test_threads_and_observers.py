"""Threads may share an engine; an observer sees every step before its block goes out."""

import sys
import threading

import pytest
import torch

from outrider import (
    DraftModel,
    Engine,
    NumericalError,
    SamplingParams,
    StopConditions,
    ops,
    verifiers,
)
from outrider.drafters import Paths
from outrider.engine import step
from outrider.tree import branching
from outrider.types import Output
from tiny import DRAFTERS, PROMPTS, begun, pair


@pytest.fixture
def busy_switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["chain", "hub tree", "paths"])
def test_threads_do_not_write_to_each_others_rows(name, busy_switching):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small))

    def texts():
        runs = [
            engine.run(PROMPTS[:1], SamplingParams(1.0, seed=s), StopConditions(24))
            for s in range(8)
        ]
        return [[token for block in run for token in block.token_ids] for run in runs]

    want, found = texts(), {}
    threads = [threading.Thread(target=lambda n=n: found.__setitem__(n, texts())) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [want] * 4


def test_an_observer_sees_a_step_first_and_outside_inference_mode():
    target, small = pair()
    seen, kept = [], []

    def observe(draft, scores, verdict, block, requests):
        assert not torch.is_inference_mode_enabled()
        seen.append(run.stats.steps)
        kept.append(scores.laws.logits_BRV.clone())

    engine = Engine(target, DraftModel(small, (1, 1, 1)))
    run = engine.run(PROMPTS[:1], SamplingParams(1.0, seed=1), StopConditions(12), observe=observe)
    list(run)
    assert seen == list(range(run.stats.steps))
    kept[0].mul_(2)  # an ordinary tensor, not one of inference mode


def test_the_faulty_step_is_observed():
    target, small = pair()

    class Broken:
        left = 4

        def __getattr__(self, name):
            return getattr(target, name)

        def forward(self, *args, **kwargs):
            self.left -= 1
            output = target.forward(*args, **kwargs)
            broken = torch.full_like(output.logits_BQV, torch.nan)
            return output if self.left > 0 else Output(broken, output.hidden)

    wild = []
    engine = Engine(Broken(), DraftModel(small, (1, 1)))
    run = engine.run(
        PROMPTS[:1],
        SamplingParams(1.0, seed=1),
        StopConditions(30),
        observe=lambda draft, scores, *rest: wild.append(
            bool(scores.laws.logits_BRV.isnan().any())
        ),
    )
    with pytest.raises(NumericalError):
        list(run)
    assert wild == [False] * (len(wild) - 1) + [True]
    assert len(wild) > 1


def test_a_shortened_draft_lies_where_it_should():
    """What a drafter knows about places holds for its own draft only."""
    target, small = pair()
    drafter = DraftModel(small, (1,) * 4)
    state = begun(target, drafter, PROMPTS[:1], [SamplingParams(1.0, seed=3)])
    draft = step.propose(drafter, state)
    whole = step.score(target, state, draft).laws.logits_BRV
    draws, row = (torch.cat([t[:, :2], t[:, -1:]], 1) for t in (draft.draws_BNK, draft.row_BNK))
    short = draft._replace(
        tokens_BN=draft.tokens_BN[:, :3],
        tree=branching((1, 1)),
        draws_BNK=draws,
        row_BNK=row,
        kind_BNK=draft.kind_BNK[:, :3],
    )
    part = step.score(target, state, short).laws.logits_BRV
    torch.testing.assert_close(part, whole[:, :3], atol=1e-5, rtol=1e-5)
    verdict = step.verify(verifiers.get("block"), state, short, step.score(target, state, short))
    assert int(verdict.count_B) <= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kseq_verifies_what_the_cpu_code_cannot(temperature):
    """Two draft models, or placed children: no refusal, whatever backend was asked for."""
    target, small = pair()
    engine = Engine(target, Paths(small, 3, 3, more=(small,)), verifiers.get("kseq"))
    with ops.use("cpu"):
        run = engine.run(PROMPTS[:1], SamplingParams(temperature, seed=1), StopConditions(8))
        assert sum(len(block.token_ids) for block in run) == 8
