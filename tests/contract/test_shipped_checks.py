"""`check_drafter` finds what is wrong with a drafter, and says where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from outrider import ConfigurationError, DraftModel, PromptLookup, SamplingParams
from outrider.engine import step
from outrider.testing import CHECKS, check_drafter
from outrider.types import Cache, Drafter, DraftShape
from tiny import PROMPTS, Mislabelled, begun, pair


@pytest.mark.exhaustive
def test_right_drafters_pass_and_every_check_is_run(monkeypatch):
    names = []
    for name, check in CHECKS.items():

        def noted(case, name=name, body=check.body):
            names.append(name)
            body(case)

        monkeypatch.setitem(CHECKS, name, check._replace(body=noted))
    check_drafter(lambda model: DraftModel(model, (1, 1)))
    assert list(dict.fromkeys(names)) == list(CHECKS)


@pytest.mark.parametrize("counts", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2)])
def test_a_drafter_that_lies_about_its_law_is_caught(counts):
    with pytest.raises(AssertionError, match=r"the law is the targets \(usual shape\).*p = "):
        check_drafter(lambda model: Mislabelled(DraftModel(model, counts)))


class Forgetful(NamedTuple):
    """A memory in which a row that moves into a seat leaves who sat there before."""

    cache: Cache
    rows: int

    def take(self, rows: Sequence[int]) -> "Forgetful":
        return Forgetful(self.cache.take(rows), len(rows))

    def put(self, into: Sequence[int], other: "Forgetful") -> "Forgetful":
        if max(into) < self.rows:
            return self
        rows = max(self.rows, 1 + max(into))
        return Forgetful(self.cache.put(into, other.cache), rows)

    def narrow(self, rows: int) -> "Forgetful":
        return Forgetful(self.cache.narrow(rows), rows)


@dataclass(frozen=True)
class Wrapped:
    """A drafter with one mistake."""

    drafter: Drafter

    def __getattr__(self, name):
        return getattr(self.drafter, name)


class WithForgetfulMemory(Wrapped):
    def open(self, context, capacity):
        return Forgetful(self.drafter.open(context, capacity), context.length_B.shape[0])

    def propose(self, memory, context, shape):
        return self.drafter.propose(memory.cache, context, shape)

    def commit(self, memory, context, draft, verdict, scores):
        self.drafter.commit(memory.cache, context, draft, verdict, scores)


@pytest.mark.parametrize("coupled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_memory_that_forgets_a_row_in_put_is_caught(coupled):
    """Also where the text is the target's own, whatever is drafted: less of it is accepted."""
    with pytest.raises(AssertionError, match=r"rows come and go \(setting \w+, usual shape\)"):
        check_drafter(lambda model: WithForgetfulMemory(DraftModel(model, (1, 1, 1), coupled)))


class Deeper(Wrapped):
    """In its shallowest shape it drafts a level more."""

    def propose(self, memory, context, shape):
        shapes = self.drafter.shapes
        given = shapes[-2] if shape.key == shapes[-1].key else shape
        return self.drafter.propose(memory, context, given)


def test_an_undeclared_shape_that_comes_back_is_caught():
    wrong = r"drafts are well formed \(setting greedy, shape 1\): 7 nodes, 2 deep"
    with pytest.raises(AssertionError, match=wrong):
        check_drafter(lambda model: Deeper(DraftModel(model, (2, 2))))


class Obliging(Wrapped):
    """It drafts something for any shape."""

    def propose(self, memory, context, shape):
        return self.drafter.propose(memory, context, self.drafter.shapes[0])


def test_a_drafter_that_looks_at_no_shape_is_caught():
    """What it does not declare is refused for it; of what it does each shape is a bound."""
    (target, _), drafter = pair(), Obliging(PromptLookup(2))
    state = begun(target, drafter, PROMPTS[:1], [SamplingParams(0)])
    with pytest.raises(ConfigurationError, match="declares no shape with key 17, only 2, 1"):
        step.propose(drafter, state, DraftShape(17, 99, 17, is_chain=True))
    with pytest.raises(AssertionError, match="2 deep, beyond what was asked for"):
        check_drafter(lambda model: Obliging(PromptLookup(2)))


class Reading(Wrapped):
    """It looks at a token on the host."""

    def propose(self, memory, context, shape):
        int(context.tokens_BL[0, 0])
        return self.drafter.propose(memory, context, shape)


def test_a_drafter_that_reads_the_device_is_caught():
    with pytest.raises(AssertionError, match=r"no device value \(setting greedy.*RuntimeError"):
        check_drafter(lambda model: Reading(DraftModel(model, (1,))))


class OfStates(Wrapped):
    """It asks for the target's hidden states, and finds them."""

    aux_layers = (-1, 0, 1)

    def open(self, context, capacity):
        if context.bound > 1:  # something was read before the pending token
            assert [state.shape[-1] for state in context.hidden] == [32] * 3
        return self.drafter.open(context, capacity)

    def commit(self, memory, context, draft, verdict, scores):
        shape = (*draft.tokens_BN.shape, 32)
        assert [state.shape for state in scores.hidden] == [shape] * 3
        self.drafter.commit(memory, context, draft, verdict, scores)


def test_a_drafter_that_reads_hidden_states_is_given_them():
    check_drafter(lambda model: OfStates(DraftModel(model, (1, 1), shared_noise=True)))
