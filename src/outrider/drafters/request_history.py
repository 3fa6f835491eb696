"""Texts of earlier requests of one speculator, for drafters that copy.

They are learnt when a request begins, and the newest are kept. A text with the same seed has seen
the noise of the one that begins, so copies of it are `DrawKind.COUPLED`: only a matching rule,
whose text no draft can change, may judge them (docs/rules.md).
"""

from collections import deque

from outrider.drafters.automaton import Automaton

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
