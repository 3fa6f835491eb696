"""One console for all commands: colour only on a terminal, NO_COLOR honoured, errors on stderr."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.table import Table

from outrider.bench.terminal import console
from outrider.models import budget

EXIT_SOME = 1  #: some files or requests failed, the others are done
EXIT_ERROR, EXIT_INTERRUPTED = 2, 130
EXIT_CLOSED = (
    141  #: whoever read the output has gone: what shells say of a program that SIGPIPE ends
)

out = console()
err = console(stderr=True)


def fail(message: str) -> None:
    """One error, on stderr."""
    err.print("error: ", style="bold red", end="")
    err.print(message, markup=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr for work without a count, which says what takes long; nothing when
    stderr is no terminal: then a line of the log does."""
    with err.status(what) as status:
        if not err.is_terminal:
            yield
            return
        with budget.told(status.update):
            yield


def figures(
    columns: Sequence[str], words: Sequence[str], folded: Sequence[str], title: str | None = None
) -> Table:
    """A table that cuts no figure where there is little room: the columns of `folded` fold.

    Those of `words` begin at the left, all others end at the right.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(
            name,
            justify="left" if name in words else "right",
            no_wrap=name not in folded,
            overflow="fold",
        )
    return table


LOADING = "loading (the first time this measures the machine for some seconds)"
