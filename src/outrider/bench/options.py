"""Options that the experiments share, written once."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.bench.record import folder, pyplot
from outrider.errors import ConfigurationError

Target = Annotated[
    str | None, typer.Option(help="Target: local path or hub name. Default: shipped.")
]
Draft = Annotated[str | None, typer.Option(help="Draft model; goes with --target.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with 'prompt' (and 'reference'), or plain lines; default: held-out code."
    ),
]


def both(target: str | None, draft: str | None) -> None:
    """Refuse half a pair."""
    if (target is None) != (draft is None):
        raise ConfigurationError(
            f"a pair needs both --target and --draft; got {target or draft!r} alone; give both or "
            "neither"
        )


@dataclass(frozen=True)
class Shared:
    """Options of every experiment that runs a pair."""

    out: Annotated[
        Path, typer.Option(help="Folder for tables and pictures; runs resume from it.")
    ] = Path("bench-results")
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Under five minutes on two cores: smaller, whatever else is asked."
        ),
    ] = False
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Also PNG and SVG (needs matplotlib).")
    ] = True
    target: Target = None
    draft: Draft = None
    prompts: Prompts = None
    seed: Annotated[int, typer.Option(help="Of all draws; recorded with the results.")] = 0
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=os.cpu_count(), help="CPU threads; default: measured."),
    ] = None

    def pair(self) -> Any:
        """The loaded pair."""
        from outrider.load import load

        both(self.target, self.draft)
        folder(self.out)
        if self.pictures:
            pyplot()  # said now if it is missing, not when all is measured
        threads = "auto" if self.threads is None else self.threads
        return load(self.target, self.draft, dtype=self.dtype, threads=threads)

    def rows(self) -> list[dict[str, str]]:
        """The prompts with their references."""
        from outrider.prompts import read_rows

        return read_rows(self.prompts)


def shared(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of `Shared` and its own: its first argument is a `Shared`."""
    common = inspect.signature(Shared).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    def run(**given: Any) -> None:
        command(Shared(**{name: given.pop(name) for name in common}), **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*common.values(), *own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


@contextmanager
def bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal; one line per step of work elsewhere would be noise."""
    err = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as shown:
        task = shown.add_task(what, total=None)
        yield lambda text, done, total: shown.update(
            task, description=text, completed=done, total=total
        )
