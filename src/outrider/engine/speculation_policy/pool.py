"""What the rows of a batch show together, where no text depends on what is drafted."""

from outrider.acceptance_stats import AcceptanceStats
from outrider.engine.speculation_policy.memory import LEVEL, LOOKS

POOLED = 0.998  #: what a look of any row counts for beside the next one


class SharedEstimates:
    """What rows have shown together: what is believed of each before it has shown anything.

    For rows whose texts do not depend on what is drafted, beside others: a batch knows after a step
    what one row learns in many. Greedy and sampled rows have one each. `before` is what earlier
    runs have shown, which is worth no more than a few looks of this one, as texts differ.

    >>> earlier = SharedEstimates()
    >>> earlier.saw(False, 1, 0)
    >>> now = SharedEstimates(earlier)
    >>> now.levels[False] == earlier.levels[False] < now.levels[True] == LEVEL
    True
    """

    __slots__ = ("_before", "_found", "_level")

    def __init__(self, before: "SharedEstimates | None" = None) -> None:
        levels, founds = (LEVEL, LEVEL), (1.0, 1.0)
        if before is not None:
            levels, founds = before.levels, before.supplies
        self._before = before
        self._level = AcceptanceStats(levels, LOOKS, POOLED)
        self._found = AcceptanceStats(founds, LOOKS, POOLED)

    @property
    def levels(self) -> tuple[float, float]:
        """The chance that a drafted token is kept, of sampled and of greedy rows."""
        return self._level.chance(False), self._level.chance(True)

    @property
    def supplies(self) -> tuple[float, float]:
        """The chance that there is a draft where one is asked for, of sampled and greedy rows."""
        return self._found.chance(False), self._found.chance(True)

    def saw(self, greedy: bool, depth: int, kept: int) -> None:
        """Of a draft so deep, so many levels were kept."""
        for at in range(min(kept + 1, depth)):
            self._level.saw(greedy, at < kept)
        if self._before is not None:
            self._before.saw(greedy, depth, kept)

    def found(self, greedy: bool, any_draft: bool) -> None:
        """Whether there was a draft where one was asked for."""
        self._found.saw(greedy, any_draft)
        if self._before is not None:
            self._before.found(greedy, any_draft)
