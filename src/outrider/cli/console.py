"""One console for all commands: colour only on a terminal, NO_COLOR honoured, errors on stderr."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str) -> None:
    """One error, on stderr."""
    err.print("error: ", style="bold red", end="")
    err.print(message, markup=False)


def progress(total: int, what: str) -> Progress:
    """A progress bar on stderr that disappears when done; nothing when stderr is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    bar.add_task(what, total=total)
    return bar


def working(what: str) -> Status:
    """A spinner on stderr for work without a count; nothing when stderr is no terminal."""
    return err.status(what)


LOADING = "loading (the first time this measures the machine for some seconds)"
