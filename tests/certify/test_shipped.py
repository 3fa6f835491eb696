"""The shipped pair at full power: planted mistakes, lossy rules, exact rules. Minutes."""

import pytest

from outrider import DraftModel, Engine, load, verifiers
from outrider.certify import Power, bugs, certify
from outrider.cli.certify import read_prompts

pytestmark = pytest.mark.slow
POWER = Power(tokens=8_192, samples=512, equality=256)


@pytest.fixture(scope="module")
def pair():
    return load(dtype="float32", threads=1)


@pytest.fixture(scope="module")
def prompts(pair):
    return read_prompts(pair, None)


@pytest.mark.parametrize("name", bugs.BUGS)
def test_planted_mistakes_fail(pair, prompts, name):
    bug = bugs.get(name)
    power = Power(samples=512, equality=256) if name == "shared_noise" else POWER
    report = certify(bug.engine(pair.engine), prompts, bug.sampling, power)
    assert report.verdict == "not exact", report.as_dict()


@pytest.mark.parametrize("rule", ["lenience", "typical", "sigmoid"])
def test_lossy_rules_fail(pair, prompts, rule):
    drafter = DraftModel(pair.engine.drafter.model, (1, 1, 1, 1))
    engine = Engine(pair.engine.target, drafter, verifiers.get(rule))
    report = certify(engine, prompts, power=POWER)
    assert report.verdict == "not exact", report.as_dict()


@pytest.mark.parametrize("name", bugs.BUGS)
def test_sound_configurations_pass(pair, prompts, name):
    report = certify(bugs.sound(bugs.get(name), pair.engine), prompts, power=POWER)
    assert report.verdict == "exact", report.as_dict()
