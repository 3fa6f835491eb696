"""Texts of earlier requests of one speculator, for drafters that copy.

They are learnt when a request begins, and the newest are kept. A text with the same seed has seen
the noise of the one that begins, so copies of it are `DrawKind.COUPLED`: only a matching rule,
whose text no draft can change, may verify them (docs/rules.md).
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from outrider.drafters.automaton import Automaton

# What the target held likely after a token, kept for the next time (Token Recycling, Luo 2025).
#
# Every node that the target scores says what follows its token, whether the node is kept or not.
# The rows are kept by the last token, as in the paper, and by the last two, which are asked first.

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


_WATCHED = 64  #: texts under way that are looked at; the oldest are over, as a rule


class RequestHistory:
    """At most about `most` tokens of earlier texts, in an automaton that new rows begin with."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._texts = Automaton()
        self._watched: deque[Watched] = deque(maxlen=_WATCHED)
        self._ends = 0

    def begun(self) -> Automaton:
        """The texts so far, for a row to go on with: nothing matches across its start."""
        for text in self._watched:
            self._learn(text.news())
        if len(self._texts.tokens) > 2 * self.most:
            self._texts = Automaton(self._texts.tokens[-self.most :])
        return self._texts.copy()

    def watch(self, text: Automaton) -> "Watched":
        """What this text goes on with will be learnt."""
        self._watched.append(Watched(text))
        return self._watched[-1]

    def separator(self) -> int:
        """What stands between two texts: below 0, and never twice the same."""
        self._ends -= 1
        return self._ends

    def _learn(self, tokens: list[int]) -> None:
        for token in tokens:
            self._texts.push(token)
        if tokens:
            self._texts.push(self.separator())


class Watched:
    """A text that grows, and how much of it has been learnt."""

    def __init__(self, text: Automaton) -> None:
        self._text, self._learnt = text, len(text.tokens)

    def follow(self, text: Automaton) -> None:
        """The text goes on in this copy: its row has moved."""
        self._text = text

    def news(self) -> list[int]:
        """What has not been learnt yet; it counts as learnt."""
        new = self._text.tokens[self._learnt :]
        self._learnt = len(self._text.tokens)
        return new
