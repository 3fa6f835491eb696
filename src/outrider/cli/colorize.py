"""Tokens of a step as coloured text, in the manner of figure 1 of Leviathan et al. 2023."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from outrider.engine.outputs import StepOutput
    from outrider.types import Tokenizer

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
