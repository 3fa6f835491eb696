"""`outrider compare`: one document, complete and honest about what it compared."""

import io
import json
import logging

import pytest
import torch
from rich.console import Console
from test_vocabularies import WORDS, save
from typer.testing import CliRunner

from outrider import SamplingParams, cli
from outrider.errors import ConfigurationError, PromptError
from outrider_lab.bench import arms, compare
from outrider_lab.commands import compare as command

RUN = CliRunner()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    prompts = root / "prompts.txt"
    prompts.write_text("w5 w6 w7\n\nw8 w9\n", encoding="utf-8")
    return save(root / "t", WORDS, 96, 0), save(root / "d", WORDS, 96, 0), prompts


def test_the_json_document_has_everything(pair):
    target, draft, prompts = pair
    words = f"compare --model {target} --draft-model {draft} --prompts {prompts} -n 10 --repeats 1"
    words += " -k 2 -k 3 --branching 2,1 --assisted 3 --dtype float32 --threads 1 --json"
    done = RUN.invoke(cli.app, words.split())
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    for key in (
        "speculative/plain",
        "speculative/transformers_assisted",
        "plain/transformers_generate",
    ):
        ratio = document["ratios"][key]
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
    assert set(document) >= {"ratios", "methods", "text_equal", "environment", "settings"}
    assert set(document["methods"]) == {
        "plain",
        "speculative: default",
        "speculative: 2 tokens",
        "speculative: 3 tokens",
        "speculative: tree 2,1",
        "transformers_generate",
        "transformers_assisted: default",
        "transformers_assisted: 3 tokens",
    }
    assert document["text_equal"]["speculative=plain"] == {"equal": 2, "of": 2}
    assert document["text_equal"]["plain=transformers_generate"] == {"equal": 2, "of": 2}
    methods = document["methods"]
    # two texts of 10 tokens in every arm; ours are drafted in full but for what the budget cuts
    for arm, calls in (
        ("plain", 10),
        ("transformers_generate", 10),
        ("speculative: 2 tokens", 4),
        ("speculative: 3 tokens", 3),
        ("transformers_assisted: 3 tokens", 3),
    ):
        assert methods[arm]["block_efficiency"] == pytest.approx(10 / calls, abs=1e-3), arm
    assert document["methods"]["speculative: 3 tokens"]["mean_acceptance_length"] == 4
    assert {m["dtype"] for m in document["methods"].values()} == {"float32"}
    assert set(document["by_temperature"]) == {"0", "1"}
    assert document["settings"]["threads"] == 1
    assert document["environment"]["transformers"]


def test_tables_and_prompt_lookup_without_a_draft_model(pair):
    target, _, prompts = pair
    words = f"compare --model {target} --prompts {prompts} -n 6 --repeats 1 -t 0 --assisted 3"
    done = RUN.invoke(
        cli.app, [*words.split(), *"--dtype float32 --threads 1 --fastest-dtype --count 1".split()]
    )
    assert done.exit_code == 0, done.output
    assert "speculative/transformers_assisted" in done.stdout
    assert "fastest dtype" in done.stdout
    assert "\x1b" not in done.stdout


def test_no_figure_is_cut_on_a_terminal_of_80_columns(monkeypatch):
    arms = ("plain", "speculative: 4 tokens", "transformers_generate")
    arms += ("speculative: tree 3,2,1", "transformers_assisted: default")
    figures = {"ms_per_token": 1234.56, "tokens_per_second": 4321, "block_efficiency": 12.34}
    steps = {name: 100.1 + 111 * at for at, name in enumerate("abcdef")}
    row = {**figures, "ms_per_step": steps}
    table = {"methods": dict.fromkeys(arms, row), "ratios": {}, "best": {"ours": arms[3]}}
    some = dict.fromkeys(("prompt_count", "max_new_tokens", "repeats", "threads", "packed"), 1)
    machine = dict.fromkeys(("processor", "cores", "device", "torch", "transformers"), "x")
    document = {
        "settings": {**some, "dtype": "float32"},
        "by_temperature": {"0": table},
        "text_equal": {},
        "fastest": {},
        "environment": machine,
    }
    shown = io.StringIO()
    monkeypatch.setattr(command, "out", Console(file=shown, width=80, soft_wrap=True))
    command.show(document)
    lines = shown.getvalue().split("temperature 0\n")[1].split("\nx, x cores")[0].splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(lines).split()
    for figure in ("1234.56", "4321", "12.34", *(f"{ms:.1f}" for ms in steps.values())):
        assert said.count(figure) == len(arms)
    assert "…" not in " ".join(said)


def test_what_transformers_says_of_its_own_calls_is_not_shown(pair):
    target, draft, _ = pair
    logger, said = logging.getLogger("transformers.generation.utils"), []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    getattr(type(logger).warning_once, "cache_clear", lambda: None)()  # it is said once a process
    logger.addHandler(listener)
    try:
        stock = arms.Stock(target, draft, torch.float32, "cpu")
        stock.assisted([5, 6, 7], SamplingParams(0), 4, 2)
        assert not said
        logger.warning("anything else")
        assert said == ["anything else"]
    finally:
        logger.removeHandler(listener)


def test_prompt_files(tmp_path):
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "one"}\n{"prompt": "two", "id": 3}\n', encoding="utf-8")
    assert compare.read_prompts(good) == ["one", "two"]
    assert compare.read_prompts(good, 1) == ["one"]
    assert len(compare.read_prompts(None)) >= 30
    bad = tmp_path / "bad.jsonl"
    for text, words in (
        ('{"text": "x"}', "line 1 .* prompt field"),
        ("", "empty file"),
        ('{"prompt": ""}', "line 1 .* no text"),
    ):
        bad.write_text(text, encoding="utf-8")
        with pytest.raises(PromptError, match=words):
            compare.read_prompts(bad)
    with pytest.raises(PromptError, match="cannot read prompts"):
        compare.read_prompts(tmp_path / "none")


def test_plans_that_compare_nothing_are_refused():
    with pytest.raises(ConfigurationError, match="nothing to compare"):
        compare.ComparePlan(temperatures=())
    with pytest.raises(ConfigurationError, match=r"repeats must be .* at least 1"):
        compare.ComparePlan(repeats=0)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("max_new_tokens", "16"),
        ("max_new_tokens", None),
        ("count", 0),
        ("repeats", 2.5),
        ("threads", True),
        ("chains", 3),
        ("chains", (0,)),
        ("assisted", "24"),
        ("trees", ((0,),)),
        ("trees", ((),)),
        ("trees", (3, 2)),
        ("temperatures", 0.5),
        ("temperatures", ("1",)),
    ],
)
def test_settings_of_another_kind_are_refused_by_name(name, given):
    with pytest.raises(ConfigurationError, match=rf"^{name} must be"):
        compare.ComparePlan(**{name: given})


def test_a_tree_without_a_draft_model_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigurationError, match="a tree needs a draft model"):
        compare.Comparison(compare.ComparePlan("nowhere", trees=((3, 2),)))
