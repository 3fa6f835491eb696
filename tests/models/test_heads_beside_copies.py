"""A head together with copies, row by row by what has paid: of a folder, on the command line."""

import json
import sys

import pytest
from test_mtp import chained, checkpoint, reads_mellums, sliding

import outrider
import words
from outrider import SamplingParams, StopConditions, cli
from outrider.drafters import Either
from outrider.models.heads import mtp
from tiny import PROMPTS, decode
from tiny_heads import eagle3, speculators, target

LOAD = {"dtype": "float32", "threads": 1, "pack_weights": False}
REPEATING = [list(PROMPTS[0]) * 3, list(PROMPTS[2]), list(PROMPTS[1]) * 4]
SAMPLING = [SamplingParams(0), SamplingParams(0.8, seed=1), SamplingParams(1.0, seed=2)]


def eagle(folder):
    """A target and its EAGLE-3 head, in folders."""
    target().save_pretrained(folder)
    speculators(folder / "head", eagle3(aux_layers=(2, 3, 3)))
    return str(folder / "head")


def one_layer(folder):
    """A target with one layer of multi-token prediction in its checkpoint."""
    checkpoint(folder)
    return "mtp"


@pytest.fixture
def folder(tmp_path, request):
    draft = request.param(tmp_path)
    words.tokenizer().save_pretrained(tmp_path)
    return tmp_path, draft


def same_as_plain(speculator):
    """Rows of one batch that repeat themselves, and one that does not."""
    assert isinstance(speculator.engine.drafter, Either)
    plain = speculator.plain().engine
    own = decode(plain, REPEATING, SAMPLING, StopConditions(24))[0]
    found, run = decode(speculator.engine, REPEATING, SAMPLING, StopConditions(24))
    assert found == own
    assert run.stats.accepted > 0


@pytest.mark.parametrize(
    "folder", [eagle, pytest.param(one_layer, marks=reads_mellums)], indirect=True
)
def test_by_name(folder):
    place, draft = folder
    same_as_plain(outrider.load(place, draft, drafter="either", shared_noise=True, **LOAD))


def test_chained_layers(monkeypatch):
    model = sliding()
    layers = chained(model, std=0.1)
    monkeypatch.setattr(mtp.pretrained, "read_mtp", lambda kind, target, **how: layers)
    same_as_plain(outrider.load(model, "mtp", drafter="either", shared_noise=True, **LOAD))


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `outrider generate` in this process: what it wrote as JSON."""

    def call(*typed):
        monkeypatch.setattr(sys, "argv", ["outrider", "generate", *map(str, typed), "--json"])
        code = 0
        try:
            cli.main()
        except SystemExit as leave:
            code = leave.code or 0
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)

    return call


@pytest.mark.parametrize(
    "folder", [eagle, pytest.param(one_layer, marks=reads_mellums)], indirect=True
)
def test_on_the_command_line(command, folder):
    place, draft = folder
    typed = ["w9 w4 w7 w9 w4 w7 w9 w4", "-m", place, "-n", "24", "-t", "0", "--threads", "1"]
    typed += ["--dtype", "float32"]
    drafted = command(*typed, "--draft-model", draft, "--drafter", "either", "-k", "3")
    assert drafted["drafter"] == "either"
    assert drafted["stats"]["drafted"] > 0
    assert drafted["text"] == command(*typed, "--drafter", "none")["text"]
