"""Every tree drafter with every exact rule that verifies it emits the target's law, end to end.

2000 texts of three tokens against the exact law of the tiny target, by chi-square with fixed seeds.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch

from outrider import DraftModel, Engine, SamplingParams, verifiers
from outrider.drafters import Beam, DynamicTree, HubTree, Paths, SampledTree, StaticTree
from outrider.models import LlamaRunner, TreeDecoder
from outrider.testing import p_value, text_law
from outrider.tree import shallower
from outrider.types import DrawKind
from tiny import Restless, llama, pair, perturbed

VOCAB, LENGTH, ROWS, PROMPT = 5, 3, 2000, (1, 3, 2)


@lru_cache
def other():
    """A second draft model, which disagrees with the first."""
    return TreeDecoder(LlamaRunner(perturbed(llama(vocab_size=VOCAB), 0.6, seed=5), False))


TREES = {
    "beam": lambda small: Beam(small, 3, 2),
    "paths": lambda small: Paths(small, 3, 2),
    "two models": lambda small: Paths(small, 3, 2, more=(other(),)),
    "hub": lambda small: HubTree(small, (2, 2)),
    "wide hub": lambda small: HubTree(small, (3, 1)),
    "static": lambda small: StaticTree(small, (2, 2)),
    "dynamic": lambda small: DynamicTree(small, 5, 3, 2),
    "coupled dynamic": lambda small: DynamicTree(small, 5, 3, 2, shared_noise=True),
    "uneven": lambda small: SampledTree(small, parents=(-1, 0, 0, 0, 1, 1, 2)),
}
#: Filters act on both sides.
SETTINGS = {"plain": SamplingParams(1.0), "filtered": SamplingParams(1.3, top_k=3)}


@lru_cache
def exact(setting: str):
    """Probability of every text of three tokens under the warped target."""
    each = text_law(llama(vocab_size=VOCAB), PROMPT, LENGTH, SETTINGS[setting])
    assert float(each.sum()) == pytest.approx(1)
    return each


def chance(drafter, rule, setting="plain"):
    """The p-value of the emitted texts, and accepted tokens per step."""
    engine = Engine(pair(0.4, VOCAB)[0], drafter, rule)
    value, run = p_value(engine, exact(setting), PROMPT, LENGTH, ROWS, SETTINGS[setting])
    return value, run.stats.accepted / run.stats.steps


#: Rules that play the very same lines on the other trees as one that is tested there.
ONLY = {"coupled": (), "hub": ("hub", "wide hub"), "multi_round": ("paths",),
        "kseq": ("paths", "two models")}  # fmt: skip


def legal():
    """By default each rule with a tree; the others are slow.

    Each tree with its own rule has a test below, with filters, and the contract's for two tokens.
    """
    _, small = pair(0.4, VOCAB)
    met = set()
    for name, make in TREES.items():
        drafter = make(small)
        for rule in verifiers.VERIFIERS.values():
            if name not in ONLY.get(rule.name, TREES):
                continue
            if rule.exact and verifiers.supports(rule, drafter.kinds, drafter.shapes[0].is_chain):
                marks = [pytest.mark.slow] if rule.name in met else []
                yield pytest.param(name, rule, id=f"{name}-{rule.name}", marks=marks)
                met.add(rule.name)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "rule"), list(legal()))
def test_the_law_is_the_targets(name, rule):
    _, small = pair(0.4, VOCAB)
    value, accepted = chance(TREES[name](small), rule)
    assert value > 1e-4
    assert 0.1 < accepted < 1.95


def by_default():
    """Trees under their own rules; by default one tree of each rule, the others are slow."""
    _, small = pair(0.4, VOCAB)
    met = set()
    for name, make in TREES.items():
        drafter = make(small)
        rule = verifiers.default(drafter.kinds, drafter.shapes[0].is_chain).name
        yield pytest.param(name, marks=[pytest.mark.slow] if rule in met else [])
        met.add(rule)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", list(by_default()))
def test_the_law_is_the_targets_under_filters(name):
    """A support of three tokens: most trees want more children than there are tokens."""
    _, small = pair(0.4, VOCAB)
    drafter = TREES[name](small)
    rule = verifiers.default(drafter.kinds, drafter.shapes[0].is_chain)
    assert chance(drafter, rule, "filtered")[0] > 1e-4


#: Rules and drafts that a shape per step and a depth per row may not bend.
RESTLESS = [("chain", "block"), ("chain", "rejection"), ("uneven", "rejection"),
            ("uneven", "traversal"), ("wide hub", "hub"), ("wide hub", "traversal"),
            ("beam", "traversal"), ("paths", "kseq"), ("two models", "rejection")]  # fmt: skip


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "rule"), RESTLESS)
def test_the_law_is_the_targets_with_another_shape_in_every_step(name, rule):
    _, small = pair(0.4, VOCAB)
    drafter = Restless(TREES.get(name, lambda m: DraftModel(m, (1, 1, 1)))(small), seed=3)
    value, accepted = chance(drafter, verifiers.get(rule))
    assert value > 1e-4
    assert accepted > 0.05


def test_a_depth_that_depends_on_what_was_drawn_is_caught():
    """A row that drops the tokens it does not like is not the target any more."""
    _, small = pair(0.4, VOCAB)

    def picky(draft):
        return shallower(draft, 3 * (draft.tokens_BN[:, 1] % 2))

    assert chance(Lie(DraftModel(small, (1, 1, 1)), picky), verifiers.get("block"))[0] < 1e-4


@dataclass(frozen=True)
class Lie:
    """A drafter whose drafts are changed before they are verified."""

    drafter: Any
    change: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, memory, context, shape):
        return self.change(self.drafter.propose(memory, context, shape))


def _with_placed_tokens(draft):
    """A hub's law that forgets to leave the placed tokens out: give back a flat law."""
    flat = torch.where(draft.laws.logits_BRV > -torch.inf, draft.laws.logits_BRV, 0.0)
    return draft._replace(laws=draft.laws._replace(logits_BRV=flat))


def _flatter(draft):
    declared = draft.laws.inverse_temperature_B * 0.25
    return draft._replace(laws=draft.laws._replace(inverse_temperature_B=declared))


def _of_the_first_model(draft):
    """Every draw declares the law of the first model: level by level its rows stand first."""
    start, row = 0, draft.row_BNK
    for nodes in (1, 3):
        second = (row >= start + nodes) & (row < start + 2 * nodes)
        row = torch.where(second, row - nodes, row)
        start += 2 * nodes
    return draft._replace(row_BNK=row)


def _once_each(draft):
    draws = draft.draws_BNK.clone()
    for k in range(1, draws.shape[2]):
        again = (draws[..., :k] == draws[..., k : k + 1]).any(-1)
        draws[..., k] = torch.where(again, -1, draws[..., k])
    return draft._replace(draws_BNK=draws)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("wide hub", _with_placed_tokens, "hub"),
        ("beam", _flatter, "rejection"),
        ("beam", _flatter, "traversal"),
        ("paths", _once_each, "kseq"),
        ("two models", _of_the_first_model, "rejection"),
        ("two models", _of_the_first_model, "kseq"),
        ("two models", _of_the_first_model, "traversal"),
        ("uneven", lambda d: d._replace(kinds=frozenset({DrawKind.WITH}),
                                        kind_BNK=d.kind_BNK * 0 + int(DrawKind.WITH)), "rejection"),
    ],
)  # fmt: skip
def test_a_draft_that_lies_is_caught(name, change, rule):
    _, small = pair(0.4, VOCAB)
    assert chance(Lie(TREES[name](small), change), verifiers.get(rule))[0] < 1e-4
