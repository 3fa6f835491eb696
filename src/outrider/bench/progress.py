"""The progress bar of all commands: on stderr, gone when done, absent without a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

# What models, files and servers wrote, on a terminal: characters that command it are shown.
#
# A text may hold escape sequences that retitle a terminal, clear it or write to the clipboard.
# Where the output is a terminal they are shown as `\u001b` and do nothing; files and pipes get them
# raw.

#: C0 but tab and newline, DEL, and C1, which terminals obey in UTF-8, too.
_COMMANDS = {
    code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


def printable(text: str) -> str:
    """The text with its control characters as JSON writes them; tabs and newlines stay.

    >>> printable("a\\x1b[2Jb\\n")
    'a\\\\u001b[2Jb\\n'
    """
    return text.translate(_COMMANDS)


def put(text: str) -> None:
    """Write to standard output: as it is to a file or pipe, printable to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Terminal(Console):
    """A console of rich that obeys its own styles, and no control character of what it prints."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The parts to be printed."""
        for segment in super().render(renderable, options):
            if segment.control or not self.is_terminal:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def console(**how: Any) -> Terminal:
    """One console for all that is printed: colour only on a terminal, NO_COLOR honoured."""
    return Terminal(highlight=False, soft_wrap=True, **how)


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
