"""What the target held likely after a token, kept for the next time (Token Recycling, Luo 2025).

Every node that the target scores says what follows its token, whether the node is kept or not. The
rows are kept by the last token, as in the paper, and by the last two, which are asked first.
"""

from collections.abc import Sequence
from itertools import islice

WIDTH = 8  #: tokens of a row
MOST = 1 << 16  #: rows of either kind; the oldest go first
_BITS = 32


class Successors:
    """Likely next tokens by what they follow, best first.

    >>> after = Successors()
    >>> after.keep(1, 2, [7, 8])
    >>> after.row(1, 2), after.row(5, 2), after.row(2, 1)
    ([7, 8], [7, 8], ())
    """

    __slots__ = ("_one", "_two", "shared")

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared  #: by rows, which do not copy it then
        self._one: dict[int, Sequence[int]] = {}
        self._two: dict[int, Sequence[int]] = {}

    def row(self, before: int, token: int) -> Sequence[int]:
        """What follows these two tokens, or else the second one; () if that is not known."""
        found = self._two.get(before << _BITS | token)
        return self._one.get(token, ()) if found is None else found

    def keep(self, before: int, token: int, best: Sequence[int]) -> None:
        """What follows these two tokens, for all that is known."""
        _put(self._one, token, best)
        _put(self._two, before << _BITS | token, best)

    def copy(self) -> "Successors":
        """The same, to be continued apart."""
        other = Successors()
        other._one, other._two = self._one.copy(), self._two.copy()
        return other


def _put(rows: dict[int, Sequence[int]], key: int, best: Sequence[int]) -> None:
    if key not in rows and len(rows) >= MOST:  # many at once: each passes over those gone before
        for old in list(islice(rows, max(MOST // 8, 1))):
            del rows[old]
    rows[key] = best
