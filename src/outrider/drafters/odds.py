"""How often guesses of each kind came true: counts that start from a prior and fade."""

from collections.abc import Sequence


class Odds:
    """The chance of success in each bucket, estimated from trials of which old ones count less.

    prior   chances before anything is known
    weight  how many trials that is worth
    keep    what a trial counts for after another one in its bucket

    >>> odds = Odds([0.5], weight=2, keep=1.0)
    >>> odds.learn(0, True)
    >>> round(odds.chances[0], 3)
    0.667
    """

    __slots__ = ("_hits", "_keep", "_tries", "chances")

    def __init__(self, prior: Sequence[float], weight: float, keep: float) -> None:
        self.chances = list(prior)
        self._hits = [chance * weight for chance in prior]
        self._tries = [weight] * len(prior)
        self._keep = keep

    def learn(self, bucket: int, success: bool) -> None:
        """One trial."""
        tries = self._tries[bucket] = self._tries[bucket] * self._keep + 1
        hits = self._hits[bucket] = self._hits[bucket] * self._keep + success
        self.chances[bucket] = hits / tries

    def copy(self) -> "Odds":
        """The same, to be continued apart."""
        other = Odds((), 0, self._keep)
        other.chances = self.chances.copy()
        other._hits, other._tries = self._hits.copy(), self._tries.copy()
        return other
