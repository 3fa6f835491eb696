"""The progress bar of all commands: on stderr, gone when done, absent without a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.bench.terminal import console

Show = Callable[[str, int, int], None]  #: what is done now, how much is done, of how much


@contextmanager
def bar(what: str) -> Iterator[Show]:
    """A bar for work that says itself how far it has come."""
    err = console(stderr=True)
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


@contextmanager
def counter(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar for `total` pieces of work: call what it yields after each of them."""
    with bar(what) as show:
        show(what, 0, total)
        done = count(1)
        yield lambda: show(what, next(done), total)
