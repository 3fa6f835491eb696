"""`make models` and `make peers`: the whole page, section by section."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider_lab.peers import page

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import peers_page


@pytest.fixture
def asked(tmp_path):
    """A trial with SmolLM2 and its larger relatives there, and nothing else."""
    models = tmp_path / "models"
    for name in ("smollm2", "qwen2.5-coder-0.5b"):
        (models / name).mkdir(parents=True)
        (models / name / "model.gguf").touch()
    return argparse.Namespace(
        models=models, out=tmp_path / "out", peer="peers/python", only=[], again=[], quick=True
    )


@pytest.fixture
def ran(asked, monkeypatch):
    """Commands in place of which a section, or what a script writes, is written; the first fails
    where "fails" is among its words."""
    found = []

    def run(words, env, check):
        found.append((words, env))
        out = Path(words[words.index("--out") + 1])
        if "bench" in words:
            section = page.section(f"t{len(found)}", {"all": []}, {}, {}, "about", (0, 0))
            page.keep(out, f"t{len(found)}", section)
        elif "growth.py" in words[1]:
            raise subprocess.CalledProcessError(3, words)
        else:
            told = {"about": "told", "tables": {"all": [{"engine": "a", "ms": 1.5}]}}
            (out / "any.json").write_text(json.dumps(told))
        return subprocess.CompletedProcess(words, 0)

    theirs = SimpleNamespace(run=run, CalledProcessError=subprocess.CalledProcessError)
    monkeypatch.setattr(peers_page, "subprocess", theirs)
    nothing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(peers_page, "importlib", nothing)
    monkeypatch.setattr(peers_page.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(peers_page.gguf_files, "written", lambda *of: Path("written.gguf"))
    return found


def test_every_section_is_run_once_and_failures_are_named(asked, ran):
    assert peers_page.measure(asked) == 2  # both of growth.py
    count = len(ran)
    written = (asked.out / "peers.md").read_text()
    assert written.index("## t1\n") < written.index("## t2\n") < written.index("and go, in one")
    assert "Whisper base, capped: no " in written
    assert "pip install ctranslate2" in written
    assert "its command ended with status 3" in written
    assert peers_page.measure(asked) == 2
    assert len(ran) == count + 2  # what failed is tried again, nothing else
    asked.only, asked.again = ["q8"], ["q8"]
    assert peers_page.measure(asked) == 0
    assert len(ran) == count + 3


def test_capped_sections_are_capped_and_the_others_are_not(asked, ran, monkeypatch):
    monkeypatch.setenv("OUTRIDER_ISA", "avx2")  # whatever is set around it
    asked.only = ["q8-capped", "q8", "rows-capped"]
    assert peers_page.measure(asked) == 0
    assert [("OUTRIDER_ISA" in env, "CT2_FORCE_CPU_ISA" in env) for _, env in ran] == [
        (True, True), (False, False), (True, True),
    ]  # fmt: skip
    assert "--quick" in ran[0][0]
    assert ran[2][0][2] == "written.gguf"
    monkeypatch.setattr(peers_page.platform, "machine", lambda: "aarch64")
    assert peers_page.missing(peers_page.SECTIONS["q8-capped"], asked.models)
    assert peers_page.missing(peers_page.SECTIONS["q8"], asked.models) is None


def test_only_what_is_missing_is_fetched(asked, monkeypatch, capsys):
    def run(words, env):
        text = " ".join(words)
        folder = next(name for name in peers_page.MODELS if re.search(rf"/{name}\.part\b", text))
        if folder != "annalog":
            (asked.models / f"{folder}.part").mkdir()
            (asked.models / f"{folder}.part" / "file").touch()
        return subprocess.CompletedProcess(words, folder == "recordings")

    monkeypatch.setattr(peers_page, "subprocess", SimpleNamespace(run=run))
    assert peers_page.get(asked.models) == 2  # one command failed, from one nothing came
    there = {path.name for path in asked.models.iterdir()}
    assert there == {*peers_page.MODELS, "recordings.part"} - {"annalog", "recordings"}
    said = capsys.readouterr().out
    assert "smollm2: there" in said
    assert "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF qwen2.5-coder-1.5b-instruct-q4_k_m.gguf" in said


@pytest.mark.parametrize("name", peers_page.SECTIONS)
def test_words_name_models_and_files_that_there_are(name, asked, monkeypatch):
    monkeypatch.setattr(peers_page.gguf_files, "written", lambda *of: Path("written.gguf"))
    section = peers_page.SECTIONS[name]
    words = peers_page.words_of(section, asked)
    assert not any(re.search(r"[{}]", word) for word in words)
    assert (peers_page.HERE / section.script).exists()
    assert words[-1] != ""
    assert (section.script == "") == ("--quick" in words)
