"""A suffix automaton of a text that grows (Blumer et al. 1985), read as it is written.

After every token it says how long the longest suffix of the text is that stands in the text before,
and where: what followed there is what SAM-Decoding (Hu et al. 2024) drafts. Amortised constant time
per token, however long the text; plain lists and dictionaries, some hundred bytes per token.
"""

from collections.abc import Iterable

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
