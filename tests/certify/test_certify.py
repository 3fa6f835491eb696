"""Certification on tiny models: exact engines pass, planted mistakes and lossy rules fail."""

import dataclasses
import json

import bugs
import pytest
import torch

from outrider import DraftModel, Engine, PromptLookup, Root, SamplingParams, verifiers
from outrider.engine.request import StopConditions
from outrider.errors import ConfigurationError, PromptError
from outrider.types import DrawKind
from outrider_lab.certify import (
    Power,
    certify,
    distribution_tests,
    foreign,
    laws,
    matrix,
    run,
    statistics,
)
from outrider_lab.certify.distribution_tests import PooledTest
from outrider_lab.certify.laws import CertifiedText, score
from outrider_lab.certify.run import shared_noise
from outrider_lab.drafters.lookahead import Lookahead
from tiny import DRAFTERS, decode, pair

SMALL = Power(
    tokens=5_000, samples=512, equality_tokens=128, new_tokens=32, rows=64, effect=0.05, level=1e-3
)
PROMPTS = [[3, 1, 4, 1, 5, 9 + i % 8, i % 23, 2, 6] for i in range(32)]

TEXT = [token for prompt in PROMPTS for token in prompt]
EXACT = [rule for rule in verifiers.VERIFIERS.values() if rule.exact]


def chain(rule=None, counts=(1, 1, 1), **how):
    target, draft = pair(0.5)
    verifier = verifiers.get(rule) if isinstance(rule, str) else rule
    return Engine(target, DraftModel(draft, counts, **how), verifier)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "engine",
    [
        chain("block"),
        chain("rejection", (3, 2)),
        chain("match", (2, 1), shared_noise=True),
        Engine(pair(0.5)[0], PromptLookup(3)),
        Engine(pair(0.5)[0], Root()),
    ],
    ids=lambda e: f"{e.drafter.name}-{e.choose_rule('none').name}",
)
def test_exact_engines_pass(engine):
    report = certify(engine, PROMPTS, SamplingParams(1.0), SMALL)
    assert not report.failed, report.as_dict()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sampling", [SamplingParams(0.7, top_k=6), SamplingParams(1.0, top_p=0.8)])
def test_filters_pass(sampling):
    report = certify(chain("block"), PROMPTS, sampling, SMALL)
    assert report.verdict == "exact", report.as_dict()


def evens_up(input_ids, scores):
    return scores + (input_ids.sum(-1, keepdim=True) % 2) * (torch.arange(scores.shape[-1]) % 2)


SHAPED = {
    "penalties": SamplingParams(
        0.9, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.3
    ),
    "bias": SamplingParams(0.8, logit_bias={3: 2.0, 5: -torch.inf}),
    "ban": SamplingParams(1.0, top_k=9, no_repeat_ngram_size=2, min_new_tokens=9),
    "processor": SamplingParams(1.0, top_p=0.9, processors=(evens_up,)),
}
FEW = Power(tokens=1536, samples=256, equality_tokens=96, new_tokens=16, rows=96, effect=0.1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SHAPED)
def test_what_shapes_logits_shapes_the_law_that_is_tested(name):
    report = certify(chain("block"), PROMPTS, SHAPED[name], FEW)
    assert report.verdict == "exact", report.as_dict()
    json.dumps(report.as_dict())
    cold = dataclasses.replace(SHAPED[name], temperature=0)
    assert certify(chain("block"), PROMPTS, cold, FEW).verdict == "exact"


def test_shaping_that_the_text_does_not_have_is_seen(monkeypatch):
    """Tokens of the plain law, tested against the law that was asked for."""
    asked = run._Run.decode

    def plain(self, engine, batch, sampling, *more):
        return asked(self, engine, batch, SamplingParams(sampling.temperature), *more)

    monkeypatch.setattr(run._Run, "decode", plain)
    for name in ("penalties", "processor"):
        report = certify(chain("block"), PROMPTS, SHAPED[name], FEW)
        assert report.verdict == "not exact"
        assert {"greedy certificate", "marginal"} & set(report.failed)


def test_processors_are_not_asked_about_what_lies_behind_a_text():
    target, _ = pair()

    def strict(ids, scores):
        assert 7 not in ids[:, 3:], "texts end with 7"
        return scores

    texts = [laws.CertifiedText((2, 4, 6), (5, 7)), laws.CertifiedText((2, 4, 6), (5, 8, 9, 3, 5))]
    scored = laws.score(target, texts, SamplingParams(1.0, processors=(strict,)))
    assert scored.valid_BT.sum(1).tolist() == [2, 5]


def test_a_foreign_generator_is_held_to_the_shaped_law():
    target, draft = pair(0.5)
    asked, seeds = SHAPED["bias"], iter(range(10**6))

    def generator(prompts, given=asked):
        settings = [dataclasses.replace(given, seed=next(seeds)) for _ in prompts]
        return decode(Engine(target, Root()), prompts, settings, StopConditions(16))[0]

    assert foreign(generator, target, PROMPTS, asked, FEW, draft=draft).verdict == "exact"
    wrong = foreign(lambda p: generator(p, SamplingParams(0.8)), target, PROMPTS, asked, FEW)
    assert wrong.verdict == "not exact"
    assert "support" in wrong.failed  # a banned token
    for unknown in ("min_new_tokens", "forced_eos_token_id"):
        with pytest.raises(ConfigurationError, match=f"{unknown}=4; leave it out"):
            foreign(generator, target, PROMPTS, SamplingParams(1.0, **{unknown: 4}), FEW)


def test_greedy_has_one_certificate():
    report = certify(chain("rejection", (2, 2)), PROMPTS, SamplingParams(0), SMALL)
    assert [t.name for t in report.tests] == ["greedy certificate"]
    assert report.verdict == "exact"
    assert report.exit_code == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", ["lenience", "typical", "sigmoid"])
def test_lossy_rules_fail(rule):
    report = certify(chain(rule), PROMPTS, SamplingParams(1.0), SMALL)
    assert report.verdict == "not exact"
    assert report.exit_code == 1


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", bugs.BUGS)
def test_planted_mistakes_fail(name):
    bug = bugs.get(name)
    report = certify(bug.engine(chain()), PROMPTS, bug.sampling, SMALL)
    assert report.verdict == "not exact", report.as_dict()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["shared_noise", "reordered_siblings"])
def test_the_same_configuration_without_the_mistake_passes(name):
    bug = bugs.get(name)
    report = certify(bugs.sound(bug, chain()), PROMPTS, bug.sampling, SMALL)
    assert not report.failed, report.as_dict()


def test_too_little_power_is_not_a_pass():
    few = Power(tokens=64, samples=32, equality_tokens=32, new_tokens=16, rows=8)
    report = certify(chain("block"), PROMPTS, SamplingParams(1.0), few)
    assert report.verdict == "inconclusive"
    assert report.exit_code == 3


def test_report_is_json():
    few = Power(tokens=64, samples=32, equality_tokens=32, new_tokens=16, rows=8)
    report = certify(chain("block"), PROMPTS, SamplingParams(1.0), few)
    read = json.loads(json.dumps(report.as_dict()))
    assert read["verdict"] == "inconclusive"
    assert {t["name"] for t in read["tests"]} >= {"coupled equality", "marginal", "set q > p"}


def test_texts_do_not_depend_on_how_often_they_are_certified():
    few = Power(tokens=256, samples=64, equality_tokens=32, new_tokens=16, rows=8)
    first, again = (certify(chain("block"), PROMPTS, SamplingParams(1.0), few) for _ in range(2))
    assert [t.statistic for t in first.tests] == [t.statistic for t in again.tests]


def test_bad_input():
    with pytest.raises(PromptError, match="at least one"):
        certify(chain(), [], SamplingParams(1.0), SMALL)
    with pytest.raises(PromptError, match="at least 3 tokens"):
        certify(chain(), [[1]], SamplingParams(1.0), SMALL)
    with pytest.raises(ConfigurationError, match="at least 1"):
        Power(tokens=0)
    with pytest.raises(ConfigurationError, match="unknown planted mistake"):
        bugs.get("no such")


def test_teacher_forced_laws_of_ragged_texts():
    target, _ = pair()
    texts = [
        CertifiedText((1, 2, 3), (4, 5)),
        CertifiedText((7, 8, 9, 10, 11), (3,)),
        CertifiedText((5, 6), (1, 2, 3)),
    ]
    together = score(target, texts, SamplingParams(1.0))
    for row, text in enumerate(texts):
        alone = score(target, [text], SamplingParams(1.0))
        count = len(text.new)
        assert together.token_BT[row, :count].tolist() == list(text.new)
        assert together.valid_BT[row].sum() == count
        gap = together.laws.logits_BRV[row, :count] - alone.laws.logits_BRV[0, :count]
        assert gap.abs().max() < 1e-4


def test_tails_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    for x, freedom in ((3.0, 2), (34.1, 9), (120.0, 99)):
        expected = stats.chi2.sf(x, freedom)
        assert statistics.chi_square_tail(x, freedom) == pytest.approx(expected, rel=1e-6)
    assert statistics.kolmogorov_tail(0.02, 5000) == pytest.approx(
        stats.kstwo.sf(0.02, 5000), rel=0.05
    )
    for freedom, known in ((1, 20.9), (4, 27.7), (19, 42.6), (99, 77.5)):
        assert statistics.noncentrality(freedom, 1e-3, 0.9) == pytest.approx(known, rel=0.02)


def test_null_statistics_are_standard():
    """Tokens drawn from p itself: Z is small, ranks are uniform, the marginal fits."""
    torch.manual_seed(0)
    law = torch.randn(64, 64, 20).mul(2).softmax(-1)
    guess = torch.randn(64, 64, 20).mul(2).softmax(-1)
    token = torch.multinomial(law.view(-1, 20), 1).view(64, 64)
    pool = PooledTest()
    pool.add(law, guess, token, torch.ones(64, 64, dtype=torch.bool), torch.rand(64, 64))
    assert all(t.p_value > 1e-3 for t in pool.results(1e-4, 0.9))
    again = torch.multinomial(law[0, 0], 4000, replacement=True).tolist()
    assert distribution_tests.test(law[0, 0], again, 1e-4, 0.9).p_value > 1e-3
    wrong = torch.multinomial(guess[0, 0], 4000, replacement=True).tolist()
    assert not distribution_tests.test(law[0, 0], wrong, 1e-4, 0.9).passed


@pytest.mark.exhaustive
def test_foreign_generator_passes_and_a_warm_one_fails():
    target, draft = pair(0.5)
    engine, seed = Engine(target, Root()), iter(range(10**6))

    def sample(prompts, temperature):
        settings = [SamplingParams(temperature, seed=next(seed)) for _ in prompts]
        tokens = [[] for _ in prompts]
        for block in engine.run(prompts, settings, StopConditions(32)):
            tokens[block.row] += block.token_ids
        return tokens

    good = foreign(lambda p: sample(p, 1.0), target, PROMPTS, SamplingParams(1.0), SMALL)
    assert good.verdict == "exact", good.as_dict()
    warm = foreign(
        lambda p: sample(p, 1.15), target, PROMPTS, SamplingParams(1.0), SMALL, draft=draft
    )
    assert warm.verdict == "not exact"
    cold = foreign(lambda p: sample(p, 0), target, PROMPTS, SamplingParams(0), SMALL)
    assert cold.verdict == "exact"
    with pytest.raises(ConfigurationError, match="empty lists"):
        foreign(lambda p: [[] for _ in p], target, PROMPTS, SamplingParams(1.0), SMALL)


def test_matrix_resumes(tmp_path):
    target, draft = pair(0.5)
    few = Power(tokens=64, samples=32, equality_tokens=32, new_tokens=16, rows=8)
    todo = matrix.pairs(matrix.drafters(draft))
    path = tmp_path / "results.jsonl"
    first = list(matrix.run(target, todo[:2], PROMPTS, SamplingParams(1.0), few, path))
    assert [old for *_, old in first] == [False, False]
    second = list(matrix.run(target, todo[:3], PROMPTS, SamplingParams(1.0), few, path))
    assert [old for *_, old in second] == [True, True, False]


def matrix_drafters():
    target, draft = pair()
    return matrix.drafters(draft, TEXT, 32, target)


def test_guesses_of_lookahead_are_verified_by_what_has_variance():
    """Those of a row that has just begun are none that the target would say: nothing to test."""
    few = Power(tokens=512, samples=32, equality_tokens=32, new_tokens=16, rows=32, effect=0.2)
    report = certify(Engine(pair(0.5)[0], Lookahead()), PROMPTS, SamplingParams(1.0), few)
    assert report.verdict == "exact", report.as_dict()


def test_layers_of_the_target_are_verified_though_they_have_no_cache(tmp_path):
    few = Power(tokens=64, samples=32, equality_tokens=32, new_tokens=16, rows=8)
    made = {name: one for name, one in matrix_drafters().items() if name.startswith("layer_skip")}
    found = matrix.run(
        pair(0.5)[0],
        matrix.pairs(made)[:2],
        PROMPTS,
        SamplingParams(1.0),
        few,
        tmp_path / "results",
    )
    assert [row["verdict"] for _, row, _ in found] == ["inconclusive"] * 2  # few tokens, no failure


def test_the_matrix_holds_every_legal_pair_of_the_registries():
    made = matrix_drafters()
    other_tokenizers = ["string_match", "translated"]  # tests/exactness/test_translated_laws.py
    assert matrix.missing(made) == other_tokenizers
    todo = matrix.pairs(made)
    keys = {item.key for item in todo}
    assert len(keys) == len(todo)
    for label, drafter in made.items():
        for rule in verifiers.VERIFIERS.values():
            legal = rule.exact and verifiers.supports(
                rule, drafter.kinds, drafter.shapes[0].is_chain
            )
            if drafter.kinds:  # without a draft all rules are one, and two of them are tried
                assert (f"{label} / {rule.name}" in keys) == legal
    assert {item.rule.name for item in todo} == {r.name for r in EXACT}


@pytest.mark.parametrize("rule", verifiers.VERIFIERS.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("label", list(matrix_drafters()))
def test_every_pair_is_set_up_or_refused_with_the_rules_that_can(label, rule):
    target, drafter = pair()[0], matrix_drafters()[label]
    is_chain = drafter.shapes[0].is_chain
    if not is_chain and rule.chain_only:
        legal = False
    elif is_chain and rule.kinds & {
        DrawKind.WITH,
        DrawKind.WITHOUT,
    }:  # one draw: the same
        legal = drafter.kinds <= rule.kinds | {DrawKind.WITH, DrawKind.WITHOUT}
    else:
        legal = drafter.kinds <= rule.kinds
    if legal:
        assert Engine(target, drafter, rule).choose_rule("none") is rule
        return
    with pytest.raises(ConfigurationError) as refused:
        Engine(target, drafter, rule)
    said, able = str(refused.value).split("rules that can: ")
    assert f"rule {rule.name!r} cannot verify" in said
    assert f"drafter {drafter.name!r}" in said
    assert able
    for name in able.split(", "):
        found = verifiers.get(name.removesuffix(" (lossy)"))
        assert found.exact is not name.endswith(" (lossy)")
        Engine(target, drafter, found)


def test_without_a_draft_model_the_matrix_names_what_it_leaves_out():
    made = matrix.drafters(None)
    assert set(matrix.missing(made)) >= {"draft_model", "beam", "paths", "ngram_table"}
    assert {"none", "prompt_lookup"} <= set(made)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_has_a_form_for_the_coupled_certificate(name):
    _, small = pair()
    drafter = shared_noise(DRAFTERS[name](small))
    assert verifiers.supports(verifiers.get("match"), drafter.kinds, drafter.shapes[0].is_chain)
    if name in ("chain", "tree", "dynamic tree"):
        assert DrawKind.COUPLED in drafter.kinds
