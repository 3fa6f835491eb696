"""Chances that the next drafted token is kept, learnt from one row's own verdicts.

What one row shows is not counted for another here: rows may share a seed, and then one row's
verdict would tell another's noise (docs/planner.md).
"""

from collections.abc import Sequence

BUCKETS = 12  #: two for every doubling of a length, from 1 to 45 and above
STRENGTH = 5.0  #: looks that a prior nobody measured is worth
FORGET = 0.99  #: what earlier looks of a bucket count for beside its next one


def bucket(length: int) -> int:
    """The bucket of a match or a streak of so many tokens.

    >>> [bucket(length) for length in (0, 1, 2, 3, 4, 8, 1000)]
    [0, 0, 2, 3, 4, 6, 11]
    """
    return _BUCKET[length] if length < len(_BUCKET) else BUCKETS - 1


def _computed() -> list[int]:
    """The bucket of every length up to the last one's."""
    table = [0, 0]
    while table[-1] < BUCKETS - 1:  # bucket 2 k begins at 2^k, bucket 2 k + 1 at 2^(k + 1/2)
        table.append((len(table) ** 2).bit_length() - 1)
    return table


_BUCKET = _computed()


def gains(chances: Sequence[float], length: int, most: int) -> list[float]:
    """Tokens that n tokens in a row are expected to add behind so long a match or streak.

    `chances` are by bucket; n is 0, 1, ..., `most`.

    >>> gains([0.5] * BUCKETS, 1, 3)
    [0.0, 0.5, 0.75, 0.875]
    """
    buckets = _BUCKET[length : length + most]
    buckets += [BUCKETS - 1] * (most - len(buckets))
    expected, survives, found = 0.0, 1.0, [0.0]
    for at in buckets:
        survives *= chances[at]
        expected += survives
        found.append(expected)
    return found


class AcceptanceStats:
    """Success counts by bucket, with a prior, and old looks counting less.

    >>> odds = AcceptanceStats([0.5] * BUCKETS, strength=2)
    >>> odds.saw(0, kept=True)
    >>> round(odds.chance(0), 2), odds.chance(1)
    (0.67, 0.5)
    """

    __slots__ = ("_kept", "_seen", "chances", "forget")

    def __init__(
        self, prior: Sequence[float], strength: float = STRENGTH, forget: float = FORGET
    ) -> None:
        self._kept = [chance * strength for chance in prior]
        self._seen = [strength] * len(prior)
        self.chances = list(prior)  #: by bucket
        self.forget = forget

    def chance(self, at: int) -> float:
        """The chance in this bucket."""
        return self.chances[at]

    def saw(self, at: int, kept: float) -> None:
        """A token of this bucket was verified, or something of this worth was seen."""
        kept = self._kept[at] = self._kept[at] * self.forget + kept
        seen = self._seen[at] = self._seen[at] * self.forget + 1
        self.chances[at] = kept / seen

    def copy(self) -> "AcceptanceStats":
        """The same, to be continued apart."""
        other = AcceptanceStats((), 0, self.forget)
        other._kept, other._seen = self._kept.copy(), self._seen.copy()
        other.chances = self.chances.copy()
        return other
