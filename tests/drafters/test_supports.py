"""What may stand in a tree: tokens that the draft's own law can emit, penalties and bans included.

The laws are computed again for every prefix of every tree, one text at a time.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from outrider import SamplingParams, ops
from outrider.engine import step
from outrider.models.prefill import causal
from outrider.sampling import logits_processors
from outrider.sampling.logits_processors import apply
from outrider.sampling.sampling_params import rows
from outrider.tree import branching
from outrider.types import Context, DrawKind, Output
from tiny import DRAFTERS, MODELLESS, PROMPTS, TRANSLATED, begun, pair

ROWS = PROMPTS[:3]
#: Drafters whose children come from a model's law; that of layers depends on the target's cache,
#: that of a head on its states.
LIVING = ("layer skip", "head")
WITH_LAW = [name for name in DRAFTERS if name not in (*MODELLESS, *TRANSLATED, *LIVING)]


@dataclass(frozen=True)
class Masked:
    """A model that can say only two tokens after each token, or none at all after token `silent`.

    A grammar looks like this, and so does a draft whose vocabulary is narrower than the target's.
    """

    model: Any
    silent: int = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, cache, nodes, *, last=None, aux_layers=()):
        logits = self.model.forward(cache, nodes, last=last).logits_BQV
        token = nodes.tokens_BQ[:, -logits.shape[1] :, None]
        vocab = logits.shape[2]
        possible = torch.zeros_like(logits, dtype=torch.bool)
        possible.scatter_(2, torch.cat([token * 7 + 3, token * 5 + 1], 2) % vocab, True)
        return Output(logits.masked_fill(~possible | (token == self.silent), -torch.inf))


def law_after(model, text, how, prompt):
    """[V]: what a text on its own gives, under a row's sampling parameters."""
    tokens = torch.tensor([text])
    at = torch.arange(len(text))[None]
    logits = model.forward(model.open(1, 128), causal(tokens, at, 128), last=1).logits_BQV
    built = logits_processors.build([how], [prompt], [()], model.vocab_size, "cpu")
    settings = rows([how])._replace(shaping=built)
    context = Context(tokens, torch.tensor([len(text)]), len(text), settings)
    if built is not None:
        logits = apply(logits, built, context, tokens[:, -1:], branching(()))
    return ops.probs(ops.warp(logits, settings))[0, 0], logits[0, 0]


def proposed(drafter, target, settings):
    """A draft for three prompts, and the state it was made in."""
    state = begun(target, drafter, ROWS, settings, limit=64)
    return step.propose(drafter, state), state


def inner_nodes(draft, row):
    """(node, its path's tokens, its draws) of every node of a row that a walk can reach."""
    draws = draft.draws_BNK.expand(3, -1, -1)[row].tolist()
    tokens = draft.tokens_BN[row].tolist()
    waiting = [(0, [])]
    for node, path in waiting:  # grows while it is read
        kids = [kid for kid in draws[node] if kid >= 0]
        yield node, path, kids
        waiting += [(kid, [*path, tokens[kid]]) for kid in dict.fromkeys(kids)]


NARROW = {
    "top-k 1": [SamplingParams(1.0, top_k=1, seed=i) for i in range(3)],
    "top-k 2": [SamplingParams(1.3, top_k=2, seed=i) for i in range(3)],
    "top-p": [SamplingParams(1.0, top_p=0.05, seed=i) for i in range(3)],
    "min-p": [SamplingParams(0.7, min_p=0.6, seed=i) for i in range(3)],
    "greedy": [SamplingParams(0)] * 3,
    "mixed": [
        SamplingParams(0),
        SamplingParams(1.0, top_k=1, seed=1),
        SamplingParams(1.0, top_p=0.3, seed=2),
    ],
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("settings", NARROW)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", WITH_LAW)
def test_tokens_of_zero_probability_never_enter_a_tree(name, masked, settings, backend):
    target, small = pair(0.4)
    model = Masked(small) if masked else small
    with ops.use(backend):
        draft, _ = proposed(DRAFTERS[name](model), target, NARROW[settings])
    seen = 0
    for row, how in enumerate(NARROW[settings]):
        for _, path, kids in inner_nodes(draft, row):
            law, logits = law_after(model, [*ROWS[row], *path], how, ROWS[row])
            # a greedy row places runners-up, whose one-hot law gives them nothing
            possible = logits > -torch.inf if how.temperature == 0 else law > 0
            for kid in kids:
                assert possible[draft.tokens_BN[row, kid]]
                seen += 1
    assert seen >= 3


@pytest.mark.parametrize("name", ["n-gram table", "random"])
@pytest.mark.parametrize("settings", NARROW)
def test_tables_keep_to_the_filters_too(name, settings):
    target, small = pair(0.4)
    drafter = DRAFTERS[name](small)
    draft, _ = proposed(drafter, target, NARROW[settings])
    for row, how in enumerate(NARROW[settings]):
        for node, _, kids in inner_nodes(draft, row):
            for kid in kids:
                if how.temperature:
                    assert ops.probs(draft.laws)[row, node, draft.tokens_BN[row, kid]] > 0


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("name", [n for n in WITH_LAW if "chain" not in n])
def test_nothing_grows_where_nothing_is_possible(name, temperature):
    """Behind one of the two possible tokens the model falls silent: that branch ends there."""
    target, small = pair(0.4)
    first = (ROWS[0][-1] * 7 + 3) % small.vocab_size
    settings = [SamplingParams(temperature, seed=i) for i in range(3)]
    draft, _ = proposed(DRAFTERS[name](Masked(small, silent=first)), target, settings)
    silent = [
        kids
        for row in range(3)
        for _, path, kids in inner_nodes(draft, row)
        if path and path[-1] == first
    ]
    assert silent, "the silent token was never drafted"
    assert not any(silent)


SHAPED = {
    "repetition_penalty": 1.6,
    "presence_penalty": 0.7,
    "no_repeat_ngram_size": 2,
    "logit_bias": {4: 3.0, 9: -4.0},
}


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("name", WITH_LAW)
def test_drafts_are_drawn_under_the_requests_own_penalties(name, temperature):
    """The target as its own draft: what it proposes has the law that verifies it, node by node."""
    target, _ = pair()
    settings = [SamplingParams(temperature, seed=i, **SHAPED) for i in range(3)]
    drafter = DRAFTERS[name](target)
    draft, state = proposed(drafter, target, settings)
    scores = step.score(target, state, draft)
    verified = ops.scaled(scores.laws._replace(greedy="some")).log_softmax(-1)
    for row in range(3):
        for node, _, kids in inner_nodes(draft, row):
            if not kids:
                continue
            law = verified[row, node]
            places = [draft.draws_BNK.expand(3, -1, -1)[row, node].tolist().index(k) for k in kids]
            kind = draft.kind_BNK.expand(3, *draft.kind_BNK.shape[1:])[row, node][places]
            placed = draft.tokens_BN[row, kids][kind == DrawKind.FIXED].tolist()
            best = law.topk(len(placed)).indices.tolist() if placed else []
            assert sorted(placed) == sorted(best)
            drawn = draft.row_BNK.expand(3, -1, -1)[row, node, places[0]]
            if draft.laws is None or drawn < 0:
                continue
            declared = ops.probs(draft.laws)[row, drawn].log()
            given = declared > -torch.inf
            rest = law.masked_fill(~given, -torch.inf).log_softmax(-1)  # hubs leave placed ones out
            torch.testing.assert_close(declared[given], rest[given], atol=1e-4, rtol=0)
            assert given.sum() >= (law > -torch.inf).sum() - len(placed)


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("name", ["n-gram table", "n-gram tree", "random"])
def test_tables_leave_banned_tokens_out(name, temperature):
    target, small = pair()
    ban = SamplingParams(
        temperature, seed=1, logit_bias=dict.fromkeys(range(0, 32, 2), -1000000000.0)
    )
    draft, _ = proposed(DRAFTERS[name](small), target, [ban] * 3)
    likely = [
        draft.tokens_BN[row, kid]
        for row in range(3)
        for _, _, kids in inner_nodes(draft, row)
        for kid in kids[:1]
    ]
    assert len(likely) >= 3
    assert all(token % 2 == 1 for token in likely)
