"""How far ahead a beam search should score: as far as it pays, by what its own calls have shown.

A call that scores d steps ahead answers between one and d + 1 steps, and then a step comes that was
not foreseen. With less ahead the same steps would have taken several calls: so a few deep calls
tell what every smaller depth is worth, and the clock tells what it costs. The beams do not depend
on it.
"""

from dataclasses import dataclass, field

PROBES = 2  #: calls ahead, and calls with nothing ahead, before anything is decided
FIRST = 2  #: steps ahead of such calls: what is beyond is taken to be as likely
AGAIN = 32  #: calls between two such probes later on
KEPT = 64  #: calls that are remembered
GAIN = 0.97  #: scoring ahead has to take less than this share of a step's time without it


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
    cost: dict[int, float] = field(default_factory=dict)  #: seconds of a call, by depth
    calls: int = 0

    def depth(self) -> int:
        """How many steps ahead the next call scores."""
        if self.most == 0 or not self.adapts:
            return self.most
        probe = min(self.most, FIRST)
        if self.calls < 2 * PROBES:
            return self.calls % 2 * probe
        chosen = self.chosen
        since = (self.calls - 2 * PROBES) % (AGAIN + 2)
        if since == AGAIN:
            return chosen or probe
        return 0 if since == AGAIN + 1 else chosen

    @property
    def chosen(self) -> int:
        """The depth whose steps take the least time; 0 as long as nothing is known."""
        if not self.cost:
            return 0
        prices = [self.price(depth) for depth in range(self.most + 1)]
        best = min(range(self.most + 1), key=prices.__getitem__)
        return best if prices[best] < GAIN * prices[0] else 0

    def expected(self, depth: int) -> float:
        """Steps that a call answers with this depth, by the calls remembered.

        Of calls that went as deep: a run of n steps takes ceil(n / (depth + 1)) calls. What is
        deeper than any of them is taken to be as likely, step by step, as what was seen.
        """
        deepest = min(max((most for most, _ in self.answered), default=0), depth)
        runs = [steps for most, steps in self.answered if most >= deepest]
        if not runs:
            return 1.0 + depth
        expected = sum(runs) / sum(-(-steps // (deepest + 1)) for steps in runs)
        alive = sum(steps > deepest for steps in runs) / len(runs)
        share = alive ** (1 / max(deepest, 1))
        return float(expected + sum(alive * share**more for more in range(1, depth - deepest + 1)))

    def learn(self, depth: int, steps: int, seconds: float) -> None:
        """A call that scored `depth` steps ahead answered so many, and took this long."""
        self.calls += 1
        if depth:
            self.answered = [*self.answered[1 - KEPT :], (depth, steps)]
        known = self.cost.get(depth)
        self.cost[depth] = seconds if known is None else min(known * 1.02, seconds)

    def price(self, depth: int) -> float:
        """Seconds of a step, by the least time that such calls took, or calls like them.

        The least is what the work takes; more is another process's doing.
        """
        known = sorted(self.cost)
        low = max((d for d in known if d <= depth), default=None)
        high = min((d for d in known if d >= depth), default=None)
        if low is None or high is None:  # on the line through the outermost two
            low, high = (known * 2)[:2] if low is None else (known * 2)[-2:]
        took = self.cost[low]
        if high != low:
            took += (self.cost[high] - took) * (depth - low) / (high - low)
        return took / self.expected(depth)
