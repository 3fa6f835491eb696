"""What a folder of results holds: documents of experiments, their tables and pictures."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigurationError
from outrider_lab.book.runs import RECORD
from outrider_lab.certify.report import Row


@dataclass(frozen=True)
class Page:
    """One experiment: its document, where that lies below the folder, and its pictures."""

    name: str
    document: Row
    pictures: list[Path]

    @property
    def anchor(self) -> str:
        """Its place on the report's page."""
        return re.sub(r"\W+", "-", self.name)

    @property
    def tables(self) -> dict[str, list[Row]]:
        """The tables that have rows."""
        found: dict[str, list[Row]] = self.document["tables"]
        return {name: rows for name, rows in found.items() if rows}

    def title(self, table: str) -> str:
        """A table's title, or its name if it has none."""
        return str(self.document.get("titles", {}).get(table, table))


def read(folder: Path) -> list[Page]:
    """All experiments of a folder and those below it, in the order that they were run in.

    Raises ConfigurationError if there is none.
    """
    found = {}
    for path in sorted(folder.rglob("*.json")):
        document = _document(path)
        if document is not None:
            found[path] = document
    if not found:
        raise ConfigurationError(
            f"no results; got {str(folder)!r}; give a folder that outrider bench has written to"
        )
    order = [*record(folder).get("runs", {})]
    pages = [Page(_name(folder, path, found), doc, _pictures(path)) for path, doc in found.items()]
    places = {name: number for number, name in enumerate(order)}
    return sorted(pages, key=lambda page: places.get(page.name, len(order)))


def record(folder: Path) -> Row:
    """What `outrider bench all` has kept of its runs; nothing if it has not been here."""
    path = folder / RECORD
    found: Row = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def _document(path: Path) -> Row | None:
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"{str(path)!r} is no JSON document ({error}); remove it, or run its experiment again"
        ) from error
    is_one = isinstance(document, dict) and {"experiment", "tables", "settings"} <= set(document)
    return document if is_one else None


def _name(folder: Path, path: Path, every: Iterable[Path]) -> str:
    """The run's folder; the experiment's own name beside it where there are several in one."""
    below = path.parent.relative_to(folder)
    alone = sum(other.parent == path.parent for other in every) == 1
    return str(below if alone and below.parts else below / path.stem)


def _pictures(path: Path) -> list[Path]:
    """Pictures of this experiment: named as its document, and not as another one's beside it."""
    others = {other.stem for other in path.parent.glob("*.json")} - {path.stem}
    longer = {other for other in others if other.startswith(f"{path.stem}-")}
    mine = re.compile(re.escape(path.stem) + r"(-|$)")
    return [
        picture
        for picture in sorted(path.parent.glob("*.svg"), key=lambda one: one.stem)
        if mine.match(picture.stem)
        and not any(re.match(re.escape(o) + r"(-|$)", picture.stem) for o in longer)
    ]
