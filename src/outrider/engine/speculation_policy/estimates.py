"""What a planner remembers of one row: how its drafts fared, and how fast it has been."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from outrider.engine.speculation_policy.prices import StepPrices
from outrider.engine.speculation_policy.protocol import PlannedRow
from outrider.stats import BUCKETS, FORGET, AcceptanceStats, bucket, gains
from outrider.types import PLAIN, DraftShape

LEVEL, LOOKS = 0.6, 5.0  #: a weak guess of any draft's chance, and the looks that it is worth
BASE = 40.0  #: looks that a row's level is worth beside those of a bucket
#: How much nearer to certain a token is by the tokens kept in a row before it, by bucket.
RISE = tuple(0.3 * min(at, 8) / 8 for at in range(BUCKETS))
SUPPLY = 2.0  #: steps for which a drafter is believed to find something whenever it is asked
FIRST, LONGEST = 8, 64  #: plain steps between two looks at a draft, doubled while in vain
RISK = 0.02  #: what a look may be expected to lose, of the plain steps that it was waited for
WORST = 0.03  #: of a request, that a look may lose it where a prompt is read for that
RECALLED, FEWEST = 16, 3  #: requests whose lengths are remembered, and that show what is usual
VAIN = 8  #: times as much credit, at most, that a look needs behind others that were in vain
BET = 0.15  #: plain steps that a draft may be expected to lose where the row's brought nothing
SUREST = 0.9  #: no copy is taken to be surer: a list that goes on alike ends, too
FORETOLD = 2.0  #: tokens for which a drafter that foresees is believed
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


class ReadingCredit:
    """What looks may cost where a draft model has to read a prompt before it can be looked at.

    Plain steps of all requests earn it, so that finding out costs `RISK` of them; it doubles with
    every look that was in vain. No request pays more than `WORST` of what it writes: of what it has
    written by then, or of what three of four of the last `RECALLED` requests wrote.

    >>> credit = ReadingCredit()
    >>> credit.spend(12.0, 512), credit.earn(700), credit.spend(12.0, 192), credit.spend(12.0, 512)
    (False, None, False, True)
    >>> credit.earn(700), credit.spend(12.0, 512), credit.earn(700), credit.spend(12.0, 512)
    (None, False, None, True)
    """

    __slots__ = ("_lengths", "_steps", "_vain")

    def __init__(self) -> None:
        self._steps, self._vain = 0.0, 1
        self._lengths: deque[int] = deque(maxlen=RECALLED)

    def earn(self, steps: float) -> None:
        """So many plain steps were made."""
        self._steps += steps

    def ended(self, tokens: int) -> None:
        """A request has written so many."""
        self._lengths.append(tokens)

    def writes(self, row: PlannedRow) -> int:
        """Tokens that a row writes in all, to count on: its budget may be larger than any text.

        >>> from outrider.engine.request import Request
        >>> row, credit = PlannedRow(0, Request([1, 2]), 12), ReadingCredit()
        >>> credit.writes(row), [credit.ended(n) for n in (90, 70, 80)], credit.writes(row)
        (10, [None, None, None], 70)
        """
        written, left = row.length - len(row.request.prompt), row.request.left(row.length)
        shows = len(self._lengths) >= FEWEST
        usual = sorted(self._lengths)[len(self._lengths) // 4] if shows else 0
        return max(written, usual if left is None else min(usual, written + left))

    def ahead(self, row: PlannedRow) -> float:
        """Tokens that a row is expected to write yet.

        As many as half of the last requests wrote; and one that has written much, or whatever the
        first ones are, as much again as it has written.

        >>> from outrider.engine.request import Request
        >>> row, credit = PlannedRow(0, Request([1, 2]), 12), ReadingCredit()
        >>> credit.ahead(row), [credit.ended(n) for n in (90, 70, 80)], credit.ahead(row)
        (10.0, [None, None, None], 70.0)
        """
        written, left = row.length - len(row.request.prompt), row.request.left(row.length)
        usual = median(self._lengths) if len(self._lengths) >= FEWEST else 0.0
        expected = max(float(written), usual - written)
        return float(expected if left is None else min(expected, left))

    def spend(self, loses: float, writes: float) -> bool:
        """Whether there may be a look now.

        loses   plain steps that it loses at most
        writes  plain steps that the request is sure to be worth
        """
        if loses > WORST * writes or loses * self._vain > RISK * self._steps:
            return False
        self._steps, self._vain = 0.0, min(2 * self._vain, VAIN)
        return True

    def paid(self) -> None:
        """Drafts are worth what is read for them."""
        self._vain = 1


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
        """A token behind such a streak was verified."""
        at = bucket(streak)
        self._level.saw(kept)
        self._kept[at] = self._kept[at] * FORGET + kept
        self._seen[at] = (self._seen[at] - BASE) * FORGET + 1 + BASE


POOLED = 0.998  #: what a look of any row counts for beside the next one


class SharedEstimates:
    """What rows have shown together: what is believed of each before it has shown anything.

    For rows whose texts do not depend on what is drafted: a batch knows after a step what one row
    learns in many, and a request what those before it have shown. Greedy and sampled rows have one
    each. `before` is what earlier
    runs have shown, which is worth no more than a few looks of this one, as texts differ.

    >>> earlier = SharedEstimates()
    >>> earlier.saw(False, 1, 0)
    >>> now = SharedEstimates(earlier)
    >>> now.levels[False] == earlier.levels[False] < now.levels[True] == LEVEL
    True
    """

    __slots__ = ("_before", "_found", "_level", "_looks")

    def __init__(self, before: "SharedEstimates | None" = None) -> None:
        levels, founds = (LEVEL, LEVEL), (1.0, 1.0)
        if before is not None:
            levels, founds = before.levels, before.supplies
        self._before = before
        self._looks = [0, 0]
        self._level = AcceptanceStats(levels, LOOKS, POOLED)
        self._found = AcceptanceStats(founds, LOOKS, POOLED)

    @property
    def levels(self) -> tuple[float, float]:
        """The chance that a drafted token is kept, of sampled and of greedy rows."""
        sampled, greedy = self._level.chances
        return sampled, greedy

    @property
    def supplies(self) -> tuple[float, float]:
        """The chance that there is a draft where one is asked for, of sampled and greedy rows."""
        sampled, greedy = self._found.chances
        return sampled, greedy

    def looks(self, greedy: bool) -> int:
        """Drafted tokens of such rows that were looked at, in earlier runs, too."""
        return self._looks[greedy] + (0 if self._before is None else self._before.looks(greedy))

    def saw(self, greedy: bool, depth: int, kept: int) -> None:
        """Of a draft so deep, so many levels were kept."""
        if self._before is None:  # it is told of all
            self._looks[greedy] += min(kept + 1, depth)
        for at in range(min(kept + 1, depth)):
            self._level.saw(greedy, at < kept)
        if self._before is not None:
            self._before.saw(greedy, depth, kept)

    def found(self, greedy: bool, any_draft: bool) -> None:
        """Whether there was a draft where one was asked for."""
        self._found.saw(greedy, any_draft)
        if self._before is not None:
            self._before.found(greedy, any_draft)


class RowMemory:
    """One row's odds, streak and speed. Nothing of another row enters it."""

    __slots__ = (
        "asked",
        "brought",
        "credit",
        "expected",
        "found",
        "greedy",
        "streak",
        "streaks",
        "time",
        "tokens",
        "told",
        "vain",
        "wait",
    )

    def __init__(self, greedy: bool) -> None:
        self.greedy = greedy
        self.streaks = MatchStreaks()
        self.streak = 1  #: drafted tokens kept since the last refusal
        self.found = AcceptanceEstimate(SUPPLY)  #: how often there is a draft if one is asked for
        #: What drafts were to bring of late by who foresees, what they brought, in tokens.
        self.expected, self.brought = FORETOLD, FORETOLD
        self.told: Sequence[float] = ()  #: what is foreseen for the step under way
        self.credit = 0.0  #: what drafts have brought, and `RISK` of all steps, in plain steps
        self.tokens, self.time = 1.0, 1.0  #: recent ones, and plain steps as long as they took
        self.wait, self.vain = Backoff(), 0  #: steps of late for which nothing paid
        self.asked = PLAIN  #: for the step under way, where every row is planned by itself

    @property
    def speed(self) -> float:
        """Tokens in the time of a plain step: its own of late, or what plain decoding makes."""
        return max(1.0, self.tokens / self.time)

    def gains(
        self, row: PlannedRow, drafts: Sequence[DraftShape], deepest: int, level: float = LEVEL
    ) -> list[float]:
        """Tokens that each draft is expected to add, no more than the row has room for."""
        left = row.request.left(row.length)
        room = deepest if left is None else max(left - 1, 0)
        if row.foresee is not None:
            self.told = told = row.foresee()
            last, holds = len(told) - 1, self.brought / self.expected
            return [min(holds * told[min(shape.max_nodes - 1, last)], room) for shape in drafts]
        by_depth = self.streaks.gains(self.streak, min(deepest, room), level)
        last = len(by_depth) - 1
        return [by_depth[min(shape.max_depth, last)] for shape in drafts]

    def worth(self, row: PlannedRow, drafts: Sequence[DraftShape], prices: StepPrices) -> int:
        """Of drafts that are foreseen for a row alone the one that is worth most, -1 for none.

        It may take longer than a plain step by what drafts have brought this row, and by so much
        that losing it costs `BET` as is expected: one and a half steps for a copy of which nine in
        ten are right, a fifth of one for a guess. So a text that refuses all of them loses little,
        and one that repeats itself is copied at once. No node is looked for that costs more than it
        can be worth.
        """
        assert row.foresee is not None
        left, deepest = row.request.left(row.length), drafts[-1].max_nodes - 1
        room = deepest if left is None else max(left - 1, 0)
        rate, holds = self.speed / prices.plain, self.brought / self.expected
        told, least, dared = [0.0], rate * prices.node, 0.0
        self.told = told
        for nodes, gain in enumerate(row.foresee()):
            if nodes == 1:
                chance = min(holds * gain, SUREST)
                dared = prices.plain * (self.credit + BET / (1 - chance))
                if prices.more[0] > dared:
                    return -1
            if nodes:
                told.append(gain)
                if nodes >= deepest or holds * (gain - told[-2]) < least:
                    break
        best, most, last = -1, 0.0, len(told) - 1
        for at, (shape, more) in enumerate(zip(drafts, prices.more, strict=True)):
            nodes = min(shape.max_nodes - 1, last)
            worth = min(holds * told[nodes], room) - rate * more
            if worth > most and more <= dared:
                best, most = at, worth
            if nodes == last:
                break
        return best

    def supply(self, row: PlannedRow, believed: float) -> float:
        """The chance that its drafter finds something, if it is asked; 1 for one that foresees."""
        return self.found.chance(believed) if row.foresee is None else 1.0

    def saw(self, depth: int, kept: int) -> None:
        """Of a draft so deep, so many levels were kept."""
        for at in range(min(kept + 1, depth)):
            self.streaks.saw(self.streak + at, at < kept)
        self.streak = self.streak + kept if kept == depth else 1

    def emitted(self, tokens: int, plain_steps: float, drafted: int) -> None:
        """A step with so many nodes drafted that took as long as so many plain ones."""
        fade = _FADE**tokens
        if tokens > 1:
            self.vain = 0
        if drafted and self.told:  # the best of many guesses is seldom as good as it looks
            told = self.told[min(drafted, len(self.told) - 1)]
            self.expected += told
            self.brought += tokens - 1
        self.expected = FORETOLD + (self.expected - FORETOLD) * fade
        self.brought = FORETOLD + (self.brought - FORETOLD) * fade
        self.credit += tokens - (1 - RISK) * plain_steps
        self.tokens = self.tokens * fade + tokens
        self.time = self.time * fade + plain_steps
