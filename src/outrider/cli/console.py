"""One console for all commands: colour only on a terminal, NO_COLOR honoured, errors on stderr."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from outrider.bench.progress import console
from outrider.models import budget

if TYPE_CHECKING:
    from outrider.engine.outputs import StepOutput
    from outrider.types import Tokenizer


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
