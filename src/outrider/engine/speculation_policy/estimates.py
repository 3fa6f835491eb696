"""What a planner remembers of one row: how its drafts fared, and how fast it has been."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from outrider.engine.speculation_policy.protocol import PlannedRow
from outrider.stats import BUCKET_OF, BUCKETS, FORGET, LAST, AcceptanceStats
from outrider.types import PLAIN, DraftShape

LEVEL, LOOKS = 0.6, 5.0  #: a weak guess of any draft's chance, and the looks that it is worth
BASE = 40.0  #: looks that a row's level is worth beside those of a bucket
#: How much nearer to certain a token is by the tokens kept in a row before it, by bucket.
RISE = tuple(0.3 * min(at, 8) / 8 for at in range(BUCKETS))
HIT_LOOKS = 2.0  #: steps for which a drafter is believed to find something whenever it is asked
FIRST, LONGEST = 8, 64  #: plain steps between two looks at a draft, doubled while in vain
RISK = 0.02  #: what a look may be expected to lose, of the plain steps that it was waited for
WORST = 0.03  #: of a request, that a look may lose it where a prompt is read for that
RECALLED, FEWEST = 16, 3  #: requests whose lengths are remembered, and that show what is usual
VAIN = 8  #: times as much budget, at most, that a look needs behind others that were in vain
#: Of all steps, what drafts that are foreseen may lose a row beside what they brought.
SPARED = 0.01
BET = 0.15  #: plain steps that a draft may be expected to lose where the row's brought nothing
SUREST = 0.9  #: no copy is taken to be surer: a list that goes on alike ends, too
FORETOLD = 2.0  #: tokens for which a drafter that foresees is believed
_FADE = 0.985  #: what a token counts for in a row's speed beside the next one


@dataclass(slots=True)
class Backoff:
    """Plain steps until a draft that does not pay is looked at again: 8, 16, 32, 64, 64, ...

    >>> wait = Backoff()
    >>> [step for step in range(60) if wait.over()]
    [7, 23, 55]
    >>> wait = Backoff()
    >>> [step for step in range(60) if wait.over(loses=0.5)]
    [24, 49]
    """

    _waited: int = 0
    _length: int = FIRST

    def over(self, loses: float = 0.0) -> bool:
        """Count a plain step; whether a draft is due in its place.

        loses  plain steps that it is expected to lose
        """
        self._waited += 1
        if self._waited < max(self._length, loses / RISK):
            return False
        self._waited, self._length = 0, min(2 * self._length, LONGEST)
        return True


@dataclass(slots=True)
class ReadingBudget:
    """What looks may cost where a draft model has to read a prompt before it can be looked at.

    Plain steps of all requests earn it, so that finding out costs `RISK` of them; it doubles with
    every look that was in vain. No request pays more than `WORST` of what it writes: of what it has
    written by then, or of what three of four of the last `RECALLED` requests wrote.

    >>> budget = ReadingBudget()
    >>> budget.spend(12.0, 512)
    False
    >>> budget.steps += 700
    >>> budget.spend(12.0, 192), budget.spend(12.0, 512)
    (False, True)
    >>> budget.steps += 700
    >>> budget.spend(12.0, 512)
    False
    >>> budget.steps += 700
    >>> budget.spend(12.0, 512)
    True
    """

    steps: float = 0.0  #: plain ones since the last look
    vain: int = 1  #: what looks behind others that were in vain need more; 1 once drafts pay
    #: what requests have written
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RECALLED))

    def writes(self, row: PlannedRow) -> int:
        """Tokens that a row writes in all, to count on: its budget may be larger than any text.

        >>> from outrider.engine.request import Request
        >>> row, budget = PlannedRow(0, Request([1, 2]), 12), ReadingBudget()
        >>> budget.writes(row), budget.lengths.extend([90, 70, 80]), budget.writes(row)
        (10, None, 70)
        """
        written, left = row.length - len(row.request.prompt), row.request.left(row.length)
        shows = len(self.lengths) >= FEWEST
        usual = sorted(self.lengths)[len(self.lengths) // 4] if shows else 0
        return max(written, usual if left is None else min(usual, written + left))

    def ahead(self, row: PlannedRow) -> float:
        """Tokens that a row is expected to write yet.

        As many as half of the last requests wrote; and one that has written much, or whatever the
        first ones are, as much again as it has written.

        >>> from outrider.engine.request import Request
        >>> row, budget = PlannedRow(0, Request([1, 2]), 12), ReadingBudget()
        >>> budget.ahead(row), budget.lengths.extend([90, 70, 80]), budget.ahead(row)
        (10.0, None, 70.0)
        """
        written, left = row.length - len(row.request.prompt), row.request.left(row.length)
        usual = median(self.lengths) if len(self.lengths) >= FEWEST else 0.0
        expected = max(float(written), usual - written)
        return float(expected if left is None else min(expected, left))

    def spend(self, loses: float, writes: float) -> bool:
        """Whether there may be a look now.

        loses   plain steps that it loses at most
        writes  plain steps that the request is sure to be worth
        """
        if loses > WORST * writes or loses * self.vain > RISK * self.steps:
            return False
        self.steps, self.vain = 0.0, min(2 * self.vain, VAIN)
        return True


@dataclass(slots=True)
class AcceptanceEstimate:
    """A chance that leans on what is believed ahead of the first look, less with every look.

    >>> chance = AcceptanceEstimate(1.0)
    >>> chance.observe(True)
    >>> round(chance.chance(0.5), 2), round(chance.chance(0.1), 2)
    (0.75, 0.55)
    """

    _left: float  #: looks that the belief is worth yet
    _kept: float = 0.0
    _seen: float = 0.0

    def chance(self, believed: float) -> float:
        """The chance, by what was looked at and this belief."""
        return (self._kept + self._left * believed) / (self._seen + self._left)

    def observe(self, kept: bool) -> None:
        """A look."""
        self._kept = self._kept * FORGET + kept
        self._seen = self._seen * FORGET + 1
        self._left *= FORGET


@dataclass(slots=True)
class MatchStreaks:
    """Chances that the next drafted token is kept, by how many were kept in a row before it.

    A level is learnt from all looks, and each bucket from its own, beginning at what the level lets
    expect: so a bad draft's long streaks, which nobody has seen, are not taken for good.

    >>> streaks = MatchStreaks()
    >>> before = streaks.gains(4)[4]
    >>> for _ in range(3):
    ...     streaks.observe(depth=4, kept=0)
    >>> streaks.gains(4)[4] < before
    True
    """

    streak: int = 1  #: drafted tokens kept since the last refusal
    _level: AcceptanceEstimate = field(default_factory=partial(AcceptanceEstimate, LOOKS))
    _kept: list[float] = field(default_factory=([0.0] * BUCKETS).copy)
    _seen: list[float] = field(default_factory=([BASE] * BUCKETS).copy)

    def gains(self, most: int, level: float = LEVEL) -> list[float]:
        """Tokens that n drafted ones are expected to add, n = 0 to `most`.

        `level` is what is believed of a row that has shown nothing.
        """
        level = self._level.chance(level)
        rest = BASE * level * (1 - level)
        level *= BASE
        expected, survives, gains = 0.0, 1.0, [0.0]
        for length in range(self.streak, self.streak + most):
            at = BUCKET_OF[min(length, LAST)]
            survives *= (self._kept[at] + level + rest * RISE[at]) / self._seen[at]
            expected += survives
            gains.append(expected)
        return gains

    def observe(self, depth: int, kept: int) -> None:
        """Of a draft so deep, so many levels were kept."""
        for level in range(min(kept + 1, depth)):
            at, right = BUCKET_OF[min(self.streak + level, LAST)], level < kept
            self._level.observe(right)
            self._kept[at] = self._kept[at] * FORGET + right
            self._seen[at] = (self._seen[at] - BASE) * FORGET + 1 + BASE
        self.streak = self.streak + kept if kept == depth else 1


POOLED = 0.998  #: what a look of any row counts for beside the next one


class SharedEstimates:
    """What rows have shown together: what is believed of each before it has shown anything.

    For rows whose texts do not depend on what is drafted: a batch knows after a step what one row
    learns in many, and a request what those before it have shown. Greedy and sampled rows have one
    each. `before` is what earlier runs have shown, which is worth no more than a few looks of this
    one, as texts differ.

    >>> earlier = SharedEstimates()
    >>> earlier.observe(False, 1, 0)
    >>> now = SharedEstimates(earlier)
    >>> now.level.chance(False) == earlier.level.chance(False) < now.level.chance(True) == LEVEL
    True
    """

    __slots__ = ("_before", "hit_rate", "level", "looks")

    def __init__(self, before: "SharedEstimates | None" = None) -> None:
        levels: Sequence[float] = (LEVEL, LEVEL)
        hit_rates: Sequence[float] = (1.0, 1.0)
        if before is not None:
            levels, hit_rates = before.level.chances, before.hit_rate.chances
        self._before = before
        #: Drafted tokens that were looked at, of sampled and of greedy rows, in earlier runs, too.
        self.looks: list[int] = [0, 0] if before is None else before.looks
        #: The chance that a drafted token is kept, of sampled and of greedy rows; and that there is
        #: a draft where one is asked for.
        self.level: AcceptanceStats = AcceptanceStats(levels, LOOKS, POOLED)
        self.hit_rate: AcceptanceStats = AcceptanceStats(hit_rates, LOOKS, POOLED)

    def observe(self, greedy: bool, depth: int, kept: int) -> None:
        """Of a draft so deep, 0 where there was none to be had, so many levels were kept."""
        self.hit_rate.observe(greedy, depth > 0)
        if self._before is None:  # it is told of all
            self.looks[greedy] += min(kept + 1, depth)
        for at in range(min(kept + 1, depth)):
            self.level.observe(greedy, at < kept)
        if self._before is not None:
            self._before.observe(greedy, depth, kept)


@dataclass(slots=True)
class RowMemory:
    """One row's odds and speed. Nothing of another row enters it."""

    greedy: bool
    streaks: MatchStreaks = field(default_factory=MatchStreaks)
    #: how often there is a draft if one is asked for
    hit_rate: AcceptanceEstimate = field(default_factory=partial(AcceptanceEstimate, HIT_LOOKS))
    expected: float = FORETOLD  #: what drafts were to bring of late by who foresees, in tokens
    brought: float = FORETOLD  #: and what they brought
    forecast: Sequence[float] = ()  #: what is foreseen for the step under way
    budget: float = 0.0  #: what drafts have brought, and `SPARED` of all steps, in plain steps
    tokens: float = 1.0  #: recent ones
    time: float = 1.0  #: plain steps as long as they took
    speed: float = 1.0  #: tokens in the time of a plain step: of late, or plain decoding's
    backoff: Backoff = field(default_factory=Backoff)
    vain: int = 0  #: steps of late for which nothing paid
    shape: DraftShape = PLAIN  #: for the step under way, where every row is planned by itself

    def gains(
        self, row: PlannedRow, drafts: Sequence[DraftShape], deepest: int, level: float = LEVEL
    ) -> list[float]:
        """Tokens that each draft is expected to add, no more than the row has room for."""
        left = row.request.left(row.length)
        room = deepest if left is None else max(left - 1, 0)
        if row.foresee is not None:
            self.forecast = forecast = row.foresee()
            last, holds = len(forecast) - 1, self.brought / self.expected
            return [min(holds * forecast[min(shape.max_nodes - 1, last)], room) for shape in drafts]
        by_depth = self.streaks.gains(min(deepest, room), level)
        last, gains = len(by_depth) - 1, []
        for shape in drafts:
            gains.append(by_depth[min(shape.max_depth, last)])
        return gains

    def hit_chance(self, row: PlannedRow, believed: float) -> float:
        """The chance that its drafter finds something, if it is asked; 1 for one that foresees."""
        return self.hit_rate.chance(believed) if row.foresee is None else 1.0

    def observe(self, tokens: int, plain_steps: float, drafted: int) -> None:
        """A step with so many nodes drafted that took as long as so many plain ones."""
        fade = _FADE**tokens
        if tokens > 1:
            self.vain = 0
        if drafted and self.forecast:  # the best of many guesses is seldom as good as it looks
            last = len(self.forecast) - 1
            self.expected += self.forecast[min(drafted, last)]
            self.brought += tokens - 1
        self.expected = FORETOLD + (self.expected - FORETOLD) * fade
        self.brought = FORETOLD + (self.brought - FORETOLD) * fade
        self.budget += tokens - (1 - SPARED) * plain_steps
        self.tokens = self.tokens * fade + tokens
        self.time = self.time * fade + plain_steps
        self.speed = max(1.0, self.tokens / self.time)
