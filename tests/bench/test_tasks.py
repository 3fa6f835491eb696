"""Six kinds of prompts: what they ask for can be answered and judged, and what is made of that."""

import copy
import gzip
import itertools
import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from outrider import drafters
from outrider.errors import ConfigurationError, PromptError, UnknownName
from outrider_lab.papers import app
from outrider_lab.tasks import arms, experiment, run, sandbox, scores, spec_bench, tables
from outrider_lab.tasks.prompts import KINDS, human_eval, tasks, token_ids
from outrider_lab.tasks.run import TaskAnswers

#: The thirteen categories of Spec-Bench, MT-bench's eight among them.
CATEGORIES = {
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("translation", "summarization", "qa", "math_reasoning", "rag"),
}
EVERY = tasks()


def test_there_are_twenty_prompts_of_each_kind_in_turn():
    assert [task.kind for task in EVERY] == [*KINDS] * 20
    assert [task.question_id for task in EVERY] == list(range(1, 121))
    assert {task.category for task in EVERY} <= CATEGORIES
    assert len({task.turns[0] for task in EVERY}) == len(EVERY)
    assert [task.kind for task in tasks(2)] == [*KINDS] * 2
    with pytest.raises(ConfigurationError, match="1 to 20 prompts"):
        tasks(21)


PROBLEM = {
    "prompt": "import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef near(x):\n"
    '    """The whole number at or below half of x."""\n',
    "entry_point": "near",
    "test": "def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(8) == 4\n",
}


@pytest.mark.parametrize("packed", [False, True])
def test_problems_of_human_eval_are_asked_and_checked(packed, tmp_path):
    lines = (json.dumps(PROBLEM) + "\n").encode() * 3
    path = tmp_path / f"HumanEval.jsonl{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(lines) if packed else lines)
    problem, _ = human_eval(path, 2)
    assert problem.kind == "code"
    assert PROBLEM["prompt"] in problem.turns[0]
    fenced = "```python\ndef near(x):\n    return {}\n```"
    for said, passes in (("math.floor(half(x))", 1), ("3", 0), ("nothing", 0)):
        assert scores.scores(problem, fenced.format(said), []) == {"passes": passes, "parses": 1}
    path.write_bytes(lines[:-9])
    with pytest.raises(PromptError, match="no file of HumanEval"):
        human_eval(path)


@pytest.mark.parametrize("kind", ["summary", "rewrite", "code", "list"])
def test_a_reference_has_full_marks_and_another_prompts_has_not(kind):
    some = [task for task in EVERY if task.kind == kind and task.reference]
    assert len(some) >= 12
    for task in some[:6] if kind == "code" else some:
        found = scores.scores(task, task.reference, [])
        assert set(found) == set(scores.NAMES[kind])
        assert found == dict.fromkeys(found, 1.0), task.question_id
    main = scores.NAMES[kind][0]
    wrong = [scores.scores(a, b.reference, [])[main] for a, b in itertools.pairwise(some[:6])]
    assert max(wrong) < 1


def test_words_lists_and_loops():
    question = next(task for task in EVERY if task.question_id == 7)
    assert scores.scores(question, "At 100 degrees; the pressure is less.", []) == {"answered": 1}
    assert scores.scores(question, "At 100 degrees.", []) == {"answered": 0.5}
    lines = next(task for task in EVERY if task.format == "list")
    most = lines.schema["minItems"]
    right, short = ("\n".join(f"{n + 1}. thing" for n in range(count)) for count in (most, 3))
    assert scores.scores(lines, right, []) == {"schema": 1, "valid": 1}
    assert scores.scores(lines, short, []) == {"schema": 0, "valid": 1}
    assert scores.scores(lines, "no list", []) == {"schema": 0, "valid": 0}
    story = next(task for task in EVERY if task.kind == "story")
    assert scores.scores(story, "", list(range(40))) == {"no loop": 1}
    assert scores.scores(story, "", [1, 2] * 20) == {"no loop": 0}
    code = next(task for task in EVERY if task.kind == "code")
    assert scores.scores(code, "x = 1", [], run=False) == {"parses": 1}


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "open('made', 'w')",
        "import socket\nsocket.socket()",
        "import os\nos.remove('there')",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.fork()",
        "memory = [0] * 10**10",
        "while True:\n    pass",
    ],
)
def test_code_of_answers_is_fenced_in(code):
    assert not sandbox.passes(code, ["True"], seconds=1)


def test_code_that_does_no_harm_runs():
    assert sandbox.passes("import re, math, collections\nprint('hello')\nx = 1", ["x == 1"])
    assert not sandbox.passes("x = 1", ["x == 1", "x == 2"])


def written(out, *more):
    words = ["--model", "shipped", "--no-pictures", "--limit", "1", "-n", "6", "-t", "0"]
    words += ["--drafters", "default,suffix", *more]
    done = CliRunner().invoke(app, ["tasks", *words, "--out", str(out)])
    assert done.exit_code == 0, done.exception
    return json.loads((out / "tasks.json").read_text())


def test_a_run_has_speeds_scores_and_files_of_spec_bench_and_goes_on(
    tmp_path, shipped, monkeypatch
):
    monkeypatch.setattr(experiment, "load_to_measure", lambda *given, **named: shipped)
    first = written(tmp_path)
    again = written(tmp_path)
    assert first["tables"] == again["tables"], "times are those of the store"
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 6
    speeds = {row["drafter"]: row for row in first["tables"]["speed"]}
    assert set(speeds) == {"default", "suffix"}
    for row in speeds.values():
        assert row["texts as plain"] == "6 of 6"
        assert row["sign"] == "fewer than 20 prompts"
        assert set(KINDS) < set(row)
    mine = {row["key"]: row for row in rows}
    one, plain = (mine[f"{arm}, T 0, question 3"] for arm in ("suffix", "plain"))
    ratio = plain["cpu_time"] / one["cpu_time"] * len(one["ids"]) / len(plain["ids"])
    assert speeds["suffix"]["rewrite"] == f"{ratio:.2f}"
    assert "prompts 1 to 6, up to 6 tokens" in first["titles"]["speed"]
    assert 0 < mine["default, T 0, question 3"]["drafted"]
    answers = (tmp_path / "spec-bench/model_answer/suffix-temp0.jsonl").read_text().splitlines()
    found = json.loads(answers[2])
    assert (found["question_id"], found["category"]) == (3, "writing")
    (choice,) = found["choices"]
    assert choice["wall_time"] == [one["wall_time"]]
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) == len(one["ids"])
    assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    lines = (tmp_path / "spec-bench/question.jsonl").read_text().splitlines()
    asked = [json.loads(line) for line in lines]
    assert [row["turns"] for row in asked] == [task.turns for task in tasks(1)]


def test_batches_have_the_texts_of_single_prompts(tmp_path, shipped, monkeypatch):
    monkeypatch.setattr(experiment, "load_to_measure", lambda *given, **named: shipped)
    written(tmp_path / "single")
    told = written(tmp_path / "batches", "--rows", "4")
    assert "4 together" in told["titles"]["arms"]
    texts = {}
    for name in ("single", "batches"):
        lines = (tmp_path / name / "tasks.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        texts[name] = {row["key"]: row["ids"] for row in rows}
    assert len(texts["batches"]) == 3 * 6
    assert texts["batches"] == texts["single"]


def test_of_several_calls_the_fastest_counts(tmp_path, shipped, monkeypatch):
    """One call beside another says little about a few percent on a machine with other work."""
    decode, calls = run._decode, Counter()

    def slow_but_once(base, engine, some, prompts, t, amount):
        rows = decode(base, engine, some, prompts, t, amount)
        number = some[0].question_id
        if amount.new_tokens == 6:  # the others warm up
            calls[id(engine), number] += 1
        for row in rows:  # the first call of every second prompt, the second one of the others
            fast = calls[id(engine), number] == 1 + number % 2
            row["cpu_time"] = row["wall_time"] = 1.0 if fast else 9.0
        return rows

    monkeypatch.setattr(experiment, "load_to_measure", lambda *given, **named: shipped)
    monkeypatch.setattr(run, "_decode", slow_but_once)
    told = written(tmp_path, "--rounds", "2")
    assert "the fastest of 2" in told["titles"]["speed"]
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 6
    assert len(calls) == len(rows)
    assert set(calls.values()) == {2}
    assert {row["cpu_time"] for row in rows} == {1.0}


def made_up(speed=2.0, worse=0.0, each=4):
    """Answers of an arm that is so many times faster, every second one worth that much less."""
    some = tasks(each)

    def row(n, task, arm):
        worth = 1.0 - (worse if arm == "fast" and n % 2 else 0.0)
        seconds = (1 + n % 5) / (speed if arm == "fast" else 1.0)
        names = scores.NAMES[task.kind]
        return {
            "text": "",
            "ids": [1, 2],
            "steps": 1,
            "accept_lengths": [2],
            "cpu_time": seconds,
            "wall_time": seconds,
            "scores": dict.fromkeys(names, worth),
            "finished": 0.0,
        }

    both = (arms.PLAIN, "fast")
    rows = {(0.0, arm): [row(n, task, arm) for n, task in enumerate(some)] for arm in both}
    return TaskAnswers(some, list(both), rows)


def test_speeds_and_signs():
    (row,) = tables.speeds(made_up(), "cpu_time")
    assert row["all"] == "2.00 [2.00, 2.00]"
    assert (row["sign"], row["worst prompt"], row["tokens a call"]) == ("+", 2.0, 2.0)
    (row,) = tables.speeds(made_up(each=3), "cpu_time")
    assert row["sign"] == "fewer than 20 prompts"


@pytest.mark.parametrize(
    ("worse", "each", "verdict"),
    [
        (0.0, 4, "equal"),
        (0.1, 20, "equal"),
        (0.2, 4, "open"),
        (0.6, 4, "different"),
        (0.6, 3, "fewer than 20 prompts"),
    ],
)
def test_scores_are_equal_only_if_they_are_shown_to_be(worse, each, verdict):
    row = tables.main_scores(made_up(worse=worse, each=each))[1]
    assert row["within 0.1"] == verdict
    assert row["difference"] == pytest.approx(-worse / 2)


def test_drafters_are_those_that_can_be_made(shipped):
    table = arms.documentation(shipped.tokenizer, shipped.engine.target.vocab_size)
    found = arms.arms(shipped, table, (1,))
    least = {"plain", "default", "recall", "layer_skip", "draft_model", "cascade"}
    assert least <= set(found.engines)
    assert "translated" not in found.engines
    alone = arms.arms(shipped.plain(), table, (1,)).engines
    assert set(alone) < set(found.engines)
    assert "draft_model" not in alone
    names = {name for name, recipe in drafters.DRAFTERS.items() if not recipe.drafts_with_models}
    assert names - {"none"} <= set(alone)
    with pytest.raises(UnknownName):
        arms.arms(shipped, table, (1,), ["nothing"])
    assert arms.usual_skip(shipped.engine.target) == (2, 3)


def test_prompts_are_read_through_the_chat_template(shipped):
    task = EVERY[0]
    bare = token_ids(shipped.tokenizer, task.turns)
    assert shipped.tokenizer.decode(bare).endswith(task.turns[0])
    chat = copy.copy(shipped.tokenizer)
    chat.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} [you]"
    assert chat.decode(token_ids(chat, task.turns)) == f"[user] {task.turns[0]} [you]"


def test_a_second_writing_replaces_the_first(tmp_path):
    answers = made_up()
    for _ in range(2):
        paths = spec_bench.write(tmp_path, answers, "model")
    assert all(len(path.read_text().splitlines()) == 24 for path in paths)
