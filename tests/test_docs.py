"""The pages: what they name exists, what the program writes is fresh, the site has them all."""

import ast
import builtins
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import outrider

PROJECT = Path(__file__).resolve().parents[1]
SOURCE = PROJECT / "src" / "outrider"
#: Pages about today's code; logs name what has gone since.
PAGES = [
    path
    for path in [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *PROJECT.glob("docs/**/*.md")]
    if not re.fullmatch(r"log|[\d\-]+", path.stem)
]
NOTEBOOKS = sorted(PROJECT.glob("docs/notebooks/*.md"))
OLD = {"renamed.md"}  #: names what is gone
CODE = "".join(path.read_text("utf-8") for path in SOURCE.rglob("*.py"))
#: Where a page's path may begin, besides the page's own folder.
ROOTS = [PROJECT, SOURCE, PROJECT / "docs", PROJECT / "src", PROJECT / "tests"]


def prose(page):
    """A page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text("utf-8"), flags=re.S | re.M)


def missing_paths(text):
    """Code spans that look like files or folders of this repository, and are not there."""
    for span in re.findall(r"`([^`\n]+)`", text):
        bare = re.fullmatch(r"(?:[\w\-]+/)*[\w\-]+\.(?:py|c|h|md|toml|yml)|(?:[\w\-]+/)+", span)
        ours = re.match(r"(?:src|tests|docs|benchmarks|tools|training|examples|outrider)/", span)
        folder = span.partition("/")[0]
        module = span.endswith(".py") and any((root / folder).is_dir() for root in ROOTS)
        if bare and (ours or module) and not any((root / span).exists() for root in ROOTS):
            yield span


def missing_names(text):
    """Dotted names of ours that cannot be found."""
    for name in set(re.findall(r"\boutrider(?:\.[A-Za-z_]\w*)+", text)):
        parts = name.split(".")
        thing, known = outrider, "outrider"
        for part in parts[1:]:
            if not hasattr(thing, part):
                try:
                    importlib.import_module(f"{known}.{part}")
                except ModuleNotFoundError as error:
                    ours = str(error.name).startswith("outrider")
                    if ours and f'"{name}"' not in CODE:  # a logger has a name, too
                        yield name
                    break  # an extra may be missing
                except outrider.OutriderError:
                    break
            thing, known = getattr(thing, part), f"{known}.{part}"


def commands(text):
    """(words, options) of the commands of ours that stand in spans and blocks of a page."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for block in re.findall(r"^ *```.*?^ *```|^    .*$|`[^`\n]+`", joined, re.S | re.M):
        for line in block.strip("`").splitlines():
            found = re.match(r"(?:\$ )?(?:\w+=\S* )*(?:cat \S+ \| )?outrider (.*)", line.strip())
            if found:
                told = re.split(r"\s#|\s\||`", found[1])[0]
                options = re.findall(
                    r"(?<!\S)--[a-z][a-z\-]*", re.sub(r"'[^']*'|\"[^\"]*\"", "", told)
                )
                yield re.findall(r"^(?:bench )?[a-z][a-z\-]*", told), options


def known_commands():
    """name -> its options, from the page that the program writes."""
    page = (PROJECT / "docs" / "cli.md").read_text("utf-8")
    for section in page.split("\n## outrider ")[1:]:
        cells = " ".join(re.findall(r"^\| `(-[^`]*)`", section, re.M))
        yield section.splitlines()[0], {"--help", *re.findall(r"--[a-z][a-z\-]*", cells)}


def wrong_commands(text):
    """Commands and options of ours on a page that the program does not have."""
    known = dict(known_commands())
    for words, options in commands(text):
        name = words[0] if words else ""
        if name in known:
            yield from (f"outrider {name} {one}" for one in options if one not in known[name])
        elif name and not any(other.startswith(f"{name} ") for other in known):
            yield f"outrider {name}"


def missing_scripts(text):
    """Programs of the repository that a page starts, and targets of make, which are not there."""
    targets = re.findall(r"^([a-z\-]+):", (PROJECT / "Makefile").read_text("utf-8"), re.M)
    code = "\n".join(re.findall(r"^ *```.*?^ *```|^    .*$|`[^`\n]+`", text, re.S | re.M))
    for module in re.findall(r"python3? -m ((?:benchmarks|training)[\w.]*)", code):
        if not any((PROJECT / f"{module.replace('.', '/')}{end}").exists() for end in ("", ".py")):
            yield module
    for path in re.findall(
        r"(?<![\w./])((?:benchmarks|tools|tests|training|examples)/[\w/.\-]+\w)(?![\w*<{])", code
    ):
        if "results" not in path and not (PROJECT / path).exists():
            yield path
    yield from (
        f"make {name}"
        for name in re.findall(r"(?:^|`|\$ )make ([a-z\-]+)", code, re.M)
        if name not in targets
    )


def unknown_keywords(text):
    """Keywords that Python examples give to functions of ours which do not take them."""
    for block in re.findall(r"^ *```(?:python|py)\b[^\n]*\n(.*?)^ *```", text, re.S | re.M):
        try:
            tree = ast.parse(textwrap.dedent(block))
        except SyntaxError:  # a part of a program
            continue
        names = {"outrider": outrider}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outrider"):
                try:
                    module = importlib.import_module(node.module)
                except ImportError:  # of an extra; the name is another test's
                    continue
                names |= {
                    one.asname or one.name: getattr(module, one.name, None) for one in node.names
                }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.keywords:
                continue
            first, *rest = ast.unparse(node.func).split(".")
            function = names.get(first)
            for name in rest:
                function = getattr(function, name, None)
            if not callable(function):
                continue
            takes = inspect.signature(function).parameters
            if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values()):
                continue
            for word in node.keywords:
                if word.arg is not None and word.arg not in takes:
                    yield f"{ast.unparse(node.func)}({word.arg}=)"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_scripts_and_keywords_that_a_page_names_exist(page):
    text = page.read_text("utf-8")
    assert not list(missing_scripts(text))
    assert not list(unknown_keywords(text))
    if page.name not in OLD:
        assert not list(wrong_commands(text))


def unbound_names(text):
    """Names that Python examples use, and neither they nor those before them on the page bind."""
    bound = set(dir(builtins))
    for _, block in re.findall(r"^( *)```python\b[^\n]*\n(.*?)^\1```", text, re.S | re.M):
        nodes = list(ast.walk(ast.parse(textwrap.dedent(block))))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        bound |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                bound |= {(one.asname or one.name).partition(".")[0] for one in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
                bound.add(node.name)
        yield from sorted({node.id for node in names} - bound)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_examples_bind_what_they_use(page):
    assert not list(unbound_names(page.read_text("utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_paths_that_a_page_names_exist(page):
    assert not list(missing_paths(prose(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_names_that_a_page_names_exist(page):
    assert not list(missing_names(page.read_text("utf-8")))


def test_what_is_missing_is_seen():
    assert list(missing_paths("`src/outrider/nowhere.py` `engine/step.py` `a/b`")) == [
        "src/outrider/nowhere.py"
    ]
    assert list(missing_names("outrider.engine.step outrider.engine.nothing")) == [
        "outrider.engine.nothing"
    ]
    page = "```console\n$ outrider serve --rows 3 --max-num-seqs 4  # --more\n```\n`outrider no -x`"
    assert list(wrong_commands(page)) == ["outrider serve --rows", "outrider no"]
    page = "`make nothing`, `make demo`, `python benchmarks/no.py`, `python -m benchmarks.speech`"
    assert list(missing_scripts(page)) == ["benchmarks/no.py", "make nothing"]
    page = "```python\nimport outrider\noutrider.Stop(max_new_tokens=3, most=4)\n```"
    assert list(unknown_keywords(page)) == ["outrider.Stop(most=)"]
    page = "```python\nimport a\nb = a.c(d)\n```\n```python\nprint(b, e)\n```\n"
    assert list(unbound_names(page)) == ["d", "e"]


def test_the_life_of_a_request_names_files_that_are_there():
    text = (PROJECT / "docs" / "life-of-a-request.md").read_text("utf-8")
    named = re.findall(r"(?<![\w/`])[a-z_]+/(?:[\w]+/)*(?:\w+\.py)?", text)
    assert len(named) > 30
    assert not [path for path in named if not (SOURCE / path).exists()]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, PROJECT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_commands_is_what_the_program_says():
    page = tool("cli_reference").page()
    assert re.findall(r"^\| `(-\S+)` \|  \|  \|$", page, re.M) == [], "a parameter, no option"
    assert page == (PROJECT / "docs" / "cli.md").read_text("utf-8"), (
        "run python tools/cli_reference.py"
    )
    assert str(Path.home()) not in page


def test_the_environment_variables_that_the_code_reads_have_a_table():
    page = (PROJECT / "docs" / "installation.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(OUTRIDER_\w+)`", page, re.M))
    code = "".join(path.read_text("utf-8") for path in PROJECT.glob("packages/*/src/**/*.py"))
    read = set(re.findall(r"""["'](OUTRIDER_[A-Z_]+)["']""", CODE + code))
    assert listed == read


def test_the_reference_of_names_has_each_public_name_once():
    page = (PROJECT / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"^::: outrider\.(\w+)$", page, re.M)
    assert sorted(listed) == outrider.__all__


def test_the_site_has_every_page_once():
    text = (PROJECT / "mkdocs.yml").read_text("utf-8")
    listed = re.findall(r"^ +- (?:\w+: )?([\w\-/]+\.md)$", text, re.M)
    docs = PROJECT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} | {"index.md"}
    assert sorted(listed) == sorted(pages), "give the page a line in the nav of mkdocs.yml"


def test_the_site_is_built_strictly():
    (line,) = re.findall(r"mkdocs build.*", (PROJECT / "Makefile").read_text("utf-8"))
    assert "--strict" in line
    assert "quiet" not in line  # which would drop the warnings that --strict counts


def test_links_out_of_the_pages_become_paths(monkeypatch):
    pytest.importorskip("mkdocs")
    within = tool("docs_hooks").within
    assert within("[a](docs/a.md#b) ![s](docs/s.svg)", "") == "[a](a.md#b) ![s](s.svg)"
    assert within("[a](../src/a.md) [b](b.md)", "docs") == "a (`src/a.md`) [b](b.md)"
    assert within("[a](https://a.org/b.md)", "docs") == "[a](https://a.org/b.md)"
    assert within("[a](b.md) [c](../c.md#d)", "docs/results") == "[a](b.md) [c](../c.md#d)"


def cells(page):
    """The code of a notebook, cell by cell."""
    return re.findall(r'^```python exec="1"[^\n]*\n(.*?)^```', page.read_text("utf-8"), re.S | re.M)


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_code_that_the_build_runs(page):
    text = page.read_text("utf-8")
    code = cells(page)
    assert len(code) >= 2
    assert len(re.findall(r"^```python", text, re.M)) == len(code), "a block that nothing runs"
    assert set(re.findall(r'session="([\w\-]+)"', text)) == {
        page.stem
    }  # blocks see each other's names
    for block in code:
        compile(block, page.name, "exec")
    assert len(NOTEBOOKS) == 7


@pytest.mark.slow
@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(page, tmp_path):
    done = subprocess.run(
        [sys.executable, "-"],
        input="\n".join(cells(page)),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PROJECT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
