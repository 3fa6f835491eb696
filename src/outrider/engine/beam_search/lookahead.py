"""How far ahead a beam search should score: as far as it pays, by what its own calls have shown.

A call that scores d steps ahead answers between one and d + 1 steps, and then a step comes that was
not foreseen. With less ahead the same steps would have taken several calls: so a few deep calls
tell what every smaller depth is worth, and the clock tells what it costs. Where nothing ahead pays,
it is tried now and then, as long as that has cost no more than a share of the time in all. The
beams do not depend on it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

FIRST = 1  #: steps ahead in a trial: what is beyond is taken to be as likely
AGAIN = 8  #: calls between two trials
LATEST = 256  #: the most calls between two of nothing ahead: each that changes nothing doubles them
SHARE = 0.01  #: of all time, that may be lost before something ahead is tried again, and one call's
KEPT = 16  #: calls ahead that a choice rests on: texts differ, and so do parts of one
TIMED = 9  #: calls of each depth whose times are
GAIN = 0.97  #: scoring ahead has to take less than this share of a step's time without it
DRIFT = 1.02  #: the least time of a further step counts for so much more with every later one


@dataclass
class LookaheadDepth:
    """Chooses a depth for every call. It may go on from one search to the next.

    most    the deepest that a proposer goes
    adapts  whether it chooses; if not, every call goes the deepest

    >>> pace = LookaheadDepth(2)
    >>> for _ in range(40):
    ...     depth = pace.depth()
    ...     pace.learn(depth, 1, 2.0 if depth else 1.0)   # never right, and twice as dear
    >>> pace.chosen
    0
    """

    most: int
    adapts: bool = True
    answered: list[tuple[int, int]] = field(default_factory=list)  #: depth and steps of calls
    cost: dict[int, list[float]] = field(default_factory=dict)  #: seconds of calls, by depth
    further: float = 0.0  #: seconds of every step that a call answers beyond its first
    ready: float = 0.0  #: seconds that a search takes before its first call ahead
    chosen: int = 0  #: the depth whose steps take the least time; 0 as long as nothing is known
    calls: int = 0
    steps: int = 0  #: of a row, in all searches
    searches: int = 0
    length: float = 1.0  #: steps that a search is thought to take
    spent: float = 0.0  #: seconds of all calls
    lost: float = 0.0  #: those that calls ahead took beyond what their steps take without
    trial: float = 0.0  #: what the last trial of something ahead lost, once it was ready
    pause: int = AGAIN  #: calls between the last trial and the next
    due: int = 1  #: calls up to the next

    def begin(self, budget: int) -> None:
        """Another search begins, of at most so many steps: as many as the others, if any were."""
        self.length = max(self.steps / self.searches if self.searches else budget, 1.0)
        self.searches += 1

    def depth(self, ready: bool = True) -> int:
        """How many steps ahead the next call scores, if the search is `ready` for that or not."""
        if self.most == 0 or not self.adapts:
            return self.most
        if self.chosen:
            return self.chosen if self.due > 0 else 0
        return min(self.most, FIRST) if self.due <= 0 and self._affordable(ready) else 0

    def _affordable(self, ready: bool) -> bool:
        """Whether one more trial of something ahead may be lost."""
        more = self.trial if ready else self.trial + self.ready
        return self.lost + more <= SHARE * self.spent + median(self.cost[0])

    def expected(self, depth: int) -> float:
        """Steps that a call answers with this depth, by the calls remembered.

        Of calls that went as deep: a run of n steps takes ceil(n / (depth + 1)) calls, and
        n / (depth + 1) if no step was wrong in it: it goes on in the next call. What is deeper
        than any of them is taken to be as likely, step by step, as what was seen.
        """
        seen = Counter(self.answered)
        deepest = min(max((most for most, _ in seen), default=0), depth)
        runs = {key: count for key, count in seen.items() if key[0] >= deepest}
        if not runs:
            return 1.0 + depth
        total = sum(steps * count for (_, steps), count in runs.items())
        wide = deepest + 1
        calls = sum(
            (n / wide if n > most else -(-n // wide)) * count for (most, n), count in runs.items()
        )
        expected = total / calls
        alive = sum(count for (_, n), count in runs.items() if n > deepest) / sum(runs.values())
        share = alive ** (1 / max(deepest, 1))
        return float(expected + sum(alive * share**more for more in range(1, depth - deepest + 1)))

    def learn(
        self, depth: int, steps: int, seconds: float, further: float = 0.0, ready: float = 0.0
    ) -> None:
        """A call that scored `depth` steps ahead answered so many, and took this long.

        With all of its steps, that is; each of them but the first took `further` seconds. Before it
        the search took `ready` seconds for all of its calls ahead.
        """
        self.calls += 1
        self.steps += steps
        self.spent += seconds + ready
        if depth:
            kept = self.answered[1 - KEPT :] if self.adapts else self.answered
            self.answered = [*kept, (depth, steps)]
        if further:
            self.further = min(DRIFT * (self.further or further), further)
        if ready:
            self.ready = ready
        alone = seconds - (steps - 1) * further
        self.cost[depth] = [*self.cost.get(depth, [])[1 - TIMED :], alone]
        before, tried = self.chosen, bool(depth) is not bool(self.chosen)
        loss = seconds - steps * median(self.cost.get(0, [0.0]))
        if tried and depth:
            self.trial = loss
        if depth:
            self.lost = max(self.lost + loss + ready, 0.0)
        if depth or tried:
            self.chosen = self._choice()
        if self.chosen != before:
            self.pause = AGAIN
        elif tried and before:
            self.pause = min(2 * self.pause, LATEST)
        self.due = self.pause if tried or self.chosen != before else self.due - 1

    def _choice(self) -> int:
        """The depth whose steps take the least time, if ahead is worth more than a doubt.

        No more than one step beyond the deepest that was tried: its cost is a guess.
        """
        prices = [self.price(depth) for depth in range(min(self.most, max(self.cost) + 1) + 1)]
        best = min(range(len(prices)), key=prices.__getitem__)
        return best if prices[best] < GAIN * prices[0] else 0

    def price(self, depth: int) -> float:
        """Seconds of a step, by the median time of the last such calls, or of calls like them.

        What another process delays is left out by it, as long as that is less than half of them.
        """
        known = sorted(self.cost)
        low = max((d for d in known if d <= depth), default=None)
        high = min((d for d in known if d >= depth), default=None)
        if low is None or high is None:  # on the line through the outermost two
            low, high = (known * 2)[:2] if low is None else (known * 2)[-2:]
        took = median(self.cost[low])
        if high != low:
            took += (median(self.cost[high]) - took) * (depth - low) / (high - low)
        steps = self.expected(depth)
        took = (took + (steps - 1) * self.further) / steps
        if depth:  # what a search takes once, by its usual steps
            took += self.ready / self.length
        return took


class LookaheadDepths:
    """What the searches of an engine have learned, for its next ones.

    >>> paces = LookaheadDepths()
    >>> with paces.lent(4, beams=5, rows=1) as pace:
    ...     pace.learn(0, 1, 0.01)
    >>> with paces.lent(4, beams=5, rows=1) as pace:
    ...     pace.calls
    1
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], LookaheadDepth] = {}

    @contextmanager
    def lent(self, most: int, beams: int, rows: int) -> Iterator[LookaheadDepth]:
        """That of searches of as many beams and rows, which nobody else has meanwhile."""
        key = most, beams, rows
        pace = self._kept.pop(key, None) or LookaheadDepth(most)
        yield pace
        self._kept[key] = pace
