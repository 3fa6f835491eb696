"""Writes docs/cli.md: every command with its arguments and options, from the program itself.

    python tools/cli_reference.py           # writes the page
    python tools/cli_reference.py --check   # 1 if the page is not what would be written

What depends on the machine, such as the number of its cores, is left out.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

from outrider.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# Commands

Every command, from the program itself (`python tools/cli_reference.py`; a test fails where this
page is stale). `outrider COMMAND --help` says the same on your terminal. Exit codes: 0 done or
exact, 1 not exact or not all of it done, 2 an error that the message explains, 3 was
inconclusive, 130 interrupted, 141 the output was closed.
"""


def commands(group: typer.Typer, path: tuple[str, ...]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function) of every command, groups opened, by name."""
    found: dict[str, typer.Typer | Callable[..., Any]] = {}
    for one in group.registered_commands:
        if not one.hidden:
            found[one.name or one.callback.__name__.replace("_", "-")] = one.callback
    for inner in group.registered_groups:
        found[inner.name or inner.typer_instance.info.name] = inner.typer_instance
    for name, what in sorted(found.items()):
        if isinstance(what, typer.Typer):
            yield from commands(what, (*path, name))
        else:
            yield " ".join((*path, name)), what


def prose(text: str) -> str:
    """Help as it is written in the code, on one line; a `|` would end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def paragraphs(text: str) -> str:
    """A docstring's paragraphs; what is set in columns stays as it is."""
    out = []
    for block in re.split(r"\n\s*\n", text.replace("\b", "").strip()):
        in_columns = "\n" in block and re.search(r"\S {2,}\S", block)
        out.append(f"```text\n{block.strip()}\n```" if in_columns else prose(block))
    return "\n\n".join(out)


def default(value: Any) -> str:
    """A default that says something: neither nothing nor off."""
    if value is True:
        return "on"
    if value is inspect.Parameter.empty or value in (None, "", (), []) or value is False:
        return ""
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return f"`{value}`"


WORDS = {int: "INTEGER", float: "FLOAT", str: "TEXT", Path: "PATH"}


def kind_of(hint: Any) -> str:
    """`INTEGER` for `int | None`, `list[int]` and the like; nothing for what is on or off."""
    if get_origin(hint) in (list, Union, UnionType):
        return next((kind_of(one) for one in get_args(hint) if one is not type(None)), "")
    return WORDS.get(hint, "")


def flags(name: str, hint: Any, about: OptionInfo) -> str:
    """`-k, --num-speculative-tokens INTEGER`, as one types them."""
    word = name.replace("_", "-")
    # typer.Option's first argument is the default, unless the hint is annotated: then it is a name.
    first = [about.default] if isinstance(about.default, str) else []
    given = [*first, *(about.param_decls or ())]
    names = ", ".join(sorted(given or [f"--{word}"], key=len))
    if hint is bool and not given:
        names += f" / --no-{word}"
    kind = "" if hint is bool else f" {about.metavar or kind_of(hint)}"
    return f"`{names}{kind.rstrip()}`".replace("|", "\\|")


def table(head: str, rows: list[str]) -> list[str]:
    """A table of Markdown, or nothing where it had no rows."""
    line = "|" + "---|" * (head.count(" | ") + 1)
    return ["\n".join([head, line, *rows])] if rows else []


def section(name: str, command: Callable[..., Any]) -> str:
    """One command's heading, text and tables."""
    places, options = [], []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.annotation is typer.Context:  # no option: typer gives it
            continue
        hint, *notes = get_args(parameter.annotation) or (parameter.annotation,)
        if get_origin(parameter.annotation) is not Annotated:
            hint, notes = parameter.annotation, []
        about = next((one for one in notes if isinstance(one, (OptionInfo, ArgumentInfo))), None)
        if isinstance(about, ArgumentInfo):
            places.append(f"| `{parameter.name.upper()}` | {prose(about.help or '')} |")
            continue
        about = about or OptionInfo()
        if not about.hidden:
            typed = flags(parameter.name, hint, about)
            what = prose(about.help or "")
            options.append(f"| {typed} | {default(parameter.default)} | {what} |")
    parts = [f"## {name}", paragraphs(inspect.getdoc(command) or "")]
    parts += table("| argument | what |", places)
    parts += table("| option | default | what |", options)
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """The whole page."""
    found = commands(app, ("outrider",))
    return "\n\n".join([HEAD.strip(), *(section(name, command) for name, command in found)]) + "\n"


def main(words: list[str]) -> int:
    text = page()
    if words == ["--check"]:
        stale = not PAGE.is_file() or PAGE.read_text("utf-8") != text
        if stale:
            print(f"{PAGE} is stale; run python tools/cli_reference.py", file=sys.stderr)
        return int(stale)
    if words:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
