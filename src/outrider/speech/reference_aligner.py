"""A reference as tokens to copy from, for each window: by its times, or by what was said so far."""

import difflib
import re
from collections.abc import Callable, Sequence

from outrider.speech import captions
from outrider.speech.captions import CaptionLine

_AHEAD = 250  #: words of a window at most
_SLACK = 30  #: words of doubt about where a window begins


class ReferenceAligner:
    """One recording's reference.

    Lines with times give what is said in a window. Without times the text is followed: behind
    what was copied last where windows come one after another, else about where the window's share
    of the recording is.
    """

    def __init__(
        self, lines: Sequence[CaptionLine], encode: Callable[[str], list[int]], seconds: float
    ) -> None:
        self._lines, self._encode, self._seconds = lines, encode, seconds
        self._words = " ".join(line.text for line in lines).split()
        self._at = 0

    def tokens(self, start: float, end: float, following: bool) -> list[int]:
        """What a window between two times may copy; `following` windows come in order."""
        said = captions.between(self._lines, start, end)
        if said is None:
            first = self._at
            if not following:
                share = len(self._words) / self._seconds
                first = max(int(start * share) - _SLACK, 0)
            said = " ".join(self._words[first : first + _AHEAD])
        said = " ".join(said.split())
        return self._encode(f" {said}") if said else []

    def follow(self, text: str) -> None:
        """This was said: the next window is looked for behind it."""
        heard = [_plain(word) for word in text.split()]
        near = [_plain(word) for word in self._words[self._at : self._at + 2 * len(heard) + _SLACK]]
        blocks = difflib.SequenceMatcher(None, near, heard, autojunk=False).get_matching_blocks()
        found = [block for block in blocks if block.size]
        if found:
            last = found[-1]
            rest = len(heard) - (last.b + last.size)  # what was said behind the last match
            self._at = min(self._at + last.a + last.size + rest, len(self._words))


def _plain(word: str) -> str:
    return re.sub(r"\W", "", word.lower())
