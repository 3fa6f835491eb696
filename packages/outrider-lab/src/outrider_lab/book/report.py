"""One page of HTML from a folder of results: nothing outside it is read, now or by a browser."""

import re
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from outrider.errors import ConfigurationError
from outrider_lab.book import findings, pages, svg
from outrider_lab.book.findings import Finding
from outrider_lab.book.pages import Page
from outrider_lab.certify.report import Row

SHOWN = 40  #: rows of a table; longer ones go on in their CSV file


class ReportPart(NamedTuple):
    """A paper on the first page: its main result, what else is decided, a picture, its pages."""

    name: str
    lead: Finding | None
    decided: list[Finding]
    left_open: int
    picture: str
    pages: Sequence[Page]


class Section(NamedTuple):
    """An experiment as the page shows it."""

    page: Page
    facts: list[tuple[str, str]]
    findings: list[Finding]
    pictures: list[str]


def render(folder: Path) -> str:
    """The page. Raises ConfigurationError for a folder without results, or without jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise ConfigurationError(
            "a report needs jinja2, which is not installed; install the extra with "
            "pip install 'outrider[bench]'"
        ) from error
    found = pages.read(folder)
    first = list(findings.first_page(found))
    parts = [_part(*part) for part in first]
    told = [page for _, _, mine in first for page in mine]
    found = told + [page for page in found if page not in told]
    said = [one for _, mine, _ in first for one in mine]
    text = (files("outrider_lab") / "book" / "report.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shown": shown, "short": short, "is_number": _number, "fields": _fields}
    template = environment.from_string(text)
    kept = pages.record(folder)
    there = {page.name for page in found}
    machines = list({_line(page.document.get("machine", {})): None for page in found})
    dates = sorted({str(page.document.get("date", "")) for page in found} - {""})
    return template.render(
        book=kept.get("book", ""),
        dates=" to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])),
        machines=machines,
        parts=parts,
        said=Counter(one.verdict for one in said),
        missed=[one for one in said if one.verdict == "missed"],
        most=SHOWN,
        sections=[_section(page, len(machines) > 1) for page in found],
        failed={n: r["said"] for n, r in kept.get("runs", {}).items() if r["code"]},
        absent={name: why for name, why in kept.get("absent", {}).items() if name not in there},
        seconds=sum(run["seconds"] for run in kept.get("runs", {}).values()),
    )


def _part(part: findings.FindingsPart, said: list[Finding], mine: Sequence[Page]) -> ReportPart:
    drawn = next((page for page in mine if page.pictures), None)
    picture = ""
    if drawn is not None:
        path = drawn.pictures[0]
        picture = svg.inline(path.read_text("utf-8"), f"first-{drawn.anchor}-", path.stem)
    others = said[1:]
    return ReportPart(
        part.name,
        said[0] if said else None,
        [one for one in others if one.verdict != "open"],
        sum(one.verdict == "open" for one in others),
        picture,
        mine,
    )


def _section(page: Page, machine: bool) -> Section:
    """`machine`: whether to say which one it was."""
    document = page.document
    facts = {"date": document.get("date", "")} | document["settings"]
    if machine:
        facts |= document.get("machine", {})
    pictures = [
        svg.inline(path.read_text("utf-8"), f"{page.anchor}-{number}-", path.stem)
        for number, path in enumerate(page.pictures)
    ]
    told = [(name, shown(value)) for name, value in facts.items() if shown(value)]
    return Section(page, told, findings.findings(page), pictures)


def _fields(rows: list[Row]) -> dict[str, bool]:
    """The columns of a table, and whether each of them holds numbers alone."""
    fields = dict.fromkeys(key for row in rows for key in row)
    return {key: all(_number(row.get(key)) for row in rows) for key in fields}


def _number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def shown(value: object) -> str:
    """A value as a person reads it: four digits, local folders without the way to them.

    >>> shown(1.23456), shown(None), shown([3, 4]), shown("/home/me/models/small"), shown(True)
    ('1.235', '', '3, 4', 'small', 'yes')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    return short(str(value))


def short(text: str) -> str:
    """Paths of this machine mean nothing elsewhere: their last part is left."""
    return re.sub(r"(?<![\w./])/(?:[\w.@+-]+/)+([\w.@+-]+)", r"\1", text)


def _line(about: Row) -> str:
    """A machine and its versions in one line."""
    if not about:
        return ""
    place = about["processor"] if about["device"] == "cpu" else about["device"]
    versions = ", ".join(
        f"{name} {about[name]}" for name in ("outrider", "torch", "transformers", "python")
    )
    return f"{place}, {about['cores']} cores, {versions}"
