"""What every registered drafter and rule must do, from the registries themselves."""

from typing import Any

import numpy as np
import pytest
import torch

import tiny
from outrider import ConfigurationError, Engine, Limits, Sampling, verifiers
from outrider import drafters as registry
from outrider.engine import step
from outrider.errors import UnknownName
from outrider.types import Kind, Output
from tiny import DRAFTERS, PROMPTS, decode, pair

SETTINGS = {
    "greedy": [Sampling(0)] * 3,
    "sampled": [Sampling(1.0, seed=i) for i in range(3)],
    "mixed": [
        Sampling(0),
        Sampling(0.8, top_k=7, seed=1),
        Sampling(1.2, top_p=0.9, min_p=0.01, seed=2),
    ],
}


class MetaCache:
    """Holds nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def keep(self, first_B, path_BD) -> None:
        assert first_B.is_meta
        assert path_BD.is_meta

    def take(self, rows_B) -> "MetaCache":
        return self


class MetaModel:
    """A LanguageModel on the meta device, where reading any value is an error."""

    vocab_size, context, device = 32, 256, torch.device("meta")
    dtype, trees = torch.float32, True

    def open(self, rows, capacity, inputs=None) -> MetaCache:
        return MetaCache(capacity)

    def forward(self, cache, nodes, *, last=None, hidden=False) -> Output:
        rows, queries = nodes.tokens_BQ.shape
        assert nodes.positions_BQ.shape == nodes.slots_BQ.shape == nodes.tokens_BQ.shape
        assert nodes.visible_BQW.shape[1] == queries
        count = queries if last is None else min(last, queries)
        return Output(torch.empty(rows, count, self.vocab_size, device="meta"))

    def keep(self, cache, first_B, path_BD) -> None:
        cache.keep(first_B, path_BD)

    def probe(self, rows) -> None:
        """It reads text alone."""


def legal():
    """Every drafter with every rule that can judge it."""
    _, small = pair()
    for name, make in DRAFTERS.items():
        drafter = make(small)
        for rule in verifiers.VERIFIERS.values():
            if verifiers.judges(rule, drafter.kinds, drafter.shapes[0].is_chain):
                yield pytest.param(name, rule, id=f"{name}-{rule.name}")


def illegal():
    _, small = pair()
    for name, make in DRAFTERS.items():
        drafter = make(small)
        for rule in verifiers.VERIFIERS.values():
            if not verifiers.judges(rule, drafter.kinds, drafter.shapes[0].is_chain):
                yield pytest.param(name, rule, id=f"{name}-{rule.name}")


def test_every_registered_drafter_is_tested():
    _, small = pair()
    tested = {make(small).name for make in DRAFTERS.values()}
    assert tested == set(registry.DRAFTERS), "add what is missing to DRAFTERS in tests/tiny.py"


def test_every_rule_has_a_drafter_that_it_judges():
    judged = {param.values[1].name for param in legal()}
    only_repeats = {n for n, r in verifiers.VERIFIERS.items() if r.kinds == {Kind.WITH}}
    assert judged >= set(verifiers.VERIFIERS) - only_repeats


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("name", "rule"), list(legal()))
def test_legal_pairs_run(name, rule, settings):
    target, small = pair()
    engine = Engine(target, DRAFTERS[name](small), rule)
    texts, run = decode(engine, PROMPTS[:3], SETTINGS[settings], Limits(12))
    assert [len(text) for text in texts] == [12] * 3
    assert all(0 <= token < target.vocab_size for text in texts for token in text)
    assert run.rule is rule


@pytest.mark.parametrize(("name", "rule"), list(illegal()))
def test_illegal_pairs_are_refused_and_the_legal_rules_named(name, rule):
    target, small = pair()
    drafter = DRAFTERS[name](small)
    able = [
        name if other.exact else f"{name} (lossy)"
        for name, other in verifiers.VERIFIERS.items()
        if verifiers.judges(other, drafter.kinds, drafter.shapes[0].is_chain)
    ]
    with pytest.raises(ConfigurationError) as caught:
        Engine(target, drafter, rule)
    assert repr(rule.name) in str(caught.value)
    assert str(caught.value).endswith(", ".join(sorted(able)))


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_default_rule_is_exact_and_judges_its_drafter(name):
    _, small = pair()
    drafter = DRAFTERS[name](small)
    for rule in (
        verifiers.default(drafter.kinds),
        verifiers.default(drafter.kinds, drafter.shapes[0].is_chain),
    ):
        assert rule.exact
        assert verifiers.judges(rule, drafter.kinds, drafter.shapes[0].is_chain)


def test_names_are_keys_and_unknown_ones_are_refused():
    for name, rule in verifiers.VERIFIERS.items():
        assert rule.name == name
        assert isinstance(rule.exact, bool)
        assert rule.kinds <= frozenset(Kind)
    with pytest.raises(UnknownName, match="Did you mean 'rejection'"):
        verifiers.get("rejektion")


def begun(model: Any, drafter: Any, sampling: Any) -> Any:
    return tiny.begun(model, drafter, PROMPTS[:3], sampling, limit=40, stop_ids=[(3,), (), (4, 5)])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("name", "rule"), list(legal()))
def test_the_verbs_read_no_device_value(name, rule, settings):
    model = MetaModel()
    drafter = DRAFTERS[name](model)
    state = begun(model, drafter, SETTINGS[settings])
    for _ in range(2):
        draft = step.propose(drafter, state)
        scores = step.score(model, state, draft)
        verdict = step.verify(rule, state, draft, scores)
        state, block = step.commit(model, drafter, state, draft, scores, verdict)
        assert block.tokens_BT.is_meta
    assert state.context.length_B.is_meta


def copies(x: Any) -> Any:
    """A deep copy of the tensors in nested tuples."""
    if isinstance(x, torch.Tensor):
        return x.clone()
    if isinstance(x, tuple):
        return type(x)(*map(copies, x)) if hasattr(x, "_fields") else tuple(map(copies, x))
    return x


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(torch.nan_to_num(a.double()), torch.nan_to_num(b.double()))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("name", "rule"), list(legal()))
def test_rules_are_pure_and_their_verdicts_well_formed(name, rule, settings):
    target, small = pair()
    drafter = DRAFTERS[name](small)
    state = begun(target, drafter, SETTINGS[settings])
    draft = step.propose(drafter, state)
    scores = step.score(target, state, draft)
    kept = copies((draft, scores))
    verdict = step.verify(rule, state, draft, scores)
    assert same(kept, (draft, scores))
    assert same(verdict, step.verify(rule, state, draft, scores))

    assert verdict.count_B.dtype == verdict.path_BD.dtype == verdict.next_B.dtype == torch.int64
    assert verdict.path_BD.shape == (3, draft.tree.max_depth)
    offered = draft.draws_BNK.expand(3, -1, -1)
    for row in range(3):
        count = int(verdict.count_B[row])
        path = verdict.path_BD[row].tolist()
        assert path[count:] == [-1] * (len(path) - count)
        here = 0
        for node in path[:count]:
            assert node in offered[row, here].tolist()
            here = node
        assert 0 <= int(verdict.next_B[row]) < 32


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_well_formed(name, settings):
    target, small = pair()
    drafter = DRAFTERS[name](small)
    state = begun(target, drafter, SETTINGS[settings])
    draft = step.propose(drafter, state)
    tree = draft.tree
    assert draft.kinds <= drafter.kinds
    assert tree.nodes <= drafter.shapes[0].max_nodes
    assert tree.is_chain or not drafter.shapes[0].is_chain
    pending = [prompt[-1] for prompt in PROMPTS[:3]]
    assert draft.tokens_BN[:, 0].tolist() == pending
    assert draft.tokens_BN.shape == (3, tree.nodes)
    draws = draft.draws_BNK.expand(3, -1, -1)
    parents = tree.parent_BN.expand(3, -1)
    for row in range(3):
        for node in range(tree.nodes):
            kids = [kid for kid in draws[row, node].tolist() if kid >= 0]
            assert all(int(parents[row, kid]) == node for kid in kids)
            tokens = draft.tokens_BN[row, kids].tolist()
            assert len(set(tokens)) == len(tokens) or Kind.WITH in draft.kinds
    drawn = (draws >= 0) & (draft.kind_BNK.expand_as(draws) != int(Kind.FIXED))
    assert ((draft.row_BNK.expand_as(draws) >= 0) == drawn).all() or Kind.COUPLED in draft.kinds
    if draft.laws is not None:
        assert draft.laws.logits_BRV.shape[0] == 3
        assert draft.laws.logits_BRV.shape[2] == 32
