"""How far ahead a beam search should score: as far as it pays, by what its own calls have shown.

A call that scores d steps ahead answers between one and d + 1 steps. How many it would have
answered with less is known from it too: no more than that, plus one. So a few deep calls tell what
every smaller depth is worth, and the clock tells what it costs. The beams do not depend on it.
"""

from dataclasses import dataclass, field

PROBES = 6  #: deep calls, and calls with nothing ahead, before anything is decided
AGAIN = 32  #: calls between two such probes later on
KEPT = 64  #: deep calls that are remembered
GAIN = 0.97  #: scoring ahead has to take less than this share of a step's time without it


@dataclass
class Pace:
    """Chooses a depth for every call.

    most    the deepest that a proposer goes
    adapts  whether it chooses; if not, every call goes the deepest

    >>> pace = Pace(2)
    >>> for _ in range(40):
    ...     depth = pace.depth()
    ...     pace.learn(depth, 1, 2.0 if depth else 1.0)   # never right, and twice as dear
    >>> pace.depth()
    0
    """

    most: int
    adapts: bool = True
    steps: list[int] = field(default_factory=list)  #: that each deep call answered
    cost: dict[int, float] = field(default_factory=dict)  #: seconds of a call, by depth
    calls: int = 0

    def depth(self) -> int:
        """How many steps ahead the next call scores."""
        turn = self.calls if self.calls < 2 * PROBES else self.calls % AGAIN + 2 * PROBES
        if self.most == 0 or not self.adapts:
            return self.most
        if turn < 2 * PROBES:
            return self.most if turn % 2 == 0 else 0
        if turn == 2 * PROBES:
            return self.most
        return self.chosen

    @property
    def chosen(self) -> int:
        """The depth whose steps take the least time."""
        best = min(range(self.most + 1), key=self._price)
        return best if self._price(best) < GAIN * self._price(0) else 0

    def expected(self, depth: int) -> float:
        """Steps that a call answers with this depth, on the mean of the deep calls remembered."""
        if not self.steps:
            return 1.0
        return sum(min(steps, depth + 1) for steps in self.steps) / len(self.steps)

    def learn(self, depth: int, steps: int, seconds: float) -> None:
        """A call that scored `depth` steps ahead answered so many, and took this long."""
        self.calls += 1
        if depth == self.most:
            self.steps = [*self.steps[1 - KEPT :], steps]
        known = self.cost.get(depth)
        self.cost[depth] = seconds if known is None else min(known * 1.02, seconds)

    def _price(self, depth: int) -> float:
        """Seconds a step: of the least time that such a call took, or one between its neighbours'.

        The least is what the work takes; more is another process's doing.
        """
        low = max((d for d in self.cost if d <= depth), default=0)
        high = min((d for d in self.cost if d >= depth), default=self.most)
        ends = self.cost.get(low, 0.0), self.cost.get(high, 0.0)
        part = 0.0 if high == low else (depth - low) / (high - low)
        return (ends[0] + (ends[1] - ends[0]) * part) / self.expected(depth)
