"""Verdicts given their drafts: fresh noise passes for every rule, shared noise is found."""

import bugs
import pytest
import torch

from outrider import DraftModel, Engine, SamplingParams, StopConditions, noise, verifiers
from outrider.types import DrawKind
from outrider_lab.certify.statistics import Surplus
from outrider_lab.certify.verification_tests import KEPT, NEXT, Verdicts
from tiny import DRAFTERS, TRANSLATED, pair

PROMPTS = [[3, 1, 4, 1, 5, 9 + i % 8, i % 23, 2, 6] for i in range(64)]


def verified(engine, tokens=32, sampling=None):
    """Both tests over 64 texts, at a level of 1e-4 each."""
    verdicts = Verdicts(engine.choose_rule("none"))
    settings = [sampling or SamplingParams(1.0, seed=seed) for seed in range(len(PROMPTS))]
    for _ in engine.run(PROMPTS, settings, StopConditions(tokens), observe=verdicts):
        pass
    return {test.name: test for test in verdicts.results(1e-4, 0.9)}


#: It enumerates tuples of tokens: seconds a pair. By default it verifies copies alone here.
DEAR = "otm"


def exact_pairs():
    """Every pair; by default each rule with one drafter of each kind, the others are slow."""
    _, small = pair(0.5)
    met = set()
    for name, make in DRAFTERS.items():
        drafter = make(small)
        for rule in verifiers.VERIFIERS.values():
            if rule.exact and verifiers.supports(rule, drafter.kinds, drafter.shapes[0].is_chain):
                kind = rule.name, drafter.kinds, drafter.shapes[0].is_chain
                dear = rule.name == DEAR and name != "prompt_lookup"
                marks = [pytest.mark.slow] if dear or kind in met else []
                yield pytest.param(name, rule, id=f"{name}-{rule.name}", marks=marks)
                met.add(kind)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "rule"), list(exact_pairs()))
def test_every_exact_rule_plays_its_own_outcome(name, rule):
    target, small = pair(0.5)
    drafter = DRAFTERS[name](small)
    tests = verified(Engine(target, drafter, rule))
    assert all(test.passed for test in tests.values()), tests
    silent = not drafter.kinds or DrawKind.COUPLED in drafter.kinds
    if rule.name == "non_iterative" and (drafter.kinds == {DrawKind.FIXED} or name in TRANSLATED):
        silent = True  # it keeps none where p / q has no bound: q is 0 but for some tokens
    assert (tests[KEPT].p_value is None) == silent


def test_a_residual_that_shares_the_drafts_noise_is_found():
    bug = bugs.get("shared_noise")
    target, small = pair(0.5)
    engine = Engine(target, DraftModel(small, (1,)))
    bad, good = verified(bug.engine(engine), 96), verified(bugs.sound(bug, engine), 96)
    assert not bad[NEXT].passed, bad
    assert bad[KEPT].passed, bad
    assert all(test.passed for test in good.values()), good


class _OneUniform:
    """Tests every token of a chain with the uniform of its first one."""

    def __init__(self, rule):
        self.rule = rule

    def __getattr__(self, name):
        return getattr(self.rule, name)

    def __call__(self, draft, scores, draws):
        nodes, most = draft.tree.nodes, draft.draws_BNK.shape[2]
        uniform = noise.accept_uniforms(draws, nodes, most)[:, :1, :1]
        uniform = uniform.expand(-1, nodes, most).contiguous()
        return self.rule(draft, scores, draws._replace(uniform_BNK=uniform))


def test_accept_tests_that_share_one_uniform_are_found():
    target, small = pair()
    rule, drafter = verifiers.get("rejection"), DraftModel(small, (1, 1, 1, 1))
    good = verified(Engine(target, drafter, rule))
    bad = verified(Engine(target, drafter, _OneUniform(rule)))
    assert good[KEPT].passed
    assert not bad[KEPT].passed, bad


def test_a_rule_that_draws_from_the_target_after_a_refusal_is_found():
    target, small = pair(0.5)
    bug = bugs.get("residual_from_target")
    assert not verified(bug.engine(Engine(target, DraftModel(small))))[NEXT].passed


def test_filters_change_nothing():
    target, small = pair(0.5)
    engine = Engine(target, DraftModel(small, (3, 2)), verifiers.get("traversal"))
    assert all(t.passed for t in verified(engine, sampling=SamplingParams(0.8, top_k=6)).values())


def test_surplus_is_standard_normal_without_a_cause_and_silent_without_variance():
    torch.manual_seed(0)
    chance, record = torch.rand(20_000), Surplus()
    found = torch.rand(20_000) < chance
    record.add(found, chance, chance * (1 - chance))
    test = record.test("x", 1e-3, 0.9, "event")
    assert abs(test.statistic) < 3.3
    assert test.detectable == pytest.approx(
        (3.2905 + 1.2816) * (chance * (1 - chance)).sum().sqrt().item() / 20_000, rel=1e-3
    )
    record.add(torch.ones(2_000), torch.full((2_000,), 0.5), torch.full((2_000,), 0.25))
    assert not record.test("x", 1e-3, 0.9, "event").passed
    still = Surplus()
    still.add(torch.ones(50), torch.ones(50), torch.zeros(50))
    assert still.test("x", 1e-3, 0.9, "event").p_value is None
