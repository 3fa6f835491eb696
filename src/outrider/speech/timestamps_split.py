"""A window's tokens as pieces of text with times, and where the next window begins.

Times inside a window are counted in steps: one for each state of the encoder, 0.02 s in Whisper.
"""

from collections.abc import Sequence
from typing import NamedTuple


class TimedPiece(NamedTuple):
    """Some of a window's tokens, and the steps between which they are said."""

    first: int  #: the piece is tokens[first:last] of the window
    last: int
    start: int
    end: int


class Cut(NamedTuple):
    """A window's pieces; `advance` steps ahead the next window begins."""

    pieces: list[TimedPiece]
    advance: int


def cut(tokens: Sequence[int], first_timestamp_id: int, size: int, whole: bool = False) -> Cut:
    """Cut where two timestamps meet: one closes a piece, the next one opens another.

    `size` are the steps of sound in the window. What stands behind the last such place is left to
    the next window, which begins there, unless a closing timestamp ends it: then nothing is said
    behind it. With `whole` no window will read it again, and it is a piece up to the end.
    """
    stamps = [token >= first_timestamp_id for token in tokens]
    meets = [at + 1 for at in range(len(tokens) - 1) if stamps[at] and stamps[at + 1]]
    closed = stamps[-2:] == [False, True]

    def step(at: int) -> int:
        return tokens[at] - first_timestamp_id

    if not meets:
        times = [step(at) for at in range(len(tokens)) if stamps[at]]
        start = times[0] if whole and stamps[:1] == [True] else 0
        end = times[-1] if times and times[-1] > start else size
        return Cut([TimedPiece(0, len(tokens), start, end)] if tokens else [], size)
    ends = [*meets, len(tokens)] if closed else meets
    pieces = [
        TimedPiece(first, last, step(first), step(last - 1))
        for first, last in zip([0, *ends], ends, strict=False)
    ]
    advance = size if closed else step(ends[-1] - 1)
    rest = ends[-1]
    if whole and not closed and rest + 1 < len(tokens):
        pieces.append(TimedPiece(rest, len(tokens), step(rest), size))
    return Cut(pieces, advance if 0 < advance else size)
