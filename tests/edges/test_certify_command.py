"""`outrider certify` of encoder-decoders: sources of a file, made up, and what is refused."""

import json
from unittest.mock import Mock

import pytest
from test_source_arguments import folder  # noqa: F401

import outrider
from outrider_lab.commands.certify import certify_prompts

FEW = "--tokens 256 --samples 32 --equality-tokens 32 --effect 0.6 --rows 16".split()
FEW += ["--threads", "1", "--json"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("given", [True, False], ids=["of a file", "made up"])
def test_an_encoder_decoder_is_certified(outrider, folder, tmp_path, given):  # noqa: F811
    path = tmp_path / "sources.txt"
    path.write_text('w9 w4 w7\n{"source": "w1 w2"}\n')
    typed = ["certify", "--model", folder, "--draft-model", folder, "--branching", "2,1", *FEW]
    code, out, err = outrider(*typed, *(["--sources", path] if given else []))
    report = json.loads(out)
    assert not report["failed"], err
    assert code == (0 if report["verdict"] == "exact" else 3)
    assert report["setup"]["sampling"]["no_repeat_ngram_size"] == 3  # the model's own rules


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--prompts", "{0}"], "got an encoder-decoder; give --sources"),
        (["--sources", "{0}/none"], "cannot read prompts"),
        (["--chat-template", "{{{{ m }}}}"], "--chat-template is for conversations; got it with"),
        (["--lora-modules", "sql=a"], "requests that name one (serve, batch); got sql; give its"),
    ],
)
def test_one_line_says_what_is_wrong(outrider, folder, tmp_path, typed, says):  # noqa: F811
    path = tmp_path / "texts"
    path.write_text("w1\n")
    given = [word.format(path) for word in typed]
    code, _, err = outrider("certify", "--model", folder, *given, *FEW)
    assert (code, err.count("\n")) == (2, 1)
    assert says in err


def test_sources_are_read_by_what_reads_them_for_a_text(folder, tmp_path, monkeypatch):  # noqa: F811
    path = tmp_path / "sources.txt"
    path.write_text("w9 w4 w7\nw1\n")
    pair = outrider.load(folder, drafter="recall", threads=1, planner="fixed")
    encoder = Mock(wraps=pair.prompt_encoder)
    monkeypatch.setattr(pair, "prompt_encoder", encoder)
    decoded = certify_prompts(pair, None, path)
    encoder.read.assert_called_once_with(["w9 w4 w7", "w1"])
    assert len(decoded.prompts) == len(decoded.inputs) == 2
    assert certify_prompts(pair, None, None).prompts[0] == decoded.prompts[0]
    encoder.begin.assert_called_once_with()


def test_sources_for_a_model_of_text_are_refused(outrider, tmp_path):
    path = tmp_path / "texts"
    path.write_text("x = 1\n")
    code, _, err = outrider("certify", "--sources", path, *FEW)
    assert code == 2
    assert "got a model that goes on from its prompt; give --prompts" in err


def test_what_was_not_verified_is_not_marked_as_passed(outrider, folder):  # noqa: F811
    few = "--tokens 10 --samples 8 --equality-tokens 8 --rows 2 --threads 1".split()
    code, out, err = outrider("certify", "--model", folder, "--drafter", "none", *few)
    assert code == 3, err
    lines = [line for line in out.splitlines() if line[:6] in ("ok    ", "--    ")]
    assert {line[:2] for line in lines} == {"ok", "--"}
    for line in lines:
        assert line.startswith("--") == ("inconclusive" in line)
    told = json.loads(
        outrider("certify", "--model", folder, "--drafter", "none", *few, "--json")[1]
    )
    assert [one["conclusive"] for one in told["tests"]] == [line[:2] == "ok" for line in lines]


@pytest.mark.parametrize(
    ("rule", "heading"),
    [
        pytest.param(
            "rejection", "draft_model verified by rejection", marks=pytest.mark.exhaustive
        ),
        ("lenience", "draft_model verified by lenience (lossy: it changes the distribution)"),
    ],
)
def test_the_heading_says_that_a_rule_changes_the_distribution(outrider, rule, heading):
    few = "--tokens 10 --samples 8 --equality-tokens 8 --rows 2 --threads 1".split()
    _, out, err = outrider("certify", "--rule", rule, "-k", 2, *few)
    assert out.splitlines()[0] == heading, err
