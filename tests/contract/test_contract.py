"""What every registered drafter and rule must do, from the registries themselves."""

from typing import Any

import numpy as np
import pytest
import torch

from outrider import ConfigurationError, Engine, drafters as registry, verifiers
from outrider.engine import step
from outrider.errors import UnknownName
from outrider.testing import CHECKS, SETTINGS, Case, checks
from outrider.types import DrawKind
from tiny import DRAFTERS, pair


def legal():
    """Every drafter with every rule that can verify it."""
    _, small = pair()
    for name, make in DRAFTERS.items():
        drafter = make(small)
        for rule in verifiers.VERIFIERS.values():
            if verifiers.supports(rule, drafter.kinds, drafter.shapes[0].is_chain):
                yield pytest.param(name, rule, id=f"{name}-{rule.name}")


def settled():
    """Every legal pair in every setting.

    By default each rule meets one drafter of each kind in the mixed setting, which has greedy and
    sampled rows; the rest is slow.
    """
    met = set()
    for pair_ in legal():
        name, rule = pair_.values
        drafter = DRAFTERS[name](pair()[1])
        kind = rule.name, drafter.kinds, drafter.shapes[0].is_chain
        for setting in SETTINGS:
            marks = [pytest.mark.slow] if kind in met or setting != "mixed" else []
            yield pytest.param(name, rule, setting, id=f"{pair_.id}-{setting}", marks=marks)
        met.add(kind)


def illegal():
    _, small = pair()
    for name, make in DRAFTERS.items():
        drafter = make(small)
        for rule in verifiers.VERIFIERS.values():
            if not verifiers.supports(rule, drafter.kinds, drafter.shapes[0].is_chain):
                yield pytest.param(name, rule, id=f"{name}-{rule.name}")


#: By default the one that has greedy and sampled rows.
MIXED = [pytest.param(s, marks=[] if s == "mixed" else [pytest.mark.slow]) for s in SETTINGS]


def test_every_registered_drafter_is_tested():
    _, small = pair()
    tested = {make(small).name for make in DRAFTERS.values()}
    assert tested == set(registry.DRAFTERS), "add what is missing to DRAFTERS in tests/tiny.py"


def test_every_rule_has_a_drafter_that_it_verifies():
    verified = {param.values[1].name for param in legal()}
    only_repeats = {n for n, r in verifiers.VERIFIERS.items() if r.kinds == {DrawKind.WITH}}
    assert verified >= set(verifiers.VERIFIERS) - only_repeats


@pytest.mark.parametrize(("name", "rule", "settings"), list(settled()))
def test_legal_pairs_run(name, rule, settings):
    checks.rules_that_verify_it_run(Case(DRAFTERS[name], settings, rule=rule))


@pytest.mark.parametrize(("name", "rule"), list(illegal()))
def test_illegal_pairs_are_refused_and_the_legal_rules_named(name, rule):
    target, small = pair()
    drafter = DRAFTERS[name](small)
    able = [
        name if other.exact else f"{name} (lossy)"
        for name, other in verifiers.VERIFIERS.items()
        if verifiers.supports(other, drafter.kinds, drafter.shapes[0].is_chain)
    ]
    with pytest.raises(ConfigurationError) as caught:
        Engine(target, drafter, rule)
    assert repr(rule.name) in str(caught.value)
    assert str(caught.value).endswith(", ".join(sorted(able)))


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_default_rule_is_exact_and_verifies_its_drafter(name):
    checks.the_default_rule_is_exact_and_verifies_it(Case(DRAFTERS[name]))


def test_names_are_keys_and_unknown_ones_are_refused():
    for name, rule in verifiers.VERIFIERS.items():
        assert rule.name == name
        assert isinstance(rule.exact, bool)
        assert rule.kinds <= frozenset(DrawKind)
    with pytest.raises(UnknownName, match="Did you mean 'rejection'"):
        verifiers.get("rejektion")


@pytest.mark.parametrize("settings", MIXED)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_verbs_read_no_device_value(name, settings):
    """Nor does any rule that verifies it."""
    checks.verbs_read_no_device_value(Case(DRAFTERS[name], settings))


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


@pytest.mark.parametrize(("name", "rule", "settings"), list(settled()))
def test_rules_are_pure_and_their_verdicts_well_formed(name, rule, settings):
    case = Case(DRAFTERS[name], settings, rule=rule)
    checks.verdicts_are_well_formed(case)
    target, drafter = pair()[0], case.drafter
    state = checks.batch(target, drafter, case)
    draft = step.propose(drafter, state)
    scores = step.score(target, state, draft)
    kept = copies((draft, scores))
    verdict = step.verify(rule, state, draft, scores)
    assert same(kept, (draft, scores))
    assert same(verdict, step.verify(rule, state, draft, scores))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_well_formed(name, settings):
    for case in checks.drafts_are_well_formed.cases(DRAFTERS[name]):
        if case.setting == settings:
            checks.drafts_are_well_formed(case)


@pytest.mark.parametrize("settings", MIXED)
@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_come_and_go(name, settings):
    checks.rows_come_and_go(Case(DRAFTERS[name], settings))


#: Checks of a drafter that depend on no setting; the default rule's has a test of its own.
WHOLE = [
    check
    for check in CHECKS.values()
    if not check.over and check is not checks.the_default_rule_is_exact_and_verifies_it
]


def whole():
    """Every drafter with every such check.

    The law takes thousands of texts: by default of one drafter of each kind, under its rule. What
    else a drafter is asked in whole texts is asked one of each kind by `make test`, and every one
    by `make test-all`; greedy text of every drafter is plain decoding's in both.
    """
    texts = {
        "text from a source is plain decodings",
        "references leave no trace",
        "matched text depends on the seed alone",
    }
    assert texts <= {check.name for check in WHOLE}
    _, small = pair()
    met = set()
    for name, make in DRAFTERS.items():
        drafter = make(small)
        chain = drafter.shapes[0].is_chain
        kind = verifiers.default(drafter.kinds, chain).name, drafter.kinds, chain
        for check in WHOLE:
            again = check is checks.the_law_is_the_targets and kind in met
            marks = [pytest.mark.slow] if again else []
            if check.name in texts and kind in met:
                marks = [pytest.mark.exhaustive]
            yield pytest.param(name, check, id=f"{name}-{check.name}", marks=marks)
        met.add(kind)


@pytest.mark.parametrize(("name", "check"), list(whole()))
def test_a_drafter_as_a_whole(name, check):
    check(Case(DRAFTERS[name]))
