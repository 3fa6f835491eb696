"""Experiments on tiny pairs: tables, intervals, resuming, published values beside ours."""

import numpy as np
import pytest
import torch

from outrider import DraftModel, Engine, Sampling, Speculator, verifiers
from outrider.bench import record, score_code, toy, trees
from outrider.certify import Power, certify
from outrider.drafters.ngram_table import NgramTable, count
from outrider.errors import ConfigurationError
from tiny import VOCAB, pair

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 6, 1, 2, 3, 7, 3, 1, 2, 9, 9, 1]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_table_laws_sum_to_one_and_are_kneser_ney(order):
    table = count(TEXT, 12, order)
    contexts = torch.tensor([[1, 2], [2, 3], [-1, 5], [11, 11], [-1, -1]])
    law = table.probs(contexts)
    assert torch.allclose(law.sum(-1), torch.ones(5), atol=1e-6)
    assert (law > 0).all()
    alone = torch.cat([table.probs(c[None]) for c in contexts])
    assert torch.equal(law, alone)


def test_bigram_by_hand():
    table = count([0, 1, 0, 1, 0, 2], 3, 2)
    # contexts: 0 -> 1, 1, 2; continuations of order 1: 0 after {1}, 1 after {0}, 2 after {0}
    first = (1 - 0.75) / 3 + 0.75 * 3 / 3 / 3
    expected = [0.75 * 2 / 3 * first, 1.25 / 3 + 0.5 * first, 0.25 / 3 + 0.5 * first]
    assert np.allclose(table.probs(torch.tensor([[0]]))[0], expected, atol=1e-6)


def test_ngram_drafts_are_exact():
    target, _ = pair()
    rng = np.random.default_rng(0)
    table = count(rng.integers(0, VOCAB, 4000), VOCAB, 2)
    power = Power(tokens=4000, samples=256, equality=64, new_tokens=32, rows=64, effect=0.1)
    prompts = [[3, 1, 4, 1 + i % 9, 5, i % 20] for i in range(16)]
    for rule, sampling in (("block", Sampling(1.0)), ("rejection", Sampling(0.8, top_k=8))):
        engine = Engine(target, NgramTable(table, 3), verifiers.get(rule))
        report = certify(engine, prompts, sampling, power)
        assert not report.failed, report.as_dict()


def test_ngram_errors():
    with pytest.raises(ConfigurationError, match="do not fit"):
        count([1, 2, 3], 1 << 20, 5)
    with pytest.raises(ConfigurationError, match="give at least"):
        count([1], 8, 2)
    with pytest.raises(ConfigurationError, match="at least 1"):
        NgramTable(count(TEXT, 12, 2), 0)


def test_toy_means(tmp_path):
    rows = {r["method"]: r for r in toy.run(tmp_path, 101, pictures=False)}
    for name, mean in (
        ("single (SD)", 0.6634),
        ("multi-round (SpecInfer)", 0.7467),
        ("K-SEQ (SpecTr)", 0.7630),
        ("transport bound, iid", 0.7957),
        ("recursive (RSD)", 0.9901),
    ):
        assert rows[name]["mean acceptance"] == pytest.approx(mean, abs=5e-5)
    assert (tmp_path / "toy-grid.csv").exists()


class _Words:
    """A tokenizer of one letter per id."""

    def __call__(self, text):
        return {"input_ids": [ord(c) % VOCAB for c in text][:40]}

    def decode(self, ids, **_):
        return "".join(chr(97 + i % 26) for i in ids)


class _Notes:
    target, draft, dtype, threads = "tiny", "tiny", "float32", 1


def test_trees_resume_and_pair(tmp_path, monkeypatch):
    target, draft = pair(0.5)
    words = _Words()
    speculator = Speculator(Engine(target, DraftModel(draft, (1,))), words, (), _Notes())
    monkeypatch.setattr(trees, "size_ratio", lambda pair: 0.1)
    prompts = [{"prompt": f"def f{i}(x):", "reference": "abc"} for i in range(4)]
    plan = trees.Plan(prompts=4, new_tokens=16, timed=1, rows=4)
    groups = {6: trees.budgets()[6]}
    seen = []
    tables = trees.run(
        "budget", groups, speculator, prompts, plan, tmp_path, lambda *a: seen.append(a), False
    )
    methods = {r["method"] for r in tables["best"]}
    assert methods >= {"SD", "block", "SpecTr", "SpecInfer", "RSD-C", "RSD-S", "hub + traversal"}
    sd = next(r for r in tables["all"] if r["method"] == "SD")
    assert sd["MBSU"] == pytest.approx(sd["block efficiency"] / 1.6)
    assert any("block" in r["difference"] for r in tables["differences"])
    assert tables["published"]
    lines = (tmp_path / "budget.jsonl").read_text().count("\n")
    again = trees.run("budget", groups, speculator, prompts, plan, tmp_path, lambda *a: None, False)
    assert again == tables
    assert (tmp_path / "budget.jsonl").read_text().count("\n") == lines


def test_trees_have_the_sizes_of_the_paper():
    for budget, arms in trees.budgets().items():
        for arm in arms:
            drafter = arm.make(pair()[1])
            assert drafter.max_nodes - 1 <= budget, (budget, arm)
    for length, arms in trees.draft_lengths().items():
        assert {arm.depth for arm in arms} == {length}


def test_scores():
    assert score_code.parses("    def f(self):\n        return", " 1\n")
    assert not score_code.parses("x = ", ") (" + "\n) (" * 8)
    assert score_code.similarity("", "abc") == 0 or score_code.similarity("", "abc") == 1
    assert record.mean_interval([1.0, 1.0]) == (1.0, 1.0, 1.0)
