"""Drafters, rules and model runners that other distributions bring, or a program registers."""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import torch
import typer
from typer.core import TyperCommand

import outrider
from outrider import drafters, lazy, models, ops, plugins, verifiers
from outrider.cli import commands
from outrider.errors import ConfigurationError, UnknownName, UnsupportedModel
from outrider.models import TransformersRunner
from outrider.testing import check_runner, check_verifier, llama, runner_checks
from outrider.testing.models import TINY
from outrider.types import DrawKind
from outrider.verifiers import tree_walk
from outrider.verifiers.sibling_draws import pick

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "examples" / "outrider-echo"


class Distribution:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def installed(monkeypatch):
    """Registries as if entry points of these packages were installed: (package, name, value)."""
    monkeypatch.syspath_prepend(str(TEMPLATE / "src"))

    def install(*points):
        for module, kind in ((drafters, "drafters"), (verifiers, "verifiers")):
            group = f"outrider.{kind}"
            ours = module.PLUGINS
            of = plugins.PluginGroup(group, ours.kind, ours.read, ours.lab)
            one = "none" if module is drafters else "match"
            fresh = lazy.Registry({}, of.load)
            fresh[one] = module.get(one)
            monkeypatch.setattr(module, "PLUGINS", of)
            monkeypatch.setattr(module, kind.upper(), fresh)
        runners = plugins.PluginGroup("outrider.model_runners", "model runner", models.PLUGINS.read)
        known = lazy.Registry({}, lambda ours: runners.load(ours | models.SUPPORTED))
        monkeypatch.setattr(models, "PLUGINS", runners)
        monkeypatch.setattr(models, "EXCEPTIONS", known)
        made = [metadata.EntryPoint(name, value, group)._for(Distribution(package))
                for package, group, name, value in points]  # fmt: skip
        monkeypatch.setattr(
            metadata, "entry_points", lambda group: [one for one in made if one.group == group]
        )

    return install


ECHO = ("outrider-echo", "outrider.drafters", "echo", "outrider_echo:ECHO")
REFUSE = ("outrider-echo", "outrider.verifiers", "refuse", "outrider_echo:Refuse")
COUNTING = (
    "outrider-echo",
    "outrider.model_runners",
    "counting_llama",
    "outrider_echo.family:CountingRunner",
)


def counting():
    """A tiny model of the template's family."""
    from outrider_echo.family import CountingConfig, CountingForCausalLM

    torch.manual_seed(0)
    return CountingForCausalLM(CountingConfig(**TINY)).eval()


def test_what_is_installed_is_known_by_name(installed):
    installed(ECHO, REFUSE)
    assert drafters.get("echo").takes == ("num_speculative_tokens",)
    assert "echo" in list(drafters.DRAFTERS)
    assert verifiers.get("refuse").name == "refuse"
    assert "refuse" in verifiers.names()


def test_nothing_is_looked_for_until_a_name_is_not_ours(installed, monkeypatch):
    installed(ECHO)
    asked = []
    monkeypatch.setattr(metadata, "entry_points", lambda group: asked.append(group) or [])
    assert drafters.get("none")
    assert not asked
    with pytest.raises(UnknownName, match="unknown drafter 'echo'"):
        drafters.get("echo")
    assert asked == ["outrider.drafters"]


def test_what_cannot_be_imported_is_named_and_the_rest_works(installed, caplog):
    installed(ECHO, ("bad", "outrider.drafters", "worse", "no_such_module:X"))
    told = r"the drafter 'worse' of bad \(no_such_module:X\) cannot be imported; got Module"
    with pytest.raises(ConfigurationError, match=told):
        drafters.get("worse")
    assert sorted(drafters.DRAFTERS) == ["echo", "none"]
    assert len([record for record in caplog.records if "worse" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("get", "name"), [(drafters.get, "lookahead"), (verifiers.get, "otm")], ids=["drafter", "rule"]
)
def test_what_comes_with_the_lab_says_so_where_it_is_not_installed(installed, get, name):
    installed(ECHO)
    told = f"{name!r} comes with outrider-lab, which is not installed; pip install outrider-lab"
    with pytest.raises(ConfigurationError, match=told):
        get(name)


def test_two_packages_of_one_name_are_both_named(installed):
    installed(ECHO, ("other", *ECHO[1:]))
    with pytest.raises(ConfigurationError, match=r"outrider-echo .*, other .*; uninstall one"):
        drafters.get("echo")


@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("outrider.drafters", "pathlib:Path"),
        ("outrider.drafters", "math:pi"),
        ("outrider.verifiers", "pathlib:Path"),
        ("outrider.verifiers", "math:pi"),
    ],
)
def test_what_is_of_the_wrong_class_is_of_no_use(installed, group, value):
    installed(("bad", group, "wrong", value))
    get = drafters.get if group == "outrider.drafters" else verifiers.get
    with pytest.raises(ConfigurationError, match=r"'wrong' of bad \(.*\) is of no use: .*; got"):
        get("wrong")


def test_a_rule_is_installed_under_its_own_name(installed):
    installed(("bad", "outrider.verifiers", "other", "outrider_echo:Refuse"))
    with pytest.raises(ConfigurationError, match="called 'refuse'; name both alike"):
        verifiers.get("other")


def test_a_name_of_ours_stays_ours(installed, caplog):
    installed(("bad", "outrider.drafters", "none", "outrider_echo:ECHO"))
    list(drafters.DRAFTERS)
    assert drafters.get("none").build is outrider.Root
    assert "outrider has a drafter of that name" in caplog.text


def test_a_program_registers_its_own(installed):
    installed()
    from outrider_echo import Echo, Refuse

    drafters.register("mine", Echo)
    verifiers.register(Refuse())
    assert drafters.get("mine").build is Echo
    assert verifiers.get("refuse") == Refuse()
    for again in (lambda: drafters.register("mine", Echo), lambda: verifiers.register(Refuse())):
        with pytest.raises(ConfigurationError, match="choose another name"):
            again()
    for wrong in (lambda: drafters.register("x", 3), lambda: verifiers.register(Echo())):
        with pytest.raises(ConfigurationError, match="got"):
            wrong()


def test_a_family_is_driven_by_the_runner_that_is_installed(installed):
    installed(COUNTING)
    from outrider_echo.family import CountingRunner

    assert type(models.adapt(counting()).runner) is CountingRunner
    assert type(models.adapt(llama()).runner) is models.LlamaRunner
    check_runner(CountingRunner, counting())


def test_a_runner_that_is_wrong_for_a_family_is_found_out(installed):
    installed()
    with pytest.raises((AssertionError, UnsupportedModel), match="trees"):
        check_runner(TransformersRunner, counting())
    with pytest.raises(AssertionError, match=r"a runner is a subclass of .*; got 3"):
        check_runner(3, counting())


def test_a_runner_that_leaves_the_model_changed_is_found_out():
    class Careless(TransformersRunner):
        def around(self, *of_a_call):
            with torch.no_grad():
                self.model.lm_head.weight[0] *= 1 + 1e-7
            return super().around(*of_a_call)

    with pytest.raises(AssertionError, match="the model is as it was"):
        check_runner(Careless, llama())


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ([("bad", *COUNTING[1:3], "no_such_module:X")], "cannot be imported; got Module"),
        ([("bad", *COUNTING[1:3], "math:pi")], "a model runner is a subclass of .*; got 3.14"),
        ([("bad", *COUNTING[1:3], "pathlib:Path")], "a model runner is a subclass of"),
        ([COUNTING, ("other", *COUNTING[1:])], "outrider-echo .*, other .*; uninstall one"),
    ],
)
def test_a_family_whose_runner_is_of_no_use_is_refused_and_others_run(installed, points, told):
    installed(*points)
    with pytest.raises(ConfigurationError, match=told):
        models.adapt(counting())
    assert type(models.adapt(llama()).runner) is models.LlamaRunner


def test_a_family_of_ours_keeps_its_runner(installed, caplog):
    installed(("bad", *COUNTING[1:2], "llama", COUNTING[3]))
    assert not list(models.EXCEPTIONS)
    assert "outrider has a model runner of that name" in caplog.text
    assert models.runner_of(llama()) is TransformersRunner


def test_a_program_registers_a_runner(installed):
    installed()
    from outrider_echo.family import CountingRunner

    models.register("counting_llama", CountingRunner)
    assert models.runner_of(counting()) is CountingRunner
    for taken in ("counting_llama", "llama", "bloom"):
        with pytest.raises(ConfigurationError, match="choose another name"):
            models.register(taken, CountingRunner)
    with pytest.raises(ConfigurationError, match=r"a model runner is a subclass of .*; got 'x'"):
        models.register("mine", "x")


class Believe:
    """Verifies by half the inverse temperature: another law, and it says that it is exact."""

    def __init__(self, rule):
        self.rule = rule

    def __getattr__(self, name):
        return getattr(self.rule, name)

    def __call__(self, draft, scores, draws):
        hot = scores.laws._replace(inverse_temperature_B=scores.laws.inverse_temperature_B * 0.5)
        return self.rule(draft, scores._replace(laws=hot), draws)

    def outcome(self, draft, scores):
        return self.rule.outcome(draft, scores)


def test_a_rule_of_another_law_is_found_out():
    with pytest.raises(AssertionError, match="are not the target's"):
        check_verifier(Believe(verifiers.get("block")))


@dataclass(frozen=True)
class OneLaw:
    """Multi-round rejection that takes the law of a node's first draw for that of them all."""

    name = "one_law"
    exact = True
    kinds: frozenset[DrawKind] = frozenset({DrawKind.FIXED, DrawKind.WITH})
    chain_only = False

    def verify(self, law_BnV, level):
        guess, here, favour, against = level.guess(0, law_BnV), law_BnV, [], []
        for k in range(level.most):
            token = level.token_BnK[..., k]
            favour.append(pick(here, token))
            against.append(pick(guess, token))
            here = ops.residual(here, guess * level.there_BnK[..., k, None])
        return tree_walk.node_decision(favour, against, here)

    def __call__(self, draft, scores, draws):
        return tree_walk.walk(self.verify, draft, scores, draws)

    def outcome(self, draft, scores):
        return tree_walk.walked(self.verify, draft, scores)


MIXED = "placed tree", "paths of two models"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("drafter", [*MIXED, pytest.param(None, marks=pytest.mark.slow)])
def test_a_rule_that_forgets_a_second_law_at_a_node_is_found_out(monkeypatch, drafter):
    """It is right on chains, on the paths of one model, and at temperature 0."""
    for name in MIXED:
        if name != drafter:
            monkeypatch.delitem(runner_checks.DRAFTERS, name)
    if drafter is None:
        check_verifier(OneLaw())
        return
    with pytest.raises(AssertionError, match=rf"the law \({drafter}\): .* are not the target's"):
        check_verifier(OneLaw())


def test_a_rule_that_verifies_nothing_is_told_which_kinds_drafts_have():
    only = OneLaw(frozenset({DrawKind.WITH}))
    with pytest.raises(AssertionError, match=r"paths \(FIXED and WITH\).*add FIXED"):
        check_verifier(only)


@pytest.mark.slow
@pytest.mark.parametrize("name", verifiers.VERIFIERS)
def test_every_rule_of_ours_passes(name):
    check_verifier(verifiers.get(name))


@pytest.mark.slow
def test_the_template_is_installed_and_drafts_by_name(tmp_path):
    """Copied, installed, used by the command, and its own tests pass."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(TEMPLATE)], check=True)
    paths = [str(site), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = [sys.executable, "-m", "outrider", "generate", "x = [", "-n", "12", "-t", "0"]

    def text(*more):
        told = subprocess.run(
            [*run, *more], env=environment, capture_output=True, text=True, check=True
        )
        return told.stdout

    assert text("--drafter", "echo", "--rule", "refuse") == text("--drafter", "none")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    subprocess.run([*tests, str(TEMPLATE / "tests")], env=environment, check=True, cwd=tmp_path)


def test_a_command_with_a_class_of_its_own_keeps_it():
    """Others refuse two values of one option."""

    class Own(TyperCommand):
        pass

    app = typer.Typer()
    app.command("own", cls=Own)(lambda: None)
    app.command("usual")(lambda: None)
    commands._once(app)
    kinds = {command.name: command.cls for command in app.registered_commands}
    assert kinds == {"own": Own, "usual": commands._Once}
