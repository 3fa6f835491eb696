"""Who may import whom: downward only, and side by side never.

Names on one line do not see each other. Every import counts, those inside functions too; only what
a type checker alone reads (`if TYPE_CHECKING`) is left out.
"""

import ast
from pathlib import Path

import pytest

import outrider

ROOT = Path(outrider.__file__).parent
LAYERS = [
    {"cli"},
    {"server", "train"},
    {"integrations", "loading", "testing"},
    {"resolve_config", "text"},
    {"speech"},
    {"engine", "stochastic"},
    {"drafters", "verifiers"},
    {"ops", "sampling"},
    {"models", "noise"},
    {"plugins", "shipped", "tree"},
    {"arguments", "costs", "load_config", "stats", "types"},
    {"errors", "lazy", "row_params"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
#: Packages that stand on the public names: `from outrider import Sampling`.
ON_PUBLIC_NAMES = {"cli", "server", "integrations", "testing", "train"}
#: Third parties and the only places that may import them.
HOMES = {
    "transformers": {
        "models",
        "speech",
        "text",
        "integrations",
        "server",
        "testing",
        "train",
    },
    "tokenizers": {"text"},
    "peft": {"models"},
    "safetensors": {"drafters", "models", "shipped", "train"},
    "triton": {"models", "ops"},
    "typer": {"cli"},
    "rich": {"cli"},
    "soundfile": {"speech"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "pydantic": {"server"},
    "llguidance": {"server"},
    "uvicorn": {"server"},
    "prometheus_client": {"server"},
}


def sources():
    """(package or module below the root, path, syntax tree) of every file but the public names."""
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative.name in ("__init__.py", "__main__.py") and len(relative.parts) == 1:
            continue  # the public names, and `python -m outrider`, which starts the command line
        yield relative.parts[0].removesuffix(".py"), relative, ast.parse(path.read_text("utf-8"))


def typing_only(tree):
    """Nodes below `if TYPE_CHECKING`."""
    hidden = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden.update(id(inner) for child in node.body for inner in ast.walk(child))
    return hidden


def imports(tree):
    """(line, dotted name) of everything a file imports; names of a from-import are joined on."""
    hidden = typing_only(tree)
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def submodule(name):
    """The package or module below the root that a dotted outrider name lies in, or None."""
    parts = name.split(".")
    if len(parts) < 2:
        return None
    found = (ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").is_file()
    return parts[1] if found else None


def test_every_module_has_a_layer():
    missing = {part for part, _, _ in sources()} - set(RANK)
    assert not missing, f"give {missing} a line in LAYERS"


def test_the_picture_in_contributing_is_this_one():
    """One line a layer: its names, then what they are for."""
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")
    picture = page.split("## How the code is laid out")[1].split("```")[1].strip().splitlines()
    drawn = [set(line[:40].split()) for line in picture]
    assert drawn == LAYERS


def test_imports_go_downward():
    wrong = []
    for part, path, tree in sources():
        for line, name in imports(tree):
            if name.split(".")[0] != "outrider":
                continue
            other = submodule(name)
            if other is None:
                if part not in ON_PUBLIC_NAMES:
                    wrong.append(f"{path}:{line} imports the public name {name}")
            elif other != part and RANK.get(other, 99) <= RANK.get(part, 99):
                wrong.append(f"{path}:{line} ({part}) imports {name}")
    assert not wrong, "\n".join(wrong)


def test_third_parties_stay_where_they_belong():
    wrong = []
    for part, path, tree in sources():
        for line, name in imports(tree):
            home = HOMES.get(name.split(".")[0])
            if home is not None and part not in home:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


#: Distributions of their own, and what they may not lean on: what stands on everything else.
BESIDE = ("outrider_lab", "outrider_pair", "outrider_ray", "outrider_vllm", "ray", "vllm")
PROJECT = ROOT.parent.parent


def test_the_core_imports_no_other_distribution():
    wrong = []
    for _, path, tree in sources():
        for line, name in imports(tree):
            if name.split(".")[0] in BESIDE:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


#: Of the command line: what the commands of any distribution print with, and read options by.
SHARED_BY_COMMANDS = {"console", "gathered", "options", "typed_values"}


def test_the_lab_stands_on_the_core_and_not_on_its_doors():
    wrong, seen = [], 0
    for path in sorted((PROJECT / "packages/outrider-lab/src").rglob("*.py")):
        for line, name in imports(ast.parse(path.read_text("utf-8"))):
            seen += name.startswith("outrider.")
            door = name.split(".")[1:3] if name.startswith("outrider.") else []
            if door[:1] in (["cli"], ["server"]) and door[-1] not in SHARED_BY_COMMANDS:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)
    assert seen > 100


#: What nothing outside `ops` may know: operations are called by name, on any device.
BACKENDS = ("outrider.ops.cpu", "outrider.ops.triton")


def test_only_ops_knows_its_backends():
    wrong = []
    for part, path, tree in sources():
        for line, name in imports(tree):
            inside = any(f"{name}.".startswith(f"{backend}.") for backend in BACKENDS)
            if part != "ops" and inside:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_modules_of_backends_are_not_hidden_by_what_they_define():
    import importlib
    import types

    for backend in BACKENDS:
        if backend.endswith("triton"):
            pytest.importorskip("triton")
        package = importlib.import_module(backend)
        for path in Path(package.__path__[0]).glob("[!_]*.py"):
            module = importlib.import_module(f"{backend}.{path.stem}")
            assert isinstance(module, types.ModuleType)
            assert getattr(package, path.stem) is module


@pytest.mark.parametrize("module", ["outrider", "outrider.cli.commands"])
def test_importing_loads_no_library(module):
    """A terminal shows `--help` in a third of a second: the commands import when they run."""
    import subprocess
    import sys

    heavy = ["torch", "numpy", "transformers", "matplotlib", "ray", "fastapi", "uvicorn"]
    heavy += ["typer", "rich"] if module == "outrider" else []
    code = f"import {module}, sys; sys.exit(','.join(m for m in {heavy} if m in sys.modules) or 0)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_names_come_from_where_a_type_checker_reads_them():
    tree = ast.parse((ROOT / "__init__.py").read_text("utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    read = {
        alias.name: node.module
        for node in block.body
        for alias in node.names
        if node.module != "outrider"
    }
    parts = {alias.name for node in block.body for alias in node.names} - set(read)
    assert read == outrider._EXPORTS
    assert parts == set(outrider._PARTS)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = outrider.lode


def test_no_two_test_files_share_a_name():
    from collections import Counter

    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    names.pop("conftest.py")
    assert not [name for name, count in names.items() if count > 1], "pytest imports by basename"
