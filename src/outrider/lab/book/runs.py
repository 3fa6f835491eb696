"""All experiments one after the other, each its own command in a process of its own.

A run's results lie in a folder of its own below the book's; `runs.json` there says what was run and
how it ended. What has ended well is not run again; what was stopped goes on where it stopped, as
every experiment does by itself.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from outrider.certify.report import Row
from outrider.errors import ConfigurationError
from outrider.lab import machine
from outrider.lab.papers.record import folder

RECORD = "runs.json"
LOG = "log.txt"


@dataclass(frozen=True)
class Run:
    """An experiment to be run: the folder of its results, and the command's words."""

    name: str
    words: list[str]


@dataclass(frozen=True)
class Own:
    """A run on models of the reader's: folders below --models, by option."""

    command: str
    models: dict[str, str]
    words: tuple[str, ...] = ()
    quick: bool = True  #: whether it is in the quick book, too


#: What is run besides if there are models: the folders are those of CONTRIBUTING.md.
OWN = {
    "tasks": Own("tasks", {"--target": "smollm2"}, ("--dtype", "bfloat16")),
    "layers-smollm2": Own("layers", {"--target": "smollm2"}, quick=False),
    "chen-smollm2": Own(
        "chen", {"--target": "smollm2"}, ("--drafter", "suffix", "--dtype", "bfloat16"), quick=False
    ),
    "wagner-smollm2": Own(
        "wagner", {"--target": "smollm2"}, ("--skip", "2,3,4,5,6,7,9,11,12"), quick=False
    ),
}
#: Commands that run no experiment.
OTHERS = ("all", "report")


def planned(
    app: typer.Typer,
    out: Path,
    quick: bool,
    models: Path | None,
    only: Sequence[str] | None = None,
) -> tuple[list[Run], dict[str, str]]:
    """What is to be run, in the order of `outrider bench`, and why the rest is not.

    Every command without a required option runs on the shipped pair; those of OWN on `models`.

    Raises ConfigurationError for a folder that is missing, or a name that is none.
    """
    runs: dict[str, Run] = {}
    absent: dict[str, str] = {}
    options = dict(_commands(app))
    for name, known in options.items():
        needed = [option for option, required in known.items() if required]
        if needed:
            absent[name] = f"needs {', '.join(needed)}: give --models"
        else:
            runs[name] = Run(name, _words(name, out / name, known, quick))
    for name, own in OWN.items():
        if models is None:
            absent.setdefault(name, "needs models of your own: give --models")
        elif own.quick or not quick:
            more = [word for pair in _found(models, own).items() for word in pair]
            words = _words(own.command, out / name, options[own.command], quick)
            runs[name] = Run(name, [*words, *own.words, *more])
            absent.pop(name, None)
    return _chosen(runs, absent, only)


def _chosen(
    runs: dict[str, Run], absent: dict[str, str], only: Sequence[str] | None
) -> tuple[list[Run], dict[str, str]]:
    for name in only or ():
        if name not in runs:
            why = absent.get(name, f"known are {', '.join(runs)}")
            raise ConfigurationError(f"--only names experiments; got {name!r}; {why}")
    if only is not None:
        absent |= {name: "left out by --only" for name in runs if name not in only}
    return [run for name, run in runs.items() if only is None or name in only], absent


def _commands(app: typer.Typer) -> Iterator[tuple[str, dict[str, bool]]]:
    """Every experiment's options, and whether each is required."""
    for info in app.registered_commands:
        if info.name is not None and info.name not in OTHERS and info.callback is not None:
            alone = typer.Typer(add_completion=False)
            alone.command(info.name)(info.callback)
            made = typer.main.get_command(alone)
            yield info.name, {p.opts[0]: p.required for p in made.params}


def _words(command: str, out: Path, known: dict[str, bool], quick: bool) -> list[str]:
    short = ["--quick"] if quick and "--quick" in known else []
    return ["bench", command, *short, "--out", str(out)]


def _found(models: Path, own: Own) -> dict[str, str]:
    found = {option: models / name for option, name in own.models.items()}
    for path in found.values():
        if not path.is_dir():
            raise ConfigurationError(
                f"--models must hold {', '.join(own.models.values())}; got {str(models)!r} without "
                f"{path.name}; see CONTRIBUTING.md"
            )
    return {option: str(path) for option, path in found.items()}


class Record:
    """What was run and how it ended, kept after every run."""

    def __init__(self, out: Path, quick: bool) -> None:
        self.path = folder(out) / RECORD
        self.document: Row = {"book": "quick" if quick else "full", "runs": {}, "absent": {}}
        if self.path.exists():
            before = json.loads(self.path.read_text("utf-8"))
            if before["book"] != self.document["book"]:
                raise ConfigurationError(
                    f"{str(out)!r} holds the {before['book']} book; got --"
                    f"{self.document['book']}; give another --out"
                )
            self.document = before

    def done(self, run: Run) -> bool:
        """Whether this very command has ended well."""
        row = self.document["runs"].get(run.name, {})
        return (row.get("words"), row.get("code")) == (run.words, 0)

    def keep(self, run: Run, code: int, seconds: float, said: str) -> None:
        """How a run ended; what it `said` last, if it ended badly."""
        row = {"words": run.words, "code": code, "seconds": seconds, "date": machine.today()}
        self.document["runs"][run.name] = row | ({"said": said} if code else {})
        self.write()

    def write(self) -> None:
        """As it is now."""
        text = json.dumps(self.document, indent=1) + "\n"
        self.path.write_text(text, encoding="utf-8")


def start(run: Run, log: Path) -> int:
    """The command in a process of its own; what it prints goes to its log."""
    quiet = {"OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "outrider", *run.words]
        done = subprocess.run(command, stdout=out, stderr=out, env=quiet | dict(os.environ))
    return done.returncode


def run_all(
    runs: Sequence[Run],
    record: Record,
    say: Callable[[str], None],
    start: Callable[[Run, Path], int] = start,
) -> list[str]:
    """Run what has not ended well yet; the names of those that ended badly.

    One that fails does not stop the others.
    """
    failed = []
    for number, run in enumerate(runs, start=1):
        head = f"{number} of {len(runs)}  {run.name}"
        if record.done(run):
            say(f"{head}: done before")
            continue
        say(f"{head}: outrider {' '.join(run.words)}")
        log = folder(record.path.parent / run.name) / LOG
        started = time.monotonic()
        code = start(run, log)
        seconds = time.monotonic() - started
        last = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
        record.keep(run, code, seconds, *last or [""])
        say(f"    {'done' if code == 0 else f'failed, see {log}'} in {seconds:.0f} s")
        if code:
            failed.append(run.name)
    return failed
