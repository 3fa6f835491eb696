"""A drafter or rule of one's own by name, and options by name, wherever a name can be given."""

import json
import re
from pathlib import Path

import pytest
import torch

from outrider import ConfigurationError, SamplingParams, Stop, load, verifiers
from outrider.drafters import DRAFTERS, DrafterParts, DraftOptions, Recipe, make
from outrider.integrations.generate import SpeculativeGenerate, speculative
from outrider.integrations.generate_setup import load_arguments
from outrider_lab.certify import matrix
from tiny import llama, pair, perturbed

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-drafter.md"
PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False}
FAST = ["--dtype", "float32", "--threads", 1]
PROMPT = "x = [0, 0, 0, "
IDS = torch.tensor([[5, 6, 7, 7, 7]])


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr("outrider.models.runtime_config.can_pack", lambda dtype: False)


@pytest.fixture
def echo(registries):
    """The class of the documentation, registered by the documentation's one line."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    lines = [line for block in blocks for line in block.splitlines() if "register(" in line]
    names: dict = {}
    exec(f"{blocks[0]}\nimport outrider\n{lines[0]}", names)
    assert lines[0].startswith('outrider.drafters.register("echo", Echo)')
    return names["Echo"]


def words(given):
    """Options of the command line from keywords."""
    for name, value in given.items():
        name = {"draft": "draft_model"}.get(name, name)
        flag = "--" + name.removesuffix("s" if isinstance(value, dict) else "").replace("_", "-")
        if isinstance(value, dict):
            for key, one in value.items():
                yield from (flag, f"{key}={one}")
        elif value is True:
            yield flag
        else:
            yield from (flag, ",".join(map(str, value)) if isinstance(value, tuple) else value)


@pytest.fixture
def ways(outrider):
    """Every way to ask for a drafter and a rule by name; each gives the message of its refusal."""

    def message(call, **given):
        try:
            call(**given)
        except ConfigurationError as error:
            return str(error)
        return None

    def behind_generate(**given):
        ours = {"draft_model" if name == "draft" else name: v for name, v in given.items()}
        more = ours if given.get("drafter") == "echo" else {"draft_model": llama()} | ours
        return llama().generate(IDS, custom_generate=speculative, max_new_tokens=2, **more)

    def command(*ahead):
        def call(**given):
            code, _, err = outrider(*ahead, *words(given), *FAST)
            return err.removeprefix("error: ").removesuffix("\n") if code == 2 else None

        return call

    few = [
        "--equality-tokens",
        4,
        "--temperature",
        0,
    ]  # whether a name arrives, not what is certified
    return {
        "load": lambda **given: message(load, **(given | PLAIN)),
        "custom_generate": lambda **given: message(behind_generate, **given),
        "generate": command("generate", PROMPT, "-n", 2),
        "certify": command("certify", *few),
    }


def test_a_drafter_of_the_documentation_loads_by_name(echo):
    speculator, stop = load(drafter="echo", **PLAIN), Stop(16)
    assert type(speculator.engine.drafter).__name__ == "Echo"
    plain = speculator.plain()
    for how in (SamplingParams(0), SamplingParams(0.8, seed=3)):
        same = load(drafter="echo", shared_noise=True, **PLAIN).generate(PROMPT, how, stop).texts
        assert same == speculator.plain(shared_noise=True).generate(PROMPT, how, stop).texts
    result = speculator.generate(PROMPT, SamplingParams(0), stop)
    assert result.texts == plain.generate(PROMPT, SamplingParams(0), stop).texts
    assert result.stats.drafted > 0


@pytest.mark.exhaustive
def test_a_drafter_of_the_documentation_runs_in_the_commands(echo, outrider, tmp_path):
    code, out, err = outrider("generate", PROMPT, "-n", 8, "--drafter", "echo", "--json", *FAST)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["drafter"], document["exact"]) == ("echo", True)
    _, plain, _ = outrider("generate", PROMPT, "-n", 8, "--drafter", "none", "--json", *FAST)
    assert json.loads(plain)["token_ids"] == document["token_ids"]
    few = ["--tokens", 32, "--samples", 16, "--equality-tokens", 8, "--json"]
    code, out, _ = outrider("certify", "--drafter", "echo", *few, *FAST)
    assert code in (0, 3)  # exact, or too few tokens to say so
    report = json.loads(out)
    assert report["setup"]["drafter"] == "echo"
    assert report["verdict"] != "not exact"


def test_a_drafter_of_the_documentation_is_certified_with_every_rule(echo):
    made = matrix.drafters(pair()[1])
    assert type(made["echo"]).__name__ == "Echo"
    assert {p.rule.name for p in matrix.pairs(made) if p.label == "echo"} >= {"match", "block"}
    assert "echo" not in matrix.missing(made)


def test_a_drafter_of_the_documentation_runs_behind_generate(echo):
    model = llama()
    expected = model.generate(IDS, do_sample=False, max_new_tokens=12)
    call = SpeculativeGenerate(drafter="echo")
    for how in ({"custom_generate": call}, {"custom_generate": speculative, "drafter": "echo"}):
        assert torch.equal(model.generate(IDS, do_sample=False, max_new_tokens=12, **how), expected)
    assert call.stats.drafted > 0
    assert load_arguments({"method": "echo"}) == {"drafter": "echo"}


@pytest.mark.exhaustive
def test_an_option_that_one_drafter_has_for_itself_reaches_it(echo, ways):
    seen = []

    def made(count=3):
        seen.append(count)
        return echo(count)

    DRAFTERS["echo"] = Recipe(made, takes=("count",))
    for way in ways.values():
        assert way(drafter="echo", drafter_options={"count": 5}) is None
        assert way(drafter="echo") is None
        assert seen[-2:] == [5, 3]
    assert len(seen) == 2 * len(ways)
    with pytest.raises(ConfigurationError, match="give width beside them"):
        load(drafter="echo", drafter_options={"width": 5})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"drafter": "echo", "width": 3}, ["'echo' has no use for width; got width=3", "beam"]),
        ({"drafter": "echo", "drafter_options": {"cuont": 3}}, ["cuont=3", "takes no options"]),
        ({"drafter": "echo", "draft": "d"}, ["no use for draft; got draft='d'"]),
        ({"drafter": "beam", "ngram": (1, 3)}, ["ngram=(1, 3)", "width", "prompt_lookup"]),
        ({"drafter": "beam", "drafter_options": {"n": 3}}, ["n=3", "num_speculative_tokens"]),
        ({"branching": (2, 2), "num_speculative_tokens": 3}, ["leave num_speculative_tokens out"]),
        ({"rule": "block", "rule_options": {"x": 1}}, ["'block' has no use for x", "no options"]),
        (
            {"rule": "lenience", "rule_options": {"l": 1}},
            ["no use for l;", "lenience (usually 0.5)"],
        ),
        ({"rule": "lenience", "rule_options": {"lenience": 7}}, ["lie in (0, 1]; got 7"]),
        (
            {"rule": "typical", "rule_options": {"epsilon": "a"}},
            ["epsilon must be a finite number"],
        ),
        ({"rule": "typical", "rule_options": {"delta": -1}}, ["epsilon and delta must", "-1"]),
        ({"rule": "block", "rule_options": {"name": 1}}, ["'block' has no use for name"]),
        ({"rule": "block", "rule_options": {"kinds": 1}}, ["'block' has no use for kinds"]),
        ({"rule_options": {"lenience": 0.3}}, ["rule=None; name the rule", "lenience: lenience"]),
        ({"drafter": "echo", "shared_noise": True, "rule": "block"}, ["'block' cannot", "match"]),
    ],
)
def test_what_nobody_has_a_use_for_is_refused_with_the_same_words(echo, ways, given, parts):
    said = {name: way(**given) for name, way in ways.items()}
    assert len(set(said.values())) == 1, said
    for part in parts:
        assert part in said["load"]


def test_the_option_of_a_rule_changes_what_it_accepts(ways, outrider):
    loose = load(rule="lenience", rule_options={"lenience": 0.01}, **PLAIN)
    assert loose.engine.rule.lenience == 0.01
    how, stop = SamplingParams(1.0, seed=1), Stop(48)
    rates = [
        load(rule="lenience", rule_options={"lenience": value}, **PLAIN)
        .generate(PROMPT, how, stop)
        .stats.draft_acceptance_rate
        for value in (0.01, 1.0)
    ]
    assert rates[0] > rates[1]
    typed = ["--rule", "lenience", "--rule-option", "lenience=0.01", "--seed", 1, "-t", 1]
    _, out, _ = outrider("generate", PROMPT, "-n", 48, "--json", *typed, *FAST)
    document = json.loads(out)
    assert document["rule_options"] == {"lenience": 0.01}
    assert document["token_ids"] == loose.generate(PROMPT, how, stop).completions[0].token_ids

    model, draft = llama(), perturbed(llama(), 0.4)
    accepted = []
    for value in (0.01, 1.0):
        setting = {"rule": "lenience", "rule_options": {"lenience": value}}
        for given in (setting, {"speculative_config": setting}):
            call = SpeculativeGenerate(draft_model=draft)
            torch.manual_seed(0)
            model.generate(IDS, custom_generate=call, do_sample=True, max_new_tokens=32, **given)
            accepted.append(call.stats.draft_acceptance_rate)
    assert accepted[0] == accepted[1] > accepted[2] == accepted[3]


def test_the_shape_of_any_drafter_can_be_asked_behind_generate():
    model, draft = llama(), perturbed(llama(), 0.1)
    plain = model.generate(IDS, do_sample=False, max_new_tokens=12)
    for given in (
        {"drafter": "beam", "width": 3},
        {"drafter": "dynamic_tree", "total_tokens": 6, "width": 2},
        {"drafter": "static_tree", "tree_acceptance": (0.6, 0.2), "total_tokens": 6},
        {"drafter": "paths", "draft_model": [draft, model], "width": 4},
    ):
        given = {"draft_model": draft} | given
        call = SpeculativeGenerate(**given)
        fast = model.generate(
            IDS, custom_generate=speculative, do_sample=False, max_new_tokens=12, **given
        )
        fixed = model.generate(IDS, custom_generate=call, do_sample=False, max_new_tokens=12)
        assert torch.equal(fast, plain), given
        assert torch.equal(fixed, plain), given
        assert call.stats.accepted > 0, given


def test_ngrams_on_the_command_line(outrider):
    lookup = load(drafter="prompt_lookup", ngram=(2, 3), **PLAIN)
    expected = lookup.generate(PROMPT, SamplingParams(0), Stop(24))
    typed = ["--drafter", "prompt_lookup", "--ngram", "2,3"]
    _, out, _ = outrider("generate", PROMPT, "-n", 24, "--json", *typed, *FAST)
    document = json.loads(out)
    assert document["token_ids"] == expected.completions[0].token_ids
    assert document["stats"]["drafted"] == expected.stats.drafted


@pytest.mark.parametrize(
    ("typed", "part"),
    [
        (["--ngram", "1,x"], "--ngram must be numbers separated by commas; got '1,x'; try 1,4"),
        (["--ngram", "4,1", "--drafter", "prompt_lookup"], "ngram must be the shortest"),
        (["--rule-option", "lenience"], "--rule-option must be name=value"),
        (["--rule-option", "a=1", "--rule-option", "a=2"], "each name once; got 'a=2'"),
        (["--drafter-option", "=3"], "--drafter-option must be name=value"),
    ],
)
def test_what_cannot_be_read_on_the_command_line(outrider, typed, part):
    code, _, err = outrider("generate", PROMPT, *typed, *FAST)
    assert code == 2
    assert part in err


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: load(drafter_options=3), "drafter_options must be a mapping"),
        (lambda: load(drafter_options={1: 2}), "drafter_options must be a mapping"),
        (lambda: load(drafter_options={"table": 2}), "give table beside them"),
        (lambda: load(rule="lenience", rule_options={1: 2}), "rule_options must be a mapping"),
        (lambda: load(rule="lenience", rule_options=[("lenience", 1)]), "rule_options must be a"),
        (lambda: load(rule=verifiers.get("block"), rule_options={"x": 1}), "rule by name"),
        (lambda: verifiers.get("lenience", lenience=float("nan")), "a finite number; got nan"),
        (lambda: Recipe(DRAFTERS["none"].build, needs="model"), "needs must be a tuple of model"),
        (lambda: Recipe(DRAFTERS["none"].build, needs=("wings",)), r"got \('wings',\)"),
        (lambda: Recipe(DRAFTERS["none"].build, takes="width"), "takes must be a tuple"),
        (lambda: make("beam", DrafterParts(), DraftOptions()), "needs a draft model"),
        (lambda: make("ngram_table", DrafterParts(), DraftOptions()), "needs a table"),
    ],
)
def test_recipes_and_options_of_another_kind(call, part):
    with pytest.raises(ConfigurationError, match=part):
        call()


def test_a_drafter_that_needs_a_table_and_a_model_gets_both(registries):
    def made(model, table, vocab_size, depth=2):
        assert table.vocab_size == vocab_size
        return DRAFTERS["beam"].build(model, 2, depth)

    DRAFTERS["both"] = Recipe(made, ("model", "table", "vocab_size"), ("depth",))
    speculator = load(drafter="both", drafter_options={"depth": 3}, **PLAIN)
    assert speculator.engine.drafter.depth == 3
    with pytest.raises(ConfigurationError, match="it takes draft, table, depth"):
        load(drafter="both", width=3)


@pytest.mark.parametrize("name", verifiers.VERIFIERS)
def test_the_options_of_a_rule_are_plain_numbers(name):
    """They go into reports and onto the command line; a rule's name for another has none."""
    options = verifiers.options_of(verifiers.get(name))
    assert json.loads(json.dumps(options)) == options
    with pytest.raises(ConfigurationError, match="has no use for rule"):
        verifiers.get(name, rule=verifiers.get("block"))


def test_what_is_said_of_rules_without_importing_them_is_true():
    rules = verifiers.VERIFIERS.values()
    assert verifiers.names() == verifiers.listed(rules)
    assert sorted(verifiers.LOSSY) == sorted(rule.name for rule in rules if not rule.exact)
    assert [rule.name for rule in rules] == list(verifiers.VERIFIERS)


def test_every_recipe_stands_at_the_end_of_the_file_of_its_name():
    assert all(isinstance(DRAFTERS[name], Recipe) for name in DRAFTERS)
