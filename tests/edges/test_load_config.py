"""`LoadConfig`: one field is one option, one row of the guide and one option of the commands."""

import ast
import dataclasses
import inspect
import pickle
import re
from pathlib import Path

import pytest
import typer
from tests.tiny import llama

from outrider import ConfigurationError, LoadConfig, UnknownName, load, loading
from outrider.cli import app, options
from outrider.engine.speculation_policy import Adaptive
from outrider.integrations.generate_setup import OURS
from outrider.load_config import OPTIONS, RUNTIME
from outrider.models.calibrate import Setting
from outrider.resolve_config import resolve

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False, "device": "cpu"}


def test_every_field_says_what_it_is():
    [body] = ast.parse(inspect.getsource(LoadConfig)).body
    said = {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert tuple(said) == OPTIONS
    assert all(text[0].isupper() and text.endswith(".") for text in said.values())


def test_every_field_has_its_row_in_the_guide():
    table = GUIDE.read_text("utf-8").split("| option | meaning |")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row.split(" | ")[0]) for row in table.splitlines()[2:]]
    assert sorted(name for row in rows for name in row) == sorted(OPTIONS)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch", "certify"])
def test_every_field_has_an_option_or_a_reason(command):
    found = {option.name: option.opts for option in _click(command).params}
    for name in OPTIONS:
        if name in options.TYPED:
            assert name not in options.NOT_TYPED
            assert options.flag(name) in found[name]
        else:
            assert len(options.NOT_TYPED[name]) > 10, "why it is not typed"
    assert "--dtype" in found["dtype"]
    assert {*options.TYPED, *options.NOT_TYPED} == {*OPTIONS}


def _click(command):
    return typer.main.get_command(app).commands[command]


def test_the_names_of_other_places_are_names_of_fields():
    assert {*RUNTIME} < {*OPTIONS}
    assert {*OURS} | {*RUNTIME} == {*OPTIONS}


@pytest.mark.parametrize("make", [load, LoadConfig])
def test_a_misspelt_option_is_refused_with_the_nearest(make):
    with pytest.raises(UnknownName, match=r"unknown option of load 'num_spec_tokens'.*Did you mean "
                       "'num_speculative_tokens'"):  # fmt: skip
        make(num_spec_tokens=3)


def test_a_config_is_what_its_options_are(shipped):
    config = LoadConfig(drafter="prompt_lookup", ngram=(2, 3), **PLAIN)
    assert pickle.loads(pickle.dumps(config)) == config
    one, other = load(config), load(drafter="prompt_lookup", ngram=(2, 3), **PLAIN)
    assert one.engine.drafter == other.engine.drafter
    assert one.notes == other.notes
    for beside, name in [({"draft": "x"}, "got draft beside"), ({"width": 2}, "got width beside")]:
        with pytest.raises(ConfigurationError, match=name):
            load(config, **beside)


def test_help_shows_every_option():
    shown = inspect.signature(load).parameters
    assert {*shown} == {*OPTIONS}
    assert [*shown][:2] == ["target", "draft"]
    defaults = {field.name: field.default for field in dataclasses.fields(LoadConfig)}
    assert {name: one.default for name, one in shown.items()} == defaults


def test_resolving_reads_no_weights():
    resolved = resolve(LoadConfig(drafter="prompt_lookup", ngram=(2, 3), **PLAIN))
    assert resolved.sources[0]._models == {}
    assert (resolved.depth, resolved.place.type, resolved.table) == (8, "cpu", None)
    assert isinstance(resolved.planner, Adaptive)


def test_a_setting_that_is_wished_for_is_not_measured():
    resolved = resolve(LoadConfig(llama(), drafter="none", **PLAIN))
    assert loading.choose_setting(resolved) == (Setting(1, "float32", False), None)


def test_models_are_built_and_checked_before_anything_drafts():
    resolved = resolve(LoadConfig(llama(), llama(), branching=(2, 1), **PLAIN))
    setting = Setting(1, "float32", False)
    models = loading.build(resolved, setting)
    assert models.target is models.whole
    assert len(models.drafts) == 1
    assert 0 <= loading.check(resolved, setting, models) < 1e-3
    assert loading.make_drafter(resolved, models).counts == (2, 1)


def test_steps_cost_what_the_user_says_or_what_is_measured():
    from outrider.costs import Costs

    said = Costs.of({1: 6.0, 5: 10.0})
    config = LoadConfig(llama(), drafter="none", step_costs=said, **PLAIN)
    resolved = resolve(config)
    setting = Setting(1, "float32", False)
    models = loading.build(resolved, setting)
    drafter = loading.make_drafter(resolved, models)
    assert loading.calibrate_steps(resolved, setting, models, drafter).costs == said
