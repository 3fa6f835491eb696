"""One console for all commands: colour only on a terminal, NO_COLOR honoured, errors on stderr.

Its progress bars are on stderr, gone when done; without a terminal they are lines of a log.
"""

import atexit
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from outrider import arguments
from outrider.errors import ConfigurationError, PromptError
from outrider.models import budget

if TYPE_CHECKING:
    from outrider.engine.outputs import StepOutput
    from outrider.types import Tokenizer


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

    @property
    def coloured(self) -> bool:
        """Whether styles are seen: a pipe has none, nor TERM=dumb, and NO_COLOR asks for none."""
        return self.color_system is not None and not self.no_color

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
    """One console for all that is printed: colour only on a terminal, NO_COLOR honoured, and every
    text as it is: `x[a:b:c]` has no emoji in it."""
    return Terminal(highlight=False, soft_wrap=True, emoji=False, **how)


Show = Callable[[str, int, int], None]  #: what is done now, how much is done, of how much
LINE_SECONDS = 10  #: between lines of one item in a log


@contextmanager
def bar(what: str, silent: float = 0.0) -> Iterator[Show]:
    """A bar for work that says itself how far it has come, and for what its start measures.

    Without a terminal a line for each new item, for the same one now and then, and when all is
    done; none in the first `silent` seconds.
    """
    err = console(stderr=True)
    if not err.is_terminal:
        yield _lines(err, silent)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    ) as shown:
        task = shown.add_task(what, total=None)

        def show(text: str, done: int, total: int) -> None:
            shown.update(task, description=text, completed=done, total=total)

        with budget.reporting(lambda said: shown.update(task, description=said)):
            yield show


def _lines(err: "Terminal", silent: float) -> Show:
    """A line for each new item; the numbers in a text make no new one of it."""
    said: dict[str, float] = {}
    began = time.monotonic()

    def show(text: str, done: int, total: int) -> None:
        item, now = re.sub(r"[\d.]+", "", text), time.monotonic()
        due = now - said.get(item, -math.inf) > LINE_SECONDS or done == total
        if due and now - began >= silent:
            said[item] = now
            err.print(f"{text} ({done} of {total})", markup=False)

    return show


@contextmanager
def counter(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar for `total` pieces of work: call what it yields after each of them."""
    with bar(what) as show:
        show(what, 0, total)
        done = count(1)
        yield lambda: show(what, next(done), total)


# Tokens of a step as coloured text, in the manner of figure 1 of Leviathan et al. 2023.

STYLES = {
    "accepted": "green",
    "rejected": "red strike",
    "corrected": "bold blue",
    "bonus": "bold magenta",
    "plain": "",
}
MARKS = {"rejected": ("[-", "-]"), "corrected": ("{+", "+}"), "bonus": ("{*", "*}")}


def written(tokenizer: "Tokenizer", token: int) -> str:
    """What a token writes, its leading space included; nothing for a special one."""
    from outrider.models.token_bytes import spelling_of

    spelling = spelling_of(tokenizer)
    return "" if token in spelling.special else spelling.text(token)


def legend(colour: bool) -> Text:
    """What the colours, or the marks without colour, mean."""
    line = Text()
    for kind in ("accepted", "rejected", "corrected", "bonus"):
        line.append_text(piece(kind, kind, colour)).append("  ")
    return line


def piece(kind: str, text: str, colour: bool) -> Text:
    """One token; without colour rejected and target tokens get marks."""
    if colour:
        return Text(text, style=STYLES[kind])
    before, after = MARKS.get(kind, ("", ""))
    return Text(before + text + after)


def line(block: "StepOutput", decode: Callable[[int], str], colour: bool) -> Text:
    """A step as one line of figure 1, whatever its tokens are."""
    return step(block, lambda token: decode(token).replace("\n", "\\n"), colour)


def step(block: "StepOutput", decode: Callable[[int], str], colour: bool) -> Text:
    """Accepted drafted tokens, the first rejected ones, then the target's own token."""
    line = Text()
    ids, trace = block.token_ids, block.trace
    for token in ids[: block.accepted]:
        line.append_text(piece("accepted", decode(token), colour))
    if len(ids) == block.accepted:
        return line
    kind = "plain"
    if trace is not None and trace.tokens:
        leaf = trace.accepted[-1] if trace.accepted else 0
        for token, parent in zip(trace.tokens, trace.parents, strict=True):
            if parent == leaf:
                shown = decode(token).replace("\n", "\\n")
                line.append_text(piece("rejected", shown, colour))
        kind = "bonus" if trace.next_is_bonus else "corrected"
    return line.append_text(piece(kind, decode(ids[-1]), colour))


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
        with budget.reporting(status.update):
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


# Texts that a command reads: as they are typed, from a file, or from standard input.

INPUT = "-"  #: names standard input


def speak_utf8() -> None:
    """Have standard streams read and write UTF-8 where the locale has nothing but ASCII, as Python
    does unless PYTHONUTF8=0 says not to."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding in ("ascii", "ANSI_X3.4-1968"):
            stream.reconfigure(encoding="utf-8", errors=stream.errors)


def as_typed(given: str) -> str:
    """Text of the command line: what a locale of ASCII alone left in halves is read as UTF-8.

    >>> as_typed("Schl\\udcc3\\udcbcssel")
    'Schlüssel'
    """
    with suppress(UnicodeError):
        return given.encode("utf-8", "surrogateescape").decode("utf-8")
    return given


#: How names of files begin or end.
_ENDING = re.compile(
    r"^(~|\.\.?)/|\.(txt|md|json|jsonl|srt|vtt|tsv|csv|html|xml|py|log)$", re.IGNORECASE
)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file, or standard input ("-", too); never an empty one."""
    if prompt is not None and file is not None:
        raise ConfigurationError("got both a prompt and --file; give one of them")
    text = None if prompt is None else as_typed(prompt)
    if INPUT in (prompt, str(file)) or (prompt is None and file is None):
        text = read_input("prompt")
    elif file is not None:
        text = read_file(file, "prompt")
    if not text:
        raise PromptError("the prompt is empty; got ''; give at least one character")
    return text


def read_source(given: str) -> str:
    """The source: what a file of that name holds, standard input for "-", or the text itself."""
    if given == INPUT:
        text = read_input("source")
    else:
        named = named_file(given, "source")
        text = as_typed(given) if named is None else read_file(named, "source")
    if not text:
        raise PromptError("the source is empty; got ''; give at least one character")
    return text


def read_input(what: str) -> str:
    """Standard input."""
    return _decoded(read_bytes(what), "standard input")


def read_bytes(what: str) -> bytes:
    """Standard input, whatever is in it."""
    if sys.stdin.isatty():
        err.print(f"reading the {what} from the keyboard; Ctrl-D ends it", style="dim")
    return sys.stdin.buffer.read()


def named_input(files: list[str], what: str) -> tuple[list[str], Callable[[str], str]]:
    """Standard input as a file, for what looks here and there in it; and how a
    message names it."""
    if INPUT not in files:
        return files, str
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name, "standard-input")
    path.write_bytes(read_bytes(what))
    kept = [str(path) if name == INPUT else name for name in files]
    return kept, lambda text: text.replace(str(path), "standard input")


def read_file(path: Path, what: str) -> str:
    """A file of text."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise PromptError(
            f"cannot read the {what}; got {path}: {error.strerror}; check the path"
        ) from error
    return _decoded(raw, str(path))


def named_file(given: str, what: str) -> Path | None:
    """The file that a text names; None: there is none, which is said where it looks like a name."""
    path = Path(arguments.at_home(given))
    try:  # a text may be too long for a name, or hold what none can
        if os.path.isfile(path):
            return path
    except ValueError:
        return None
    looks = _ENDING.search(given) or (os.path.isdir(path.parent) and "/" in given)
    if looks and len(given.split()) == 1:  # molecules are written with slashes, too
        err.print(f"there is no file {given!r}: it is read as the {what} itself", markup=False)
    return None


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # editors of Windows begin a file with a mark
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where} is not valid UTF-8: byte {raw[error.start]:#04x} at offset {error.start}; "
            "convert the file first (for example with iconv)"
        ) from error
