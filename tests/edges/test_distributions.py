"""What each distribution holds, and what the core says without the others."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
import typer
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

import outrider as package
from outrider import shipped as module
from outrider.cli import batch
from outrider.cli.commands import GROUP, register
from outrider.cli.generate import PICTURES
from outrider.errors import BackendUnavailable, ConfigurationError
from outrider.shipped import DRAFTS, is_shipped, shipped

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "packages" / "outrider-pair"
LAB = ROOT / "packages" / "outrider-lab"
CORE_BYTES = 5 << 20  #: the most of the core's wheel
INSTALL = "pip install 'outrider[pair]'"
INSTALL_LAB = "`outrider {}` needs outrider-lab, which is not installed; pip install outrider-lab"


def held(project):
    """Paths in a project's wheel, and the sources of those that its hooks add, by their places."""
    builder = WheelBuilder(str(project))
    files = {one.distribution_path: Path(one.path) for one in builder.recurse_included_files()}
    told = {"force_include": {}}
    for hook in builder.get_build_hooks(str(project)).values():
        hook.initialize("standard", told)
    return files, {inside: Path(source) for source, inside in told["force_include"].items()}


@pytest.fixture
def no_pair(monkeypatch, tmp_path):
    """As if the core's wheel were installed alone."""
    monkeypatch.setattr(module, "_CHECKOUT", tmp_path / "none")
    monkeypatch.setitem(sys.modules, "outrider_pair", None)


def test_the_core_has_its_kernels_sources_and_no_weights():
    files, added = held(ROOT)
    assert {"outrider/loading.py", "outrider/models/cpu_kernels/kernels.c"} <= set(files)
    assert not added
    assert not [path for path in files if path.startswith(("outrider/pair", "outrider/lab"))]
    assert {path.partition("/")[0] for path in files} == {"outrider"}
    assert sum(source.stat().st_size for source in files.values()) < CORE_BYTES


def test_the_weights_are_the_checkouts_with_their_licences():
    files, added = held(PAIR)
    assert "outrider_pair/__init__.py" in files
    assert added == {"outrider_pair/models": ROOT / "src" / "outrider" / "pair"}
    [weights] = added.values()
    inside = {str(path.relative_to(weights)) for path in weights.rglob("*")}
    assert {"LICENSE-PSF.txt", "whisper-base-draft/LICENSE-MIT.txt", "target", *DRAFTS} <= inside
    assert (PAIR / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_an_editable_pair_copies_nothing():
    [hook] = WheelBuilder(str(PAIR)).get_build_hooks(str(PAIR)).values()
    told = {"force_include": {}}
    hook.initialize("editable", told)
    assert not told["force_include"]


def test_a_wheel_finds_the_weights_of_the_pair(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_CHECKOUT", tmp_path / "none")
    there = ROOT / "src" / "outrider" / "pair"
    assert shipped("target") == there / "target"
    assert is_shipped(str(there / "draft"), "draft")


@pytest.mark.parametrize(
    "words", ["demo", "generate x", "generate x -m corrector", "compare", "certify"]
)
def test_without_the_pair_a_command_names_the_command_to_install_it(outrider, no_pair, words):
    code, out, err = outrider(*words.split())
    assert code == 2
    assert not out
    assert " ".join(err.split()).count(INSTALL) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("target", "draft"), [(None, None), ("corrector", None), *((None, name) for name in DRAFTS)]
)
def test_without_the_pair_load_names_the_command_to_install_it(no_pair, target, draft):
    with pytest.raises(ConfigurationError) as error:
        package.load(target, draft)
    assert INSTALL in str(error.value)


def test_what_is_not_installed_is_nobodys_path(no_pair):
    assert not is_shipped("target", "target")


def test_the_lab_has_its_pages_and_published_numbers():
    files, added = held(LAB)
    data = {"papers/published.json", "tasks/prompts.jsonl", "book/report.html"}
    assert {f"outrider_lab/{path}" for path in data} <= set(files)
    assert not added
    assert (LAB / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_plug_ins_of_engines_are_found_by_entry_points():
    """What vLLM calls in its processes, and what `outrider batch --ray` asks for."""
    for project, group, name in (
        ("ray", batch.GROUP, "ray"),
        ("vllm", "vllm.general_plugins", "outrider"),
    ):
        folder = ROOT / "packages" / f"outrider-{project}"
        told = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        point = metadata.EntryPoint(name, told["entry-points"][group][name], group)
        assert callable(point.load())
        files, added = held(folder)
        assert {path.partition("/")[0] for path in files} == {f"outrider_{project}"}
        assert not added
        assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("found", [[], ["a-lab", "b-lab"]])
def test_batches_on_ray_say_what_they_miss(outrider, monkeypatch, tmp_path, found):
    value = "outrider_ray.batches:answers"
    made = [metadata.EntryPoint("ray", value, batch.GROUP)._for(Distribution(of)) for of in found]
    monkeypatch.setattr(metadata, "entry_points", lambda group: made)
    asked = tmp_path / "in.jsonl"
    asked.write_text('{"custom_id": "a"}\n')
    code, _, err = outrider("batch", asked, tmp_path / "out.jsonl", "--ray", 1)
    told = " ".join(err.split())
    assert code == 2
    assert (f"a-lab ({value}), b-lab ({value})" if found else "pip install outrider-ray") in told


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("its own", "the document needs a file"),
        ("", "--timeline needs outrider-lab"),
        ("no_such_package:x", "cannot be imported"),
    ],
)
def test_a_timeline_is_drawn_by_the_lab(outrider, monkeypatch, tmp_path, value, says):
    told = tomllib.loads((LAB / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    value = told[PICTURES]["timeline"] if value == "its own" else value
    points = [metadata.EntryPoint("timeline", value, PICTURES)] if value else []
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    (tmp_path / "file").write_text("")
    code, _, err = outrider("generate", "x", "--timeline", tmp_path / "file" / "x.svg")
    assert code == 2
    assert says in " ".join(err.split())


def test_without_ray_its_workers_say_so(monkeypatch):
    from outrider_ray.batches import answers

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendUnavailable, match="pip install 'ray"):
        next(answers(None, "", 1, 1, [], 1))


@pytest.fixture
def commands(monkeypatch):
    """Calls a command line to which entry points bring commands."""

    def call(points, *words):
        made = [
            metadata.EntryPoint(name, value, GROUP)._for(Distribution(of))
            for of, name, value in points
        ]
        monkeypatch.setattr(metadata, "entry_points", lambda group: made)
        app = typer.Typer()
        app.command("generate")(lambda: None)
        app.command("chat")(lambda: None)
        register(app)
        return CliRunner().invoke(app, words)

    return call


class Distribution:
    """All that is asked of one."""

    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize("name", ["bench", "certify", "compare", "demo", "plan"])
def test_a_command_without_the_lab_says_how_to_install_it(commands, name):
    for words in ([], ["--help"], ["alpha", "--out", "x", "-q"]):
        assert str(commands([], name, *words).exception) == INSTALL_LAB.format(name)
    assert name not in commands([], "--help").output


def test_a_command_that_cannot_be_imported_is_named_and_the_others_work(commands):
    points = [("a-lab", "x", "no_such_module:app"), ("fine", "y", "outrider_lab.papers:app")]
    told = str(commands(points, "x", "--any").exception)
    assert "'x' of a-lab (no_such_module:app) cannot be imported" in told
    assert "k-sweep" in commands(points, "y", "--help").output
    assert commands(points, "generate").exit_code == 0


def test_two_packages_with_one_command_are_both_named(commands):
    points = [("a-lab", "x", "outrider_lab.papers:app"), ("b-lab", "x", "b:app")]
    told = str(commands(points, "x").exception)
    assert "a-lab (outrider_lab.papers:app), b-lab (b:app); uninstall one" in told


@pytest.mark.parametrize("value", ["pathlib:Path", "math:pi"])
def test_what_is_no_command_is_refused(commands, value):
    told = str(commands([("a-lab", "x", value)], "x").exception)
    assert "is a typer.Typer or a function; got" in told
    assert f"from a-lab ({value})" in told


def test_a_command_of_ours_stays_ours(commands, capsys):
    points = [("a-lab", "generate", "outrider_lab.papers:app")]
    assert commands(points, "generate").exit_code == 0
    assert "outrider has a command 'generate'" in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels of all distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in (ROOT, *sorted((ROOT / "packages").iterdir())):
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=project, check=True, capture_output=True)
    return {path.name.split("-")[0]: path for path in folder.iterdir()}


class Fresh:
    """An environment of its own with the libraries of this one, and wheels of ours."""

    def __init__(self, where, wheels):
        here = os.environ.items()
        self.environment = {name: value for name, value in here if name != "PYTHONPATH"}
        venv.create(where, with_pip=False, symlinks=True)
        self.bin = where / "bin"
        mine = Path(sysconfig.get_path("purelib", vars={"base": where, "platbase": where}))
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "outrider" not in path.name and not path.name.startswith("__editable__"):
                (mine / path.name).symlink_to(path)
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install"]
        for wheel in wheels:
            install = [*pip, "--no-index", "--no-deps", "-q", wheel]
            subprocess.run(install, env=self.environment, check=True)

    def outrider(self, *words):
        return subprocess.run(
            [self.bin / "outrider", *map(str, words)],
            cwd=self.bin,
            env=self.environment | {"OMP_NUM_THREADS": "1", "OUTRIDER_COMPILED": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.mark.slow
def test_the_core_alone_runs_a_model_folder(wheels, tmp_path):
    assert wheels["outrider"].stat().st_size < CORE_BYTES
    core = Fresh(tmp_path / "core", [wheels["outrider"]])
    model = ROOT / "src" / "outrider" / "pair" / "target"
    run = core.outrider(
        "generate", "-m", model, "-n", 8, "--dtype", "float32", "--threads", 1, "def f(x):"
    )
    assert run.returncode == 0, run.stderr
    for words, told in (
        (["demo"], INSTALL_LAB.format("demo")),
        (["chat"], INSTALL),
        (["serve", "--port", "0"], INSTALL),
        (["bench", "toy", "--out", "x"], INSTALL_LAB.format("bench")),
    ):
        refused = core.outrider(*words)
        assert refused.returncode == 2
        assert told in " ".join(refused.stderr.split())
    assert "bench" not in core.outrider("--help").stdout


@pytest.mark.slow
def test_together_they_run_what_is_shipped_and_the_experiments(wheels, tmp_path):
    every = Fresh(tmp_path / "every", wheels.values())
    assert "k-sweep" in every.outrider("bench", "--help").stdout
    toy = every.outrider("bench", "toy", "--no-pictures", "--out", tmp_path / "toy")
    assert toy.returncode == 0, toy.stderr
    run = every.outrider("generate", "-n", 8, "--dtype", "float32", "--threads", 1, "def f(x):")
    assert run.returncode == 0, run.stderr
