"""Which experiments a book has, each as the words of a command."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import typer

from outrider.errors import ConfigurationError
from outrider.shipped import WHISPER_DRAFT


@dataclass(frozen=True)
class BookRun:
    """An experiment to be run: the folder of its results, and the command's words."""

    name: str
    words: list[str]

    @property
    def timed(self) -> bool:
        """Whether its figures are times, so that nothing may run beside it.

        >>> BookRun("alpha", ["bench", "alpha", "--timed", "0"]).timed
        False
        """
        return self.words[1] not in COUNTED and ("--timed", "0") not in pairwise(self.words)


@dataclass(frozen=True)
class Own:
    """A run on models of the reader's: folders below --models, by option.

    words  of both books
    quick  of the quick book besides; None: it is in the full one alone
    """

    command: str
    models: dict[str, str]
    words: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = ()


SMALL = {"--model": "smollm2"}
HALF = ("--dtype", "bfloat16")
#: Without times, as they are `bench alpha`'s on the shipped pair.
UNTIMED = ("--timed", "0")
#: What is run besides if there are models: the folders are those of CONTRIBUTING.md.
OWN = {
    "tasks": Own("tasks", SMALL, HALF),
    "alpha-smollm2": Own("alpha", SMALL, (*HALF, *UNTIMED)),
    "alpha-speech": Own(
        "alpha",
        {"--model": "whisper-base", "--recordings": "speech"},
        ("--draft-model", WHISPER_DRAFT, "--dtype", "float32", *UNTIMED),
    ),
    "chen-smollm2": Own("chen", SMALL, ("--drafter", "suffix", *HALF)),
    "wagner-smollm2": Own("wagner", SMALL, ("--skip", "2,3,4,5,6,7,9,11,12"), ("--count", "2")),
    "layers-smollm2": Own("layers", SMALL, quick=None),
}
#: Commands whose figures are counts and laws: two of them may run side by side.
COUNTED = ("toy", "tree", "theory")
#: What --quick alone leaves too long, or says of too few prompts.
QUICK = {"draft-length": UNTIMED, "budget": UNTIMED, "chen": ("--count", "20")}
#: Commands that run no experiment of a book.
OTHERS = ("all", "report", "peers")


def planned(
    app: typer.Typer,
    out: Path,
    quick: bool,
    models: Path | None,
    only: Sequence[str] | None = None,
) -> tuple[list[BookRun], dict[str, str]]:
    """What is to be run, in the order of `outrider bench`, and why the rest is not.

    Every command without a required option runs on the shipped pair; those of OWN on `models`.

    Raises ConfigurationError for a folder that is missing, or a name that is none.
    """
    runs: dict[str, BookRun] = {}
    absent: dict[str, str] = {}
    options = dict(_commands(app))
    for name, known in options.items():
        needed = [option for option, required in known.items() if required]
        if needed:
            absent[name] = f"needs {', '.join(needed)}: give --models"
        else:
            runs[name] = _run(name, name, out, known, quick, QUICK.get(name, ()) if quick else ())
    if models is not None:
        _some_of_them(models)
    for name, own in OWN.items():
        if why := _missing(own, quick, models):
            absent.setdefault(name, why)
            continue
        assert models is not None
        found = [
            word for option, part in own.models.items() for word in (option, str(models / part))
        ]
        few = own.quick if quick and own.quick is not None else ()
        more = (*own.words, *few, *found)
        runs[name] = _run(name, own.command, out, options[own.command], quick, more)
        absent.pop(name, None)
    return _chosen(runs, absent, only)


def _missing(own: Own, quick: bool, models: Path | None) -> str:
    """Why a run on models of the reader's is left out; "" if it is not."""
    if models is None:
        return "needs models of your own: give --models"
    if quick and own.quick is None:
        return "in the full book alone"
    gone = [part for part in own.models.values() if not (models / part).is_dir()]
    return f"needs {' and '.join(gone)} in --models" if gone else ""


def _some_of_them(models: Path) -> None:
    """Raises ConfigurationError if none of the models of OWN are there."""
    known = dict.fromkeys(part for own in OWN.values() for part in own.models.values())
    if not any((models / part).is_dir() for part in known):
        raise ConfigurationError(
            f"--models must hold some of {', '.join(known)}; got {str(models)!r} without any; see "
            "CONTRIBUTING.md"
        )


def _chosen(
    runs: dict[str, BookRun], absent: dict[str, str], only: Sequence[str] | None
) -> tuple[list[BookRun], dict[str, str]]:
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


def _run(
    name: str, command: str, out: Path, known: dict[str, bool], quick: bool, more: Sequence[str]
) -> BookRun:
    """A command's words. What may have another run beside it takes one core."""
    short = ["--quick"] if quick and "--quick" in known else []
    run = BookRun(name, ["bench", command, *short, "--out", str(out / name), *more])
    if run.timed or "--threads" not in known:
        return run
    return BookRun(name, [*run.words, "--threads", "1"])
