"""What a planner remembers of one row: how its drafts fared, and how fast it has been."""

from collections.abc import Sequence

from outrider.acceptance_stats import BUCKETS, FORGET, bucket, gains
from outrider.engine.speculation_policy.protocol import PlannedRow
from outrider.types import PLAIN, DraftShape

LEVEL, LOOKS = 0.6, 5.0  #: a weak guess of any draft's chance, and the looks that it is worth
BASE = 40.0  #: looks that a row's level is worth beside those of a bucket
#: How much nearer to certain a token is by the tokens kept in a row before it, by bucket.
RISE = tuple(0.3 * min(at, 8) / 8 for at in range(BUCKETS))
SUPPLY = 2.0  #: steps for which a drafter is believed to find something whenever it is asked
FIRST, LONGEST = 8, 64  #: plain steps between two looks at a draft, doubled while in vain
RISK = 0.02  #: what a look may be expected to lose, of the plain steps that it was waited for
_FADE = 0.985  #: what a token counts for in a row's speed beside the next one


class Backoff:
    """Plain steps until a draft that does not pay is looked at again: 8, 16, 32, 64, 64, ...

    >>> wait = Backoff()
    >>> [step for step in range(60) if wait.over()]
    [7, 23, 55]
    >>> wait = Backoff()
    >>> [step for step in range(60) if wait.over(loses=0.5)]
    [24, 49]
    """

    __slots__ = ("_length", "_waited")

    def __init__(self) -> None:
        self._waited, self._length = 0, FIRST

    def over(self, loses: float = 0.0) -> bool:
        """Count a plain step; whether a draft is due in its place.

        loses  plain steps that it is expected to lose
        """
        self._waited += 1
        if self._waited < max(self._length, loses / RISK):
            return False
        self._waited, self._length = 0, min(2 * self._length, LONGEST)
        return True

    def reset(self) -> None:
        """Drafts pay."""
        self._waited, self._length = 0, FIRST


class AcceptanceEstimate:
    """A chance that leans on what is believed ahead of the first look, less with every look.

    >>> chance = AcceptanceEstimate(1.0)
    >>> chance.saw(True)
    >>> round(chance.chance(0.5), 2), round(chance.chance(0.1), 2)
    (0.75, 0.55)
    """

    __slots__ = ("_kept", "_left", "_seen")

    def __init__(self, strength: float) -> None:
        self._kept, self._seen, self._left = 0.0, 0.0, strength

    def chance(self, believed: float) -> float:
        """The chance, by what was looked at and this belief."""
        return (self._kept + self._left * believed) / (self._seen + self._left)

    def saw(self, kept: bool) -> None:
        """A look."""
        self._kept = self._kept * FORGET + kept
        self._seen = self._seen * FORGET + 1
        self._left *= FORGET


class MatchStreaks:
    """Chances that the next drafted token is kept, by how many were kept in a row before it.

    A level is learnt from all looks, and each bucket from its own, beginning at what the level lets
    expect: so a bad draft's long streaks, which nobody has seen, are not taken for good.

    >>> streaks = MatchStreaks()
    >>> before = streaks.gains(1, 4)[4]
    >>> for _ in range(3):
    ...     streaks.saw(1, False)
    >>> streaks.gains(1, 4)[4] < before
    True
    """

    __slots__ = ("_kept", "_level", "_seen")

    def __init__(self) -> None:
        self._level = AcceptanceEstimate(LOOKS)
        self._kept, self._seen = [0.0] * BUCKETS, [BASE] * BUCKETS

    def gains(self, streak: int, most: int, level: float = LEVEL) -> list[float]:
        """Tokens that n drafted ones are expected to add behind such a streak, n = 0 to `most`.

        `level` is what is believed of a row that has shown nothing.
        """
        level = self._level.chance(level)
        rest = BASE * level * (1 - level)
        level *= BASE
        parts = zip(self._kept, self._seen, RISE, strict=True)
        chances = [(kept + level + rest * rise) / seen for kept, seen, rise in parts]
        return gains(chances, streak, most)

    def saw(self, streak: int, kept: bool) -> None:
        """A token behind such a streak was judged."""
        at = bucket(streak)
        self._level.saw(kept)
        self._kept[at] = self._kept[at] * FORGET + kept
        self._seen[at] = (self._seen[at] - BASE) * FORGET + 1 + BASE


class RowMemory:
    """One row's odds, streak and speed. Nothing of another row enters it."""

    __slots__ = ("asked", "found", "greedy", "streak", "streaks", "time", "tokens", "wait")

    def __init__(self, greedy: bool) -> None:
        self.greedy = greedy
        self.streaks = MatchStreaks()
        self.streak = 1  #: drafted tokens kept since the last refusal
        self.found = AcceptanceEstimate(
            SUPPLY
        )  #: how often there is a draft where one is asked for
        self.tokens, self.time = 1.0, 1.0  #: recent ones, and plain steps as long as they took
        self.wait = Backoff()
        self.asked = PLAIN  #: for the step under way, where every row is planned by itself

    @property
    def speed(self) -> float:
        """Tokens in the time of a plain step: its own of late, or what plain decoding makes."""
        return max(1.0, self.tokens / self.time)

    def gains(
        self, row: PlannedRow, drafts: Sequence[DraftShape], deepest: int, level: float = LEVEL
    ) -> list[float]:
        """Tokens that each draft is expected to add, no more than the row has room for."""
        left = row.left
        room = deepest if left is None else max(left - 1, 0)
        if row.foresee is not None:
            told = row.foresee()
            last = len(told) - 1
            return [min(told[min(shape.max_nodes - 1, last)], room) for shape in drafts]
        by_depth = self.streaks.gains(self.streak, min(deepest, room), level)
        last = len(by_depth) - 1
        return [by_depth[min(shape.max_depth, last)] for shape in drafts]

    def supply(self, row: PlannedRow, believed: float) -> float:
        """The chance that its drafter finds something, if it is asked; 1 for one that foresees."""
        return self.found.chance(believed) if row.foresee is None else 1.0

    def saw(self, depth: int, kept: int) -> None:
        """Of a draft so deep, so many levels were kept."""
        for at in range(min(kept + 1, depth)):
            self.streaks.saw(self.streak + at, at < kept)
        self.streak = self.streak + kept if kept == depth else 1

    def emitted(self, tokens: int, plain_steps: float) -> None:
        """A step that took as long as so many plain ones."""
        fade = _FADE**tokens
        self.tokens = self.tokens * fade + tokens
        self.time = self.time * fade + plain_steps
