"""What every experiment needs: results that survive a stop, tables, intervals, pictures."""

import csv
import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from rich.table import Table
from rich.text import Text

from outrider.cli import console as consoles
from outrider.errors import ConfigurationError
from outrider.shipped import CORRECTOR, is_shipped
from outrider_lab.bench import machine
from outrider_lab.certify.report import Row as Row

if TYPE_CHECKING:
    from outrider.loading import Notes
    from outrider.text.speculator import Speculator
    from outrider.types import LanguageModel

P = ParamSpec("P")
Tables = dict[str, list[Row]]  #: of an experiment, by their names


class Store:
    """One JSON line per finished measurement, found again by its key when a run is resumed."""

    def __init__(self, where: Path, name: str, settings: Row) -> None:
        from outrider_lab.certify.matrix import read_results

        self.folder, self.name, self.settings = folder(where), name, settings
        self.path = where / f"{name}.jsonl"
        self._mark = json.dumps(settings, sort_keys=True)
        self.rows: dict[str, Row] = {}
        if self.path.exists():
            for row in read_results(self.path):
                if row.get("settings") == self._mark:
                    self.rows[row["key"]] = row

    def get(self, key: str, measure: Callable[P, Row], *args: P.args, **keywords: P.kwargs) -> Row:
        """The stored result, or a new one by `measure`, stored at once."""
        if key not in self.rows:
            row = {"key": key, "settings": self._mark} | measure(*args, **keywords)
            with self.path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            self.rows[key] = row
        return self.rows[key]

    def write(self, tables: Tables) -> None:
        """All tables as one JSON document and one CSV file each.

        The document says besides how it came about: `command`, `date`, and `machine` with versions.
        """
        document = {
            "experiment": self.name,
            "command": machine.command(),
            "date": machine.today(),
            "machine": machine.environment(),
            "settings": self.settings,
            "tables": tables,
        }
        path = self.folder / f"{self.name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        for name, rows in tables.items():
            if not rows:
                continue
            fields = list(dict.fromkeys(key for row in rows for key in row))
            target = self.folder / f"{self.name}-{name}.csv"
            with target.open("w", newline="", encoding="utf-8") as out:
                writer = csv.DictWriter(out, fields)
                writer.writeheader()
                writer.writerows(rows)


console = consoles.console()
if not console.is_terminal:
    console.width = 260  # files and pipes: no wrapped columns


def show(command: Callable[..., None], tables: Tables, titles: dict[str, str], out: Path) -> None:
    """Print a command's tables under their titles, which the experiment's document keeps, too."""
    name = command.__name__.replace("_", "-")
    entitle(out, name, (command.__doc__ or "").strip().splitlines()[0], titles)
    for key, title in titles.items():
        if tables.get(key):
            console.print(table(title, tables[key]))
    console.print(f"written to {out}", markup=False)


def entitle(where: Path, name: str, about: str, titles: dict[str, str]) -> None:
    """Add to an experiment's document what it is about, and its tables' titles, best known late.

    `about` is the first line of the command's help: paper, table, figure.
    """
    path = where / f"{name}.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document |= {"about": about, "titles": titles}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def folder(path: Path) -> Path:
    """A folder that files can be written to, made if it is missing; or ConfigurationError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.NamedTemporaryFile(dir=path).close()  # it is removed at once
    except OSError as error:
        raise ConfigurationError(
            f"results need a folder that can be written; got {str(path)!r}: {error.strerror}; "
            "give another --out"
        ) from error
    return path


def of_prompts(prompts: Sequence[object]) -> str:
    """A name for these prompts: results of others are not theirs, however many they are."""
    text = json.dumps(list(prompts), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def draft_of(pair: "Speculator") -> "LanguageModel":
    """The pair's draft model, for drafters of other shapes."""
    from outrider.drafters import DraftModel

    assert isinstance(pair.engine.drafter, DraftModel), "experiments load a pair with a draft"
    return pair.engine.drafter.model


def of_pair(notes: "Notes") -> Row:
    """What a measurement depends on besides its own settings: models, dtype, threads, packing."""

    def name(source: str | None, part: str) -> str | None:
        if is_shipped(source, CORRECTOR):
            return CORRECTOR
        return "shipped" if is_shipped(source, part) else source

    return {
        "target": name(notes.target, "target"),
        "draft": name(notes.draft, "draft"),
        "dtype": notes.dtype,
        "threads": notes.threads,
        "packed": notes.packed,
    }


def table(title: str, rows: Sequence[Row]) -> Table:
    """A text table of rows that share their columns."""
    shown = Table(title=Text(title), title_justify="left")
    fields = list(dict.fromkeys(key for row in rows for key in row))
    for name in fields:
        numeric = all(isinstance(row.get(name, 0), (int, float, type(None))) for row in rows)
        shown.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(_shown(row.get(name)) for name in fields))
    return shown


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
