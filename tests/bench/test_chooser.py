"""`outrider plan --prompts`: drafters on a reader's own prompts."""

import json

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import ConfigurationError
from outrider_lab.commands.plan import number
from outrider_lab.tasks import chooser
from outrider_lab.tasks.chooser import EVERYTHING

DATA = chooser.__file__.replace("chooser.py", "by_category.jsonl")


def test_the_file_of_prompts_has_ten_of_each_category_in_turn():
    rows = chooser.read_rows(DATA)
    assert len(rows) == 80
    assert len({row["prompt"] for row in rows}) == 80
    kinds = [row["category"] for row in rows]
    assert kinds == kinds[:8] * 10
    assert len(set(kinds)) == 8
    few = chooser.some(rows, 2)
    assert [task.kind for task in few] == kinds[:8] * 2


def test_a_row_takes_the_fastest_and_plain_decoding_where_nothing_pays():
    ratios = {"suffix": [1.5, 0.9], "default": [1.2, 1.0]}
    shown = {"suffix": "suffix", "default": "default (recall)"}
    first = chooser._row("a", [True, False], ratios, shown)
    second = chooser._row("b", [False, True], ratios, shown)
    whole = chooser._row(EVERYTHING, [True, True], ratios, shown)
    assert (first["take"], second["take"], whole["take"]) == ("suffix", "none", "suffix")
    said = chooser._advice([first, second, whole], 12.0)
    told = "plain decoding takes 12.0 ms a token; take suffix; some categories prefer none"
    assert said == f"{told} (fewer than 20 prompts: no sign)"
    assert chooser._advice([first, second, whole | {"prompts": 20}], 12.0) == told


def test_the_command_tries_drafters_on_a_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": "def add(a, b):\n", "category": c} for c in ("one", "two", "one")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["plan", "target", "--prompts", str(path), "--limit", "1", "-n", "8", "--json"]
    words[1] = str(chooser_target())
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    rows = found["drafters"]
    assert [row["category"] for row in rows] == ["one", "two", EVERYTHING]
    assert [row["prompts"] for row in rows] == [1, 1, 2]
    assert {"suffix", "prompt_lookup", "default (recall)"} < set(rows[0])
    assert found["advice"].startswith("plain decoding takes ")


def chooser_target():
    from outrider.shipped import shipped

    return shipped("target")


def test_prompts_need_a_model(tmp_path):
    with pytest.raises(ConfigurationError, match="tried with a model"):
        CliRunner().invoke(app, ["plan", "--prompts", "x"], catch_exceptions=False)


def test_counts_of_parameters_are_said_in_billions():
    assert number("--parameters", "7B") == number("--parameters", "7g") == 7e9
    with pytest.raises(ConfigurationError, match="model-bytes"):
        number("--model-bytes", "7B")
