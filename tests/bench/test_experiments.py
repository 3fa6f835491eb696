"""Experiments on tiny pairs: tables, intervals, resuming, published values beside ours."""

import dataclasses
import json
from types import SimpleNamespace

import enumeration as e
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from outrider import DraftModel, Engine, SamplingParams, Speculator, Stop, verifiers
from outrider.drafters.ngram_table import NgramTable, count
from outrider.errors import ConfigurationError
from outrider.models import LlamaRunner, TreeDecoder
from outrider_lab.certify import Power, certify
from outrider_lab.certify.laws import CertifiedText, score
from outrider_lab.papers import (
    alpha_measure,
    alpha_tasks,
    app,
    published,
    score_code,
    toy,
    tree_runs,
    tree_tables,
    trees,
)
from outrider_lab.papers.alpha_drafters import AlphaSource, cut
from outrider_lab.theory import length, transport
from tiny import VOCAB, llama, pair

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


@pytest.mark.exhaustive
def test_ngram_drafts_are_exact():
    target, _ = pair()
    rng = np.random.default_rng(0)
    table = count(rng.integers(0, VOCAB, 4000), VOCAB, 2)
    power = Power(tokens=4000, samples=256, equality_tokens=64, new_tokens=32, rows=64, effect=0.1)
    prompts = [[3, 1, 4, 1 + i % 9, 5, i % 20] for i in range(16)]
    for rule, sampling in (
        ("block", SamplingParams(1.0)),
        ("rejection", SamplingParams(0.8, top_k=8)),
    ):
        engine = Engine(target, NgramTable(table, 3), verifiers.get(rule))
        report = certify(engine, prompts, sampling, power)
        assert not report.failed, report.as_dict()


def test_ngram_errors():
    with pytest.raises(ConfigurationError, match="do not fit"):
        count([1, 2, 3], 1 << 20, 5)
    with pytest.raises(ConfigurationError, match="at least 2 tokens"):
        count([1], 8, 2)
    with pytest.raises(ConfigurationError, match="at least 1"):
        NgramTable(count(TEXT, 12, 2), 0)


def test_toy_means(tmp_path):
    rows = {r["method"]: r for r in toy.run(tmp_path, 101, pictures=False)}
    for name, mean in (
        ("one: rejection, block (SD)", 0.6634),
        ("two iid: multi-round (SpecInfer)", 0.7467),
        ("two iid: K-SEQ (SpecTr)", 0.7630),
        ("two iid: OTM, the bound (SpecTr)", 0.7957),
        ("two without: recursive, traversal (RSD)", 0.9901),
    ):
        assert rows[name]["mean acceptance"] == pytest.approx(mean, abs=5e-5)
    assert (tmp_path / "toy-grid.csv").exists()


def test_a_document_says_how_it_came_about(tmp_path):
    """What a report shows: the command, the machine, what it is about, and titles of tables."""
    words = ["toy", "--quick", "--no-pictures", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, words).exit_code == 0
    document = json.loads((tmp_path / "toy.json").read_text())
    assert torch.__version__.startswith(document["machine"]["torch"])  # without +cpu, +cu130
    assert document["date"].count("-") == 2
    assert document["command"]
    assert document["about"].startswith("Jeon et al. 2024")
    assert set(document["titles"]) <= set(document["tables"])


#: what the map shows -> production rules that must accept just that, how drafts are drawn, how many
JUDGED = {
    "one: match": (("match",), e.without, 1),
    "one: non-iterative": (("non_iterative",), e.without, 1),
    "one: rejection, block (SD)": (("rejection", "block", "traversal"), e.without, 1),
    "two iid: multi-round (SpecInfer)": (("multi_round", "rejection"), e.separate, 2),
    "two iid: K-SEQ (SpecTr)": (("kseq",), e.separate, 2),
    "two without: recursive, traversal (RSD)": (("rejection", "traversal"), e.without, 2),
    "hub, traversal": (("hub", "traversal"), e.hub, 2),
    "top 2: match": (("match",), e.placed, 2),
    "one: lenience 0.5 (lossy)": (("lenience",), e.without, 1),
}


def test_toy_maps_are_what_the_rules_do():
    """Every drawn map against enumeration of drafts times the production rule's outcome."""
    points = 11
    found = toy.maps(points)
    bias = np.linspace(0, 1, points)
    coin = np.stack([1 - bias, bias], -1)
    cases = points * points
    world = e.World(2, 1, 0, ("random",) * cases)
    world.target[:] = np.repeat(coin, points, 0)[:, None]
    world.draft[:] = np.tile(coin, (points, 1))[:, None]
    for name, (rules, scheme, drafts) in JUDGED.items():
        for rule in rules:
            _, tokens = e.emitted(verifiers.get(rule), scheme(world, (drafts,)))
            error = np.abs(tokens - 1 - found[name].ravel()).max()
            assert error < 1e-12, (name, rule, error)


def test_toy_bounds_and_coupling_are_what_they_are_called():
    """The maps that no rule of ours attains: all sets tried, and one coupled draft of a coin."""
    points = 11
    found = toy.maps(points)
    bias = np.linspace(0, 1, points)
    for i, t in enumerate(bias):
        for j, d in enumerate(bias):
            p, q = np.array([1 - t, t]), np.array([1 - d, d])
            iid = transport.by_subsets(p, lambda h, q=q: q[list(h)].sum() ** 2)
            both = transport.by_subsets(
                p, lambda h, q=q: 1.0 if len(h) == 2 else float(q[h[0]] == 1)
            )
            assert found["two iid: OTM, the bound (SpecTr)"][i, j] == pytest.approx(iid, abs=1e-12)
            assert found["two without: transport bound"][i, j] == pytest.approx(both, abs=1e-12)
            assert found["one: coupled"][i, j] == pytest.approx(1 - abs(d - t), abs=1e-12)
    assert set(found) == {
        *JUDGED,
        "two iid: OTM, the bound (SpecTr)",
        "two without: transport bound",
    } | {"one: coupled"}


class _Words:
    """A tokenizer of one letter per id."""

    def __call__(self, text):
        return {"input_ids": [ord(c) % VOCAB for c in text][:40]}

    def decode(self, ids, **_):
        return "".join(chr(97 + i % 26) for i in ids)


class _Notes:
    target, draft, dtype, threads, packed = "tiny", "tiny", "float32", 1, False


def _tiny_pair():
    target, draft = pair(0.5)
    return Speculator(Engine(target, DraftModel(draft, (1,))), _Words(), (), _Notes())


@pytest.mark.exhaustive
def test_trees_are_chosen_on_other_prompts_and_runs_resume(tmp_path, monkeypatch):
    speculator = _tiny_pair()
    monkeypatch.setattr(tree_tables, "size_ratio", lambda pair: 0.1)
    prompts = [{"prompt": f"def f{i}(x):", "reference": "abc"} for i in range(7)]
    plan = tree_runs.TreePlan(
        prompts=4, choosing=3, samples=2, new_tokens=8, timed=1, rows=3, temperature=1.0
    )
    choosing, judging = tree_runs.split(prompts, tree_runs.TreePlan(prompts=5, choosing=2))
    assert [p["prompt"] for p in (*choosing, *judging)] == [p["prompt"] for p in prompts]
    groups = {6: trees.budgets()[6]}
    how = ("budget", groups, speculator, prompts)
    tables = tree_tables.run(*how, plan, tmp_path, lambda *a: None, False)
    methods = {r["method"]: r for r in tables["methods"]}
    assert set(methods) >= {
        *("plain", "SD", "block", "SpecTr", "SpecInfer", "RSD-C", "RSD-S", "hub + traversal")
    }
    assert methods["plain"]["block efficiency"] == methods["plain"]["MBSU"] == 1
    assert methods["SD"]["MBSU"] == pytest.approx(methods["SD"]["block efficiency"] / 1.6)
    for row in tables["methods"]:
        if row["method"] == "plain":
            continue
        tried = [r for r in tables["trees"] if r["method"] == row["method"]]
        best = max(tried, key=lambda r: r["block efficiency"])
        assert row["tree"] == best["tree"]
        assert [r["chosen"] for r in tried].count("yes") == 1
        assert row["outside ms"] > 0
    by_name = {r["difference"].split(" (")[0]: r for r in tables["differences"]}
    gap = methods["block"]["block efficiency"] - methods["SD"]["block efficiency"]
    assert by_name["block"]["block efficiency"] == pytest.approx(gap)
    assert by_name["RSD-S"]["published"] == pytest.approx(2.791 - 2.571)
    assert by_name["RSD-S"]["published, all"].endswith("of 27")
    assert all(r["group"] == 6 for r in tables["published"] + tables["published-all"])
    assert len(tables["published-all"]) == 27 * 8
    same = {(r["method"], r["tree"]): r for r in tables["trees"]}
    assert same["RSD-C", "2-2"]["published"] == 2.398
    assert same["block", "6"]["published"] is None

    lines = (tmp_path / "budget.jsonl").read_text().count("\n")
    assert tree_tables.run(*how, plan, tmp_path, lambda *a: None, False) == tables
    assert (tmp_path / "budget.jsonl").read_text().count("\n") == lines
    more = dataclasses.replace(plan, samples=3)  # joins what is there
    tree_tables.run(*how, more, tmp_path, lambda *a: None, False)
    added = (tmp_path / "budget.jsonl").read_text().splitlines()[lines:]
    assert added
    assert all(json.loads(line)["key"].split()[-3] == "2" for line in added)
    other = dataclasses.replace(plan, seed=9, timed=0)  # measured anew
    again = tree_tables.run(*how, other, tmp_path, lambda *a: None, False)
    assert again["trees"] != tables["trees"]
    assert "outside ms" not in again["methods"][0]


def test_efficiency_counts_the_last_block_in_full():
    row = {"steps": [3, 2], "accepted": [6, 3]}
    assert tree_runs.efficiency(row, [0]) == 3
    assert tree_runs.efficiency(row, [0, 1]) == pytest.approx(1 + 9 / 5)


def test_too_few_prompts_are_refused(tmp_path):
    plan = tree_runs.TreePlan()
    with pytest.raises(ConfigurationError, match="judged on others"):
        tree_runs.measure("budget", {}, _tiny_pair(), [{}], plan, tmp_path, lambda *a: None)


def test_published_speedups_recompute_with_the_ratio_the_right_way_up():
    """MBSU = tau / (L r + 1), r = size of the draft over size of the target (115 M, 6.7 B).

    Upside down, r would be 58 and every value below 1.
    """
    ratio = 115e6 / 6.738e9
    for experiment in ("draft-length", "budget"):
        for methods in published.best_trees(experiment).values():
            for one in methods.values():
                depth = int(one.tree.split("x")[1]) if "x" in one.tree else one.tree.count("-") + 1
                depth = int(one.tree) if one.tree.isdigit() else depth
                mbsu = length.memory_bound_speedup(one.efficiency, depth, ratio)
                assert mbsu == pytest.approx(one.values["MBSU"], rel=0.01), one.tree


def test_trees_have_the_sizes_of_the_paper():
    for budget, arms in trees.budgets().items():
        for arm in arms:
            drafter = arm.make(pair()[1])
            assert drafter.shapes[0].max_nodes - 1 <= budget, (budget, arm)
    for depth, arms in trees.draft_lengths().items():
        assert {arm.depth for arm in arms} == {depth}


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("lenience", {"SD + lenience (lossy)"}),
        ("rejection", {"SpecInfer + rejection", "hub + rejection"}),
        ("kseq", {"SD + kseq"}),
    ],
)
def test_a_rule_by_name_verifies_every_tree_that_it_can(name, methods):
    rule, draft = verifiers.get(name), pair()[1]
    more = trees.with_rule({6: trees.budgets()[6]}, rule, draft)[6]
    new = more[len(trees.budgets()[6]) :]
    for arm in new:
        drafter = arm.make(draft)
        chain = all(shape.is_chain for shape in drafter.shapes)
        assert verifiers.supports(rule, drafter.kinds, chain)
    assert {arm.method for arm in new} == methods
    assert len({(arm.method, arm.tree) for arm in more}) == len(more)


def test_a_rule_that_verifies_no_drawn_draft_is_refused():
    with pytest.raises(ConfigurationError, match="--rule must be"):
        trees.with_rule(trees.budgets(), verifiers.get("coupled"), pair()[1])


def test_scores():
    assert score_code.parses("    def f(self):\n        return", " 1\n")
    assert not score_code.parses("x = ", ") (" + "\n) (" * 8)
    assert score_code.similarity("", "abc") == 0 or score_code.similarity("", "abc") == 1


class _Letters(_Words):
    """Enough of a tokenizer for whole files."""

    def encode(self, text, **_):
        return [ord(c) % VOCAB for c in text]


@pytest.mark.exhaustive
def test_alpha_agrees_with_what_engines_accept(tmp_path):
    """alpha on the target's text against accepted / examined of a long run, at T = 1 and T = 0."""
    target, small = pair(0.3)
    speculator = Speculator(Engine(target, DraftModel(small, (1,))), _Letters(), (), _Notes())
    prompts = [{"prompt": f"def f{i}(x):"} for i in range(16)]
    sources = {"draft model": AlphaSource(small)}
    how = {"tokens": 16 * 200, "new_tokens": 200, "seed": 3}
    tasks = alpha_tasks.tasks(speculator, prompts)
    found = alpha_measure.alphas(speculator, tasks, sources, 1.0, **how)
    tally = found["tallies"]["draft model"]
    lenient = [alpha_measure.alpha_of(tally, level).value for level in range(4)]
    assert lenient == sorted(lenient)
    assert lenient[-1] > lenient[0] + 0.05
    assert found["tokens"] == 16 * 200
    for level, alpha in zip(alpha_measure.LENIENCES[:2], lenient, strict=False):
        rule = alpha_measure.rule_at(1.0, level)
        run = speculator.using(DraftModel(small, (1,)), rule)
        done = run.generate(
            [p["prompt"] for p in prompts] * 2,
            [SamplingParams(1.0, seed=s) for s in range(32)],
            Stop(200, token_ids=()),
        )
        share = done.stats.accepted / done.stats.drafted
        if level == 1:
            assert share == pytest.approx(alpha, abs=0.03)
        else:
            assert share > lenient[0] + 0.03


def test_no_share_is_above_one():
    """Laws in float32 whose sum is a little more than 1: a draft that agrees is accepted once."""
    law = torch.full((1, 4096), 1 / 4096) * (1 + 3e-7)
    assert law.sum() > 1
    levels = torch.tensor(alpha_measure.LENIENCES, dtype=torch.float64)
    kept = alpha_measure._kept(law, law, levels, greedy=False)
    assert kept.tolist() == [[1.0] * 4]


def test_lenience_at_zero_counts_the_rule(tmp_path):
    law = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
    guess = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    levels = torch.tensor(alpha_measure.LENIENCES, dtype=torch.float64)
    kept = alpha_measure._kept(law, guess, levels, greedy=True)
    assert kept.sum(0).tolist() == [1, 2, 2, 2]  # 0.3 / 0.5 = 0.6 passes from l = 0.5 on
    assert alpha_measure.rule_at(0.0, 1.0).exact
    assert alpha_measure.rule_at(0.0, 0.3).name == "lenience_argmax"
    assert alpha_measure.rule_at(1.0, 0.3).lenience == 0.3


def test_a_cut_model_is_its_layers(tmp_path):
    """Layers 0 and 2 of four, against transformers' own model made of just those."""
    whole = llama(num_hidden_layers=4)
    whole.save_pretrained(tmp_path)
    speculator = _tiny_pair()
    speculator.notes = SimpleNamespace(
        dtype="float32", device="cpu", packed=False, vocab_size=VOCAB
    )
    made = cut(speculator, str(tmp_path), [0, 2])
    one = llama(num_hidden_layers=2)
    state = {k: v for k, v in whole.state_dict().items() if ".layers.1." not in k}
    state = {k: v for k, v in state.items() if ".layers.3." not in k}
    one.load_state_dict({k.replace(".layers.2.", ".layers.1."): v for k, v in state.items()})
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    sampled = DraftModel(made, (1,)), DraftModel(TreeDecoder(LlamaRunner(one, False)), (1,))
    texts = [CertifiedText((3, 1), (4, 1, 5, 9))]
    ours, theirs = (score(d.model, texts, SamplingParams(1.0)).laws.logits_BRV for d in sampled)
    assert torch.allclose(ours, theirs, atol=1e-5)
    with torch.inference_mode():
        assert torch.allclose(ours[0], one(ids).logits[0, 1:-1], atol=1e-4)


@pytest.mark.parametrize("name", ["budget", "draft-length", "k-sweep", "alpha"])
def test_commands_share_their_options(name):
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in (
        "--out",
        "--quick",
        "--pictures",
        "--model",
        "--draft-model",
        "--prompts",
        "--seed",
    ):
        assert option in result.output
    half = "--draft-model" if name == "alpha" else "--model"  # alpha needs no draft
    refused = CliRunner().invoke(app, [name, half, "x"])
    assert isinstance(refused.exception, ConfigurationError)
    assert "a pair needs both" in str(refused.exception)
