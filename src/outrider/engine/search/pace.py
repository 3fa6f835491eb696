"""How far ahead a beam search should score: as far as it pays, by what its own calls have shown.

A call that scores d steps ahead answers between one and d + 1 steps, and then a step comes that was
not foreseen. With less ahead the same steps would have taken several calls: so a few deep calls
tell what every smaller depth is worth, and the clock tells what it costs. The beams do not depend
on it.
"""

from collections import Counter
from dataclasses import dataclass, field
from statistics import median

PROBES = 2  #: calls ahead, and calls with nothing ahead, before anything is decided
FIRST = 2  #: steps ahead of such calls: what is beyond is taken to be as likely
AGAIN = 32  #: calls between two such probes later on
LATEST = 256  #: the most calls between them: each pair that changes nothing doubles the time
KEPT = 64  #: calls that are remembered
TIMED = 9  #: calls of each depth whose times are
GAIN = 0.97  #: scoring ahead has to take less than this share of a step's time without it
DRIFT = 1.02  #: the least time of a further step counts for so much more with every later one


@dataclass
class Pace:
    """Chooses a depth for every call. It may go on from one search to the next.

    most    the deepest that a proposer goes
    adapts  whether it chooses; if not, every call goes the deepest

    >>> pace = Pace(2)
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
    chosen: int = 0  #: the depth whose steps take the least time; 0 as long as nothing is known
    calls: int = 0
    pause: int = AGAIN  #: calls between the last probes and the next
    due: int = AGAIN + 2  #: calls up to the last of the next probes

    def depth(self) -> int:
        """How many steps ahead the next call scores."""
        if self.most == 0 or not self.adapts:
            return self.most
        probe = min(self.most, FIRST)
        if self.calls < 2 * PROBES:
            return self.calls % 2 * probe
        if self.due == 2:
            return self.chosen or probe
        return 0 if self.due == 1 else self.chosen

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

    def learn(self, depth: int, steps: int, seconds: float, further: float = 0.0) -> None:
        """A call that scored `depth` steps ahead answered so many, and took this long.

        With all of its steps, that is; each of them but the first took `further` seconds.
        """
        self.calls += 1
        if depth:
            self.answered = [*self.answered[1 - KEPT :], (depth, steps)]
        if further:
            self.further = min(DRIFT * (self.further or further), further)
        alone = seconds - (steps - 1) * further
        self.cost[depth] = [*self.cost.get(depth, [])[1 - TIMED :], alone]
        before, probed = self.chosen, self.due == 1
        if depth or probed:
            self.chosen = self._choice()
        if self.calls <= 2 * PROBES:
            return
        self.due -= 1
        if self.chosen != before:
            self.pause = AGAIN
            self.due = min(self.due, AGAIN + 2)
        elif probed:
            self.pause = min(2 * self.pause, LATEST)
        if probed:
            self.due = self.pause + 2

    def _choice(self) -> int:
        """The depth whose steps take the least time, if ahead is worth more than a doubt."""
        prices = [self.price(depth) for depth in range(self.most + 1)]
        best = min(range(self.most + 1), key=prices.__getitem__)
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
        return (took + (steps - 1) * self.further) / steps
