"""The pages: what they name exists, what the program writes is fresh, the site has them all."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import outrider

PROJECT = Path(__file__).resolve().parents[1]
SOURCE = PROJECT / "src" / "outrider"
#: Pages about today's code; logs name what has gone since.
PAGES = [
    path
    for path in [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *PROJECT.glob("docs/*.md")]
    if path.name != "log.md"
]
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
    assert page == (PROJECT / "docs" / "cli.md").read_text("utf-8"), (
        "run python tools/cli_reference.py"
    )
    assert str(Path.home()) not in page


def test_the_reference_of_names_has_each_public_name_once():
    page = (PROJECT / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"^::: outrider\.(\w+)$", page, re.M)
    assert sorted(listed) == outrider.__all__


def test_the_site_has_every_page_once():
    text = (PROJECT / "mkdocs.yml").read_text("utf-8")
    listed = re.findall(r"^ +- (?:\w+: )?([\w\-]+\.md)$", text, re.M)
    pages = {path.name for path in PROJECT.glob("docs/*.md")} | {"index.md"}
    assert sorted(listed) == sorted(pages), "give the page a line in the nav of mkdocs.yml"


def test_links_out_of_the_pages_become_paths(monkeypatch):
    pytest.importorskip("mkdocs")
    within = tool("docs_hooks").within
    assert within("[a](docs/a.md#b) ![s](docs/s.svg)", "") == "[a](a.md#b) ![s](s.svg)"
    assert within("[a](../src/a.md) [b](b.md)", "docs") == "a (`src/a.md`) [b](b.md)"
    assert within("[a](https://a.org/b.md)", "docs") == "[a](https://a.org/b.md)"
