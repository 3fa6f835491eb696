"""A replayed step is the step: texts, drafts and blocks, over joins, widths and shapes."""

import pytest
import torch
from recorder import HostRead, Recorder
from tiny import DRAFTERS, PROMPTS, pair

from outrider import ops, sampling, step, verifiers
from outrider.graphs import CudaCapture, Graphed, Made
from outrider.sampling import Sampling


def verbs_of(target, drafter, rule):
    def verbs(state, shape):
        draft = step.propose(drafter, state, shape)
        scores = step.score(target, state, draft)
        verdict = step.verify(rule, state, draft, scores)
        state, block = step.commit(target, drafter, state, draft, scores, verdict)
        return Made(draft, scores, verdict, state, block)

    return verbs


def texts(name, prompts, steps, graphed, temperature=1.0):
    target, small = pair(runner="transformers")
    drafter = DRAFTERS[name](small)
    rule = verifiers.default(drafter.kinds, drafter.shapes[0].is_chain)
    rows = sampling.rows([Sampling(temperature, seed=5 + i) for i in range(len(prompts))])
    with ops.use("reference"):
        state = step.begin(
            target, drafter, prompts, rows, limits=[250] * len(prompts),
            limit_reasons=[step.LENGTH] * len(prompts), stop_ids=[[]] * len(prompts), capacity=256,
        )  # fmt: skip
        verbs = verbs_of(target, drafter, rule)
        capture = Recorder()
        run = Graphed(capture, verbs, drafter.shapes) if graphed else verbs
        for _ in range(steps):
            made = run(state, drafter.shapes[0])
            state = made.state
            bound = min(int(state.context.length_B.max()), 256 - drafter.shapes[0].max_nodes)
            state = state._replace(context=state.context._replace(bound=bound))
    lengths = state.context.length_B.tolist()
    found = [
        row[:n].tolist() for row, n in zip(state.context.tokens_BL, lengths, strict=True)
    ]
    return found, capture


@pytest.mark.parametrize("name", DRAFTERS)
def test_replayed_steps_give_the_same_text(name):
    eager, _ = texts(name, PROMPTS[:3], 6, graphed=False)
    graphed, capture = texts(name, PROMPTS[:3], 6, graphed=True)
    assert graphed == eager
    assert (capture.warmed, capture.records, capture.replays) == (1, 1, 5)
