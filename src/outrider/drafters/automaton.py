"""A suffix automaton of a text that grows (Blumer et al. 1985), read as it is written.

After every token it says how long the longest suffix of the text is that stands in the text before,
and where: what followed there is what SAM-Decoding (Hu et al. 2024) drafts. Amortised constant time
per token, however long the text; plain lists and dictionaries, some hundred bytes per token.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

ROOT = 0  #: the state of no tokens at all


class Automaton:
    """The text's substrings by state; a state's strings end at the same places.

    >>> text = Automaton([1, 2, 3, 1, 2])
    >>> text.match, text.ahead(3)
    (2, [3, 1, 2])
    >>> text.push(3)
    >>> text.match, text.tokens[text.place]
    (3, 1)
    """

    __slots__ = ("_ends", "_here", "_last", "_links", "_next", "_sizes", "match", "place", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._links = [-1]  #: the state of the longest suffix that ends at more places
        self._sizes = [0]  #: a state's longest string
        self._ends = [0]  #: behind the last place where it was seen
        self._last = ROOT  #: the state of the whole text
        self._here = ROOT  #: the state of its longest suffix that stands in it before
        self.match = 0  #: that suffix's length
        self.place = 0  #: behind where it stands: what followed there is `tokens[place]`
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with this token."""
        links, sizes, ends = self._links, self._sizes, self._ends
        state, match = self._step(self._here, self.match, token)
        self.tokens.append(token)
        place = ends[state]
        self._extend(token)
        while state and sizes[links[state]] >= match:  # the state was split: its shorter half
            state = links[state]
        self._here, self.match, self.place = state, match, place if match else 0
        if state:  # who matches it next finds it here
            ends[state] = len(self.tokens)

    def ahead(self, count: int) -> list[int]:
        """What followed the longest match; behind the text's end the copy goes on with itself."""
        if not self.match:
            return []
        tokens, place = self.tokens, self.place
        period = len(tokens) - place
        if count <= period:
            return tokens[place : place + count]
        return (tokens[place:] * (count // period + 1))[:count]

    def behind(self, tokens: Iterable[int], count: int) -> list[int]:
        """What `ahead` would say if the text went on with these tokens, which are not read.

        >>> Automaton([1, 2, 3, 1]).behind([2], 2)
        [3, 1]
        """
        state, match = self._here, self.match
        for token in tokens:
            state, match = self._step(state, match, token)
        place = self._ends[state]
        return self.tokens[place : place + count] if match else []

    def copy(self) -> "Automaton":
        """The same text, to be continued apart."""
        other = Automaton()
        other.tokens, other._next = self.tokens.copy(), [follow.copy() for follow in self._next]
        other._links, other._sizes = self._links.copy(), self._sizes.copy()
        other._ends, other._last = self._ends.copy(), self._last
        other._here, other.match, other.place = self._here, self.match, self.place
        return other

    def _step(self, state: int, match: int, token: int) -> tuple[int, int]:
        """The longest suffix of `match` tokens of a state and this one that the text holds."""
        follow, links, sizes = self._next, self._links, self._sizes
        while token not in follow[state]:
            if not state:
                return ROOT, 0
            state = links[state]
            match = sizes[state]
        return follow[state][token], match + 1

    def _extend(self, token: int) -> None:
        """States for the text's new suffixes."""
        follow, links, sizes, ends = self._next, self._links, self._sizes, self._ends
        new, state = len(follow), self._last
        follow.append({})
        links.append(ROOT)
        sizes.append(sizes[state] + 1)
        ends.append(len(self.tokens))
        while state >= 0 and token not in follow[state]:
            follow[state][token] = new
            state = links[state]
        if state >= 0:
            old = follow[state][token]
            links[new] = old if sizes[state] + 1 == sizes[old] else self._split(state, token)
        self._last = new

    def _split(self, state: int, token: int) -> int:
        """The shorter strings of the state that follows on a token get one of their own."""
        follow, links, sizes = self._next, self._links, self._sizes
        old, short = follow[state][token], len(follow)
        follow.append(follow[old].copy())
        links.append(links[old])
        sizes.append(sizes[state] + 1)
        self._ends.append(self._ends[old])
        links[old] = short
        while state >= 0 and follow[state].get(token) == old:
            follow[state][token] = short
            state = links[state]
        return short


# Texts of earlier requests of one speculator, for drafters that copy.
#
# They are learnt when a request begins, and the newest are kept. A text with the same seed has seen
# the noise of the one that begins, so copies of it are `DrawKind.COUPLED`: only a matching rule,
# whose text no draft can change, may verify them (docs/rules.md).

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
    """The tokens of a text that grows, and how many have been learnt. Its states, which take a
    hundred times as much, are gone with its row."""

    def __init__(self, text: Automaton) -> None:
        self._tokens, self._learnt = text.tokens, len(text.tokens)

    def follow(self, text: Automaton) -> None:
        """The text goes on in this copy: its row has moved."""
        self._tokens = text.tokens

    def news(self) -> list[int]:
        """What has not been learnt yet; it counts as learnt."""
        new = self._tokens[self._learnt :]
        self._learnt = len(self._tokens)
        return new
