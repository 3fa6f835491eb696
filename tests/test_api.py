"""The public surface: names, documentation, examples, links, and no host reads below the engine."""

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import tomllib
from pathlib import Path
from unittest import mock

import pytest

import outrider
import outrider_lab
import outrider_ray
import outrider_vllm
from outrider.models import calibrate
from outrider.models.calibrate import Calibration, Setting

ROOT = Path(outrider.__file__).parent
LAB = Path(outrider_lab.__file__).parent
PROJECT = Path(__file__).resolve().parents[1]
PAGES = [
    path
    for path in [*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md"), *ROOT.rglob("*.md")]
    if ".venv" not in path.parts
]


def test_exported_names_are_sorted_and_exist():
    assert outrider.__all__ == sorted(outrider.__all__)
    assert len(set(outrider.__all__)) == len(outrider.__all__)
    for name in outrider.__all__:
        assert hasattr(outrider, name), name


@pytest.mark.parametrize("name", outrider.__all__)
def test_exported_names_are_documented(name):
    thing = getattr(outrider, name)
    assert inspect.getdoc(thing), name
    if not inspect.isclass(thing):
        return
    for member, value in vars(thing).items():
        if member.startswith("_") or isinstance(value, (int, str, float, tuple, type(None))):
            continue
        if inspect.isfunction(value) or isinstance(value, property):
            assert inspect.getdoc(value), f"{name}.{member}"


def test_the_version_is_the_projects():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    assert outrider.__version__ == project["version"]
    assert (ROOT / "py.typed").is_file()
    for path in project["license-files"]:
        assert (PROJECT / path).stat().st_size > 1000, path


def modules():
    """Every module that can be imported without a GPU or an extra."""
    for package in (outrider, outrider_lab, outrider_ray, outrider_vllm):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not re.search(r"triton|baselines|__main__", found.name):
                yield found.name


def cases():
    """Modules; the example of `outrider.testing` is a whole contract, which others run as well."""
    for name in modules():
        marks = [pytest.mark.exhaustive] if name == "outrider.testing" else []
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(cases()))
def test_examples_in_docstrings(name):
    try:
        module = importlib.import_module(name)
    except outrider.OutriderError as error:  # an extra that is not installed says so
        pytest.skip(str(error))
    except ModuleNotFoundError as error:
        if error.name != "ray":  # a fleet's modules are imported by nothing else
            raise
        pytest.skip("Ray is not installed: pip install outrider-ray")
    with mock.patch.dict(os.environ):  # an example may set a variable; tests behind it run without
        assert doctest.testmod(module).failed == 0


def test_examples_leave_the_environment_as_it_was():
    before = dict(os.environ)
    test_examples_in_docstrings("outrider.models.isa")  # sets what kernels may use
    assert dict(os.environ) == before


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text("utf-8"), re.S)


@pytest.fixture
def unmeasured(monkeypatch):
    """`load()` takes a fixed setting instead of timing this machine."""
    fixed = Calibration(Setting(1, "float32", False))
    monkeypatch.setattr(calibrate, "choose", lambda *args, **kwargs: fixed)


RUN: list[object] = ["README.md"]
RUN += [
    f"docs/{page}.md" for page in "guide adding-a-drafter requests-and-rows beams heads".split()
]
RUN += ["docs/more-drafters.md", "docs/speculate.md", "docs/image-tokens.md"]
# Runs every check of a rule, as tests/contract does of each rule there is.
RUN += [pytest.param("docs/adding-a-rule.md", marks=pytest.mark.exhaustive)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("page", RUN)
def test_examples_of_the_documentation_run(
    page, unmeasured, registries, tmp_path, monkeypatch, capsys
):
    found = blocks(PROJECT / page, "python")
    assert found
    if page == "README.md":
        assert len(found[0].strip().splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, code in enumerate(found):
        exec(compile(code, f"{page}, example {number}", "exec"), names)
    assert capsys.readouterr().out.strip()


def anchors(text):
    """The names of a page's headings, as GitHub makes them."""
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(PROJECT)))
def test_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in set(anchors(target.read_text("utf-8"))), link


def test_the_measured_table_has_its_place():
    text = (PROJECT / "docs" / "results" / "README.md").read_text("utf-8")
    assert text.count("<!-- measured:start -->") == text.count("<!-- measured:end -->") == 1
    assert text.index("<!-- measured:start -->") < text.index("<!-- measured:end -->")


def test_no_address_of_a_package_index_is_pinned():
    for line in (PROJECT / "constraints.txt").read_text("utf-8").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9_.\-]+==[0-9][0-9A-Za-z.]*", line)
        assert not line.startswith(("nvidia", "-"))


# What the sources may not do.

ABOVE = {"cli", "server"}  # the only ones that write to a terminal
#: Programs of their own, whose output is read by the process that starts them.
PROGRAMS = {"models/cpu_kernels/build_process.py"}


def test_only_commands_print():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative.parts[0] in ABOVE or relative.as_posix() in PROGRAMS:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


#: What runs inside a step: nothing here may wait for a device.
BELOW_THE_ENGINE = (
    "engine/batch.py",
    "engine/step.py",
    "sampling",
    "tree.py",
    "noise.py",
    "types",
    "models",
    "drafters",
    "verifiers",
    "ops",
)
READS = {"item", "tolist", "cpu", "numpy", "nonzero"}
SET_UP = {"__init__", "__post_init__"}  # before any step
#: Functions that read host values all the same, and why that is right.
EXCEPTIONS = {
    "ops/cpu": "runs on a CPU only: there is no device to wait for",
    "drafters/ngram_table.py:count": "counts a corpus before any run",
    "drafters/ngram_table.py:table_of": "sums up counts before any run",
    "drafters/ngram_table.py:_read": "reads a file before any run",
    "tree.py:_children": "builds a table from a tree on the host",
    "sampling/sampling_params.py:rows": "turns settings into tensors before a run",
    "sampling/sampling_params.py:fresh_seed": "a seed from the global generator, before any step",
    "drafters/prompt_lookup.py:copied": "only if the tensors lie on a CPU",
    "drafters/deterministic_tree.py:": "drafts from lists, by drafters kept on a CPU alone",
    "ops/reference/draws.py:top_tokens": "asked by a drafter that is kept on a CPU alone",
    "drafters/suffix.py:automata": "kept on a CPU alone",
    "drafters/either.py:_chains": "beside copies, on a CPU alone",
    "drafters/cross_tokenizer.py:_texts": "another tokenizer cuts texts on the host",
    "models/cross_tokenizer_model.py:": "another tokenizer cuts texts on the host",
    "models/heads/formats.py:": "reads a folder before any run",
    "models/heads/source.py:overlap": "looks at a head before any run",
    "models/load_checks.py:": "checks a model before any run",
    "models/gguf_weights.py:": "reads a file before any run",
    "models/cpu_kernels/packed_linear.py:rows": "packed weights lie on a CPU alone",
    "models/row_padding.py:_grouped_mm": "beside packed weights, which lie on a CPU alone",
    "models/sources.py:not_numbers": "says what is wrong with a model that was just loaded",
    "models/unsupported.py:check_numbers": "looks at weights that were just read",
    "models/layer_subset.py:_check": "reads a draft folder before any run",
    "models/seq2seq/input_modality.py:": "looks at a source as it comes and as it is read",
    "models/recurrent/": "states go as far as the host says: such models are not captured",
    "models/multi_modal.py:examine_media": "a processor's output lies on the host",
    "models/encoder_cache.py:split": "a processor's output lies on the host; once a prompt",
    "models/heads/mtp.py:_first": "only if the tensors lie on a CPU",
    "models/image_cross_attention.py:examine_media": "a processor's output lies on the host",
    "models/weight_only.py:finite": "looks at weights that were just read",
    "types/models.py:places": "a processor's output lies on the host; once a prompt",
    "types/models.py:block": "a processor's output lies on the host; once a prompt",
    "types/models.py:update_digest": "a processor's output lies on the host; once a prompt",
    "models/bart.py:keep": "runs on a CPU alone, once a source",
    "models/bart.py:_bias": "looks at weights before any run",
    "models/bart_encoder.py:": "runs on a CPU alone, once a source",
    "models/hf.py:": "models that cannot be driven over trees: one row after another",
    "models/distributed.py:receive": "orders travel between hosts, on a CPU",
    "sampling/custom_processors.py:": "processors of transformers are Python",
    "sampling/logits_processors.py:repeats": "only if the tensors lie on a CPU",
}


def host_reads(tree):
    """(function, line, code) of what waits for a device, if its subject is a tensor there."""

    def visit(node, function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.Call):
            f, arguments = node.func, node.args
            if isinstance(f, ast.Attribute) and f.attr in READS:
                yield function, node.lineno, ast.unparse(node)
            elif (
                isinstance(f, ast.Name)
                and f.id in ("bool", "int", "float")
                and arguments
                and isinstance(arguments[0], ast.Call)
                and isinstance(arguments[0].func, ast.Attribute)
                and arguments[0].func.attr in ("any", "all", "sum", "max", "min", "argmax", "mean")
            ):
                yield function, node.lineno, ast.unparse(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(tree, "")


def test_nothing_below_the_engine_waits_for_a_device():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT).as_posix()
        if not relative.startswith(BELOW_THE_ENGINE):
            continue
        for function, line, code in host_reads(ast.parse(path.read_text("utf-8"))):
            if function in SET_UP:
                continue
            if not any(f"{relative}:{function}".startswith(known) for known in EXCEPTIONS):
                wrong.append(f"{relative}:{line} in {function}: {code}")
    assert not wrong, "\n".join(wrong)
    assert all((ROOT / name).exists() for name in BELOW_THE_ENGINE)


def test_the_search_for_host_reads_finds_them():
    code = "def f(x):\n    if bool(x.any()):\n        return x.item(), int(x.sum()), x.cpu()\n"
    assert len(list(host_reads(ast.parse(code)))) == 4
