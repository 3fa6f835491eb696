"""The command from files to a folder that drafts, on a tiny target; and what it refuses."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import outrider
from outrider import Engine, Root
from outrider.cli import app
from outrider.errors import ConfigurationError
from outrider.models import adapt
from outrider.models.heads import formats
from outrider.shipped import shipped
from outrider.testing import encoder_decoder, llama
from outrider.text.speculator import Speculator
from outrider.train.features import Alpha, read
from outrider.train.job import look, run
from outrider.train.published import TrainReport, card, opened
from outrider.train.task import Plan, Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random target with the shipped tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    for path in shipped("target").glob("tokenizer*"):
        shutil.copy(path, folder)
    vocab = json.loads((shipped("target") / "config.json").read_text())["vocab_size"]
    llama(vocab_size=vocab, num_hidden_layers=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    text = "def function(argument):\n    return [argument + number for number in range(10)]\n" * 4
    path.write_text("\n".join(json.dumps({"text": f"# {n}\n{text}"}) for n in range(24)))
    return path


def test_a_task_becomes_a_folder_and_other_texts_do_not_mix_with_it(folder, data, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = Engine(adapt(model, packed=False), Root())
    speculator = Speculator(engine, AutoTokenizer.from_pretrained(folder))
    task = Task("tiny", tmp_path, (data,), vocab_size=300, alpha_texts=1, plan=Plan(steps=2))
    told = []
    result = run(speculator, model, task, lambda text, done, total: told.append(text))
    assert {"target's states", "alpha before", "alpha after"} < set(told)
    assert result.progress.step == 2
    assert result.learnt == {
        "texts": sum(len(t.tokens_N) for t in read(tmp_path / "work/features"))
    }
    lines = []
    run(speculator, model, task, quiet, lines.append)
    assert lines == [f"going on from step 2 of 2: {tmp_path / 'work/state.pt'}"]
    head = formats.read(tmp_path, model.config)
    assert head.config.aux_layers == (0, 1, 2)
    assert head.weights["fc.weight"].dtype == torch.bfloat16
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text().replace("function", "other"))
    with pytest.raises(ConfigurationError, match="was begun on other texts"):
        run(speculator, model, replace(task, data=(other,)), quiet)
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    with pytest.raises(ConfigurationError, match="was begun for another target"):
        run(speculator, model, task, quiet)


def quiet(text, done, total):
    """Nobody looks."""


def test_another_draft_does_not_go_on_from_the_weights_of_the_last(folder, data, tmp_path):
    """Layers 1 and 2 went on from what 0 and 2 had learnt, as their shapes are the same."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = Engine(adapt(model, packed=False), Root())
    speculator = Speculator(engine, AutoTokenizer.from_pretrained(folder))
    plan = Plan(steps=1)
    task = Task("tiny", tmp_path, (data,), (), "layers", (), 300, alpha_texts=1, plan=plan)
    assert run(speculator, model, task, quiet) is not None
    assert run(speculator, model, replace(task, layers=(0, 2)), quiet) is not None  # the same
    for other in ({"layers": (1, 2)}, {"kind": "head"}, {"vocab_size": 200}):
        with pytest.raises(ConfigurationError, match="begun for another kind, layers or vocab"):
            run(speculator, model, replace(task, **other), quiet)


def test_answers_are_gone_on_with_only_as_they_were_begun(folder, data, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = Engine(adapt(model, packed=False), Root())
    speculator = Speculator(engine, AutoTokenizer.from_pretrained(folder))
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("\n".join(json.dumps({"prompt": f"def f{n}(x):"}) for n in range(3)))
    plan = Plan(steps=1)
    task = Task(
        "tiny", tmp_path, (data,), (asked,), vocab_size=300, tokens=12, alpha_texts=1, plan=plan
    )
    assert run(speculator, model, task, quiet).learnt["answers of the target"]
    names = {path.name for path in (tmp_path / "work").glob("*.json*")}
    kept = {"answers.json", "before.json", "draft.json", "features.json", "target.json"}
    assert names == kept | {"answers.jsonl"}
    with pytest.raises(ConfigurationError, match="with answers of another length"):
        run(speculator, model, replace(task, tokens=13), quiet)
    asked.write_text(asked.read_text().replace("f1", "g1"))
    with pytest.raises(ConfigurationError, match="was begun on other prompts"):
        run(speculator, model, task, quiet)


@pytest.mark.parametrize(
    ("layers", "said"),
    [((1, 0), "growing from 0"), ((-1,), "growing from 0"), ((0, 99), "below 3")],
)
def test_layers_that_are_not_there_are_refused_before_work(layers, said, folder, data, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    speculator = Speculator(Engine(adapt(model, packed=False), Root()), None)
    task = Task("tiny", tmp_path / "out", (data,), kind="layers", layers=layers)
    with pytest.raises(ConfigurationError, match=said):
        run(speculator, model, task, quiet)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "layers"])
def test_files_become_a_folder_that_drafts(kind, folder, data, tmp_path):
    out = tmp_path / "draft"
    asked = ["train-draft", str(folder), "--data", str(data), "--out", str(out), "--kind", kind]
    more = ["--steps", "3", "--vocabulary", "300", "--threads", "1", "--batch", "1024"]
    done = CliRunner().invoke(app, [*asked, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (out / "README.md").read_text().strip() in done.output
    assert "| 0.7 |" in done.output
    settings = {"dtype": "float32", "threads": 1, "pack_weights": False}
    drafted = outrider.load(folder, out, num_speculative_tokens=3, **settings)
    stop = outrider.Stop(24)
    result = drafted.generate("def f(x):", outrider.SamplingParams(0), stop)
    assert (
        result.texts
        == drafted.plain().generate("def f(x):", outrider.SamplingParams(0), stop).texts
    )
    assert result.stats.drafted > 0


def test_a_target_that_reads_another_input_is_refused(tmp_path, data):
    speculator = outrider.load("corrector", dtype="float32", threads=1, pack_weights=False)
    task = Task("corrector", tmp_path, (data,))
    with pytest.raises(ConfigurationError, match="decoder-only"):
        run(speculator, encoder_decoder("bart"), task, quiet)
    with pytest.raises(ConfigurationError, match="decoder-only"):
        look(replace(task, target=str(shipped("corrector"))))


def test_what_cannot_be_trained_is_refused_before_weights_are_read(tmp_path, data):
    llama().config.save_pretrained(tmp_path)  # it has no weights
    task = Task(str(tmp_path), tmp_path / "out", (data,))
    look(task)
    missing = tmp_path / "missing"
    for change, said in (
        ({"data": (missing,)}, "cannot read training text; got .*missing"),
        ({"prompts": (missing,)}, "cannot read training text; got .*missing"),
        ({"kind": "layers", "layers": (0, 99)}, "got draft layers"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            look(replace(task, **change))
    asked = ["train-draft", str(tmp_path), "--data", str(missing), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked)
    assert "cannot read training text" in str(done.exception)


def test_a_target_without_a_tokenizer_is_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="texts need a tokenizer"):
        opened(str(tmp_path), None, "float32", 1)


def test_the_card_has_an_example_that_runs_and_says_what_does_not_pay(tmp_path):
    alpha = Alpha({0.0: (0.1,), 1.0: (0.9,)}, 5)
    speed = {0.0: (0.91, 1), 1.0: (1.8, 3)}
    report = TrainReport("m", "head", alpha, alpha, speed, 1.0, 9, {"texts": 7}, 0.2, 0.3, 6)
    told = card(report, tmp_path / "mine")
    assert '```python\nimport outrider\n\nspeculator = outrider.load("m", draft="mine")' in told
    assert "| 0.91 with 1 token, which does not pay |" in told
    assert "| 1.80 with 3 tokens |" in told
    assert "0.3 minutes" in told
