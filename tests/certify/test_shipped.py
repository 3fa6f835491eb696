"""The shipped pair: planted mistakes, lossy rules, sound configurations. Minutes each."""

import json
from dataclasses import replace

import bugs
import pytest

from outrider import DraftModel, Engine, load, verifiers
from outrider_lab.certify import Power, certify
from outrider_lab.commands.certify import certify_prompts

pytestmark = pytest.mark.slow
POWER = Power(tokens=4_096, samples=512, equality_tokens=256, effect=0.05)
MORE = {"shared_noise": 8_192}  #: the faintest: 4,096 tokens find it, barely
#: One mistake of each configuration: without the mistake the others of it are the same engine.
SOUND = list({(b.counts, b.mended): name for name, b in bugs.BUGS.items()}.values())


@pytest.fixture(scope="module")
def pair():
    return load(dtype="float32", threads=1)


@pytest.fixture(scope="module")
def prompts(pair):
    return certify_prompts(pair, None, None).prompts


def show(name, report):
    """What the tables of docs/certify.md are made from: `pytest -s` prints it."""
    largest = {t.name: round(t.statistic, 1) for t in report.tests if not t.passed}
    print(json.dumps({name: report.verdict, "seconds": round(report.seconds), "failed": largest}))


@pytest.mark.parametrize("name", bugs.BUGS)
def test_planted_mistakes_fail(pair, prompts, name):
    bug = bugs.get(name)
    power = replace(POWER, tokens=MORE.get(name, POWER.tokens))
    report = certify(bug.engine(pair.engine), prompts, bug.sampling, power)
    show(name, report)
    assert report.verdict == "not exact", report.as_dict()


@pytest.mark.parametrize("rule", [r for r in verifiers.VERIFIERS if not verifiers.get(r).exact])
def test_lossy_rules_fail(pair, prompts, rule):
    drafter = DraftModel(pair.engine.drafter.model, (1, 1, 1, 1))
    engine = Engine(pair.engine.target, drafter, verifiers.get(rule))
    report = certify(engine, prompts, power=POWER)
    show(rule, report)
    assert report.verdict == "not exact", report.as_dict()


@pytest.mark.parametrize("name", SOUND)
def test_sound_configurations_pass(pair, prompts, name):
    report = certify(bugs.sound(bugs.get(name), pair.engine), prompts, power=POWER)
    show(f"{name}, mended", report)
    assert report.verdict == "exact", report.as_dict()
