"""What whole steps cost: milliseconds by rows, nodes and context, drafting and host included."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

from outrider.errors import ConfigurationError


class Sizes(NamedTuple):
    """What one model's step reads and computes, whole: the bytes and operations of all devices."""

    weight_bytes: float  #: read once a step, whatever is in it
    kv_bytes: float  #: of the cache, for one token of context
    parameters: float  #: that a token is multiplied with: two operations each
    layers: int = 0  #: for all-reduces, two in each
    attention: float = 0.0  #: operations for one node and one token of context


class Curve(NamedTuple):
    """Milliseconds by a number, measured at some of its values."""

    at: tuple[int, ...]  #: growing, at least one
    times: tuple[float, ...]  #: milliseconds

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> "Curve":
        """From milliseconds by number.

        >>> Curve.of({4: 8.0, 1: 5.0}).milliseconds(2)
        6.0
        """
        numbers = sorted(measured)
        return cls(tuple(numbers), tuple(measured[n] for n in numbers))

    def milliseconds(self, number: int) -> float:
        """Between two values: a straight line; below the least: its cost; above: as between the
        last two."""
        return between(self.at, self.times, number)


def between(at: Sequence[int], times: Sequence[float], number: int) -> float:
    """The time at a number, on straight lines through those measured; see `Curve.milliseconds`."""
    if number <= at[0] or len(at) == 1:
        return times[0]
    right = min(bisect_left(at, number), len(at) - 1)
    low, high = at[right - 1 : right + 1]
    least, most = times[right - 1 : right + 1]
    return least + (most - least) * (number - low) / (high - low)


def _mixed(at: Sequence[int], curves: Sequence[Curve], number: int) -> Curve:
    """Between curves that were measured at some numbers: a straight line for each of the nodes."""
    if len(curves) == 1:
        return curves[0]
    nodes = curves[0].at
    each = [[curve.milliseconds(n) for curve in curves] for n in nodes]
    return Curve(nodes, tuple(between(at, times, number) for times in each))


def _wider(curve: Curve, factor: float) -> Curve:
    """Of more rows than were measured: as many more nodes of those."""
    each = zip(*curve, strict=True)
    more = {n: t + max(curve.milliseconds(ceil(n * factor)) - t, 0.0) for n, t in each}
    return Curve.of(more)


#: What two measurements of a step may differ by and say the same.
ALIKE = 0.1


def due(starts: int) -> bool:
    """Whether the last of so many starts measures anew what no two of them agree on.

    >>> [starts for starts in range(1, 20) if due(starts)]
    [2, 4, 8, 16]
    """
    return starts > 1 and starts & (starts - 1) == 0


def trust(starts: int, agreed: bool) -> str:
    """How far what so many starts have had is to be believed, in words.

    >>> trust(2, False)
    'not confirmed yet: start 4 measures anew (this is 2)'
    """
    if agreed:
        return "measured alike by two starts"
    return f"not confirmed yet: start {1 << starts.bit_length()} measures anew (this is {starts})"


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a whole step: the drafter, the target, the rule and the host.

    times    by rows and by committed tokens of a row: a curve over the nodes of a row, 1 for a
             plain step
    reading  by rows: of a token of every row that a draft model has not read; none known: nothing
    starts   programs that have had them, this one included
    agreed   rows that two of them measured alike

    >>> costs = Costs.of({1: 6.0, 5: 10.0})
    >>> costs.milliseconds(3)
    8.0
    """

    times: Mapping[int, Mapping[int, Curve]]
    reading: Mapping[int, float] = field(default_factory=dict)
    starts: int = field(default=1, compare=False)
    agreed: frozenset[int] = field(default=frozenset(), compare=False)

    @property
    def doubted(self) -> frozenset[int]:
        """Rows that this start is to measure anew."""
        return frozenset(self.times) - self.agreed if due(self.starts) else frozenset()

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> "Costs":
        """Of one row, whatever its length: milliseconds by nodes."""
        return cls({1: {0: Curve.of(measured)}})

    def milliseconds(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        """A step of so many rows with as many nodes each, the pending token included.

        Between measured numbers of rows and of committed tokens: a straight line. More rows than
        were measured cost what as many more nodes of one row would.
        """
        return self.curve(rows, context).milliseconds(nodes)

    def curve(self, rows: int, context: int) -> Curve:
        """Of so many rows of so many committed tokens, over their nodes."""
        known = sorted(self.times)
        if rows > known[-1]:
            return _wider(self._measured(known[-1], context), rows / known[-1])
        right = min(bisect_left(known, rows), len(known) - 1)
        some = [self._measured(each, context) for each in known[max(right - 1, 0) : right + 1]]
        return _mixed(known[max(right - 1, 0) : right + 1], some, rows)

    def _measured(self, rows: int, context: int) -> Curve:
        """The curve of measured rows at a context.

        Where many rows were measured at one context alone, each adds what a row adds by itself.
        """
        by_context = self.times[rows]
        known = sorted(by_context)
        curve = _mixed(known, [by_context[each] for each in known], context)
        if len(known) > 1 or rows == 1 or len(self.times.get(1, ())) < 2:
            return curve
        here, there = self._measured(1, context), self._measured(1, known[0])
        each = zip(*curve, strict=True)
        return Curve.of(
            {n: t + rows * (here.milliseconds(n) - there.milliseconds(n)) for n, t in each}
        )

    def merged(self, more: "Costs") -> "Costs":
        """With other numbers of rows besides, or with rows that were measured anew.

        Of these the former costs stay, which seeded texts may depend on, and are agreed on if both
        say the same; otherwise the new ones count. Plain steps alone say nothing of others.

        >>> bad, good = (Costs.of({1: 6.0, 5: ms}) for ms in (6.5, 9.0))
        >>> [bad.merged(again).milliseconds(5) for again in (bad, good)]
        [6.5, 9.0]
        >>> bad.merged(good).agreed, bad.merged(good).merged(good).agreed
        (frozenset(), frozenset({1}))
        """
        told = {rows for rows in more.times if _sizes(more, rows) > 1 or _sizes(self, rows) <= 1}
        alike = {rows for rows in told if rows in self.times and self._says(more, rows)}
        times = {rows: more.times[rows] for rows in more.times if rows in told - alike}
        reading = {rows: ms for rows, ms in more.reading.items() if rows not in alike}
        return replace(
            self,
            times={**self.times, **times},
            reading={**self.reading, **reading},
            agreed=frozenset(self.agreed - times.keys() | alike),
        )

    def _says(self, more: "Costs", rows: int) -> bool:
        """Whether steps of so many rows take as many plain steps there as here.

        The largest size of fewer sizes is an estimate.
        """
        for context, curve in more.times[rows].items():
            here = self.curve(rows, context)
            each = list(zip(*curve, strict=True))
            for n, ms in each[:-1] if len(each) < len(here.at) else each:
                part = ms / curve.times[0] * here.times[0] / here.milliseconds(n)
                if abs(part - 1) > ALIKE:
                    return False
        return True

    def alone(self) -> "Costs":
        """The same where every row of a batch costs what one costs alone."""
        one, many = self.times[1], 1 << 20
        batch = {
            context: Curve(curve.at, tuple(many * ms for ms in curve.times))
            for context, curve in one.items()
        }
        return Costs({1: one, many: batch}, self.reading)

    def text(self) -> str:
        """As JSON."""
        times = {
            str(rows): {
                str(context): {str(n): t for n, t in zip(*curve, strict=True)}
                for context, curve in by_context.items()
            }
            for rows, by_context in self.times.items()
        }
        reading = {str(rows): ms for rows, ms in self.reading.items()}
        told = {"starts": self.starts, "agreed": sorted(self.agreed)}
        return json.dumps({"step_ms": times, "reading_ms": reading, **told}, indent=1)

    def write(self, path: str | Path) -> None:
        """Keep them in a file, for `read` and for `load(step_costs=...)`."""
        Path(path).write_text(self.text() + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> "Costs":
        """From a file that `write` made. Raises ConfigurationError for any other."""
        do = "give a file that Costs.write made: load(...).engine.costs.write(FILE)"
        try:
            return cls.parsed(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"costs cannot be read; got {path}: {error}; {do}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"these are no costs; got {path}: {error!r}; {do}") from error

    @classmethod
    def parsed(cls, text: str) -> "Costs":
        """From the text of `text()`.

        >>> Costs.parsed(Costs.of({1: 6.0, 5: 10.0}).text()).milliseconds(2)
        7.0
        """
        raw = json.loads(text)
        times = {
            int(rows): {
                int(context): Curve.of({int(n): float(ms) for n, ms in curve.items()})
                for context, curve in by_context.items()
            }
            for rows, by_context in raw["step_ms"].items()
        }
        reading = {int(rows): float(ms) for rows, ms in raw.get("reading_ms", {}).items()}
        if any(rows < 1 or ms < 0 for rows, ms in reading.items()):
            raise ValueError("reading takes less than no time in it")
        starts, agreed = int(raw.get("starts", 1)), frozenset(map(int, raw.get("agreed", ())))
        if not times or not all(times.values()) or any(rows < 1 for rows in times):
            raise ValueError("no steps in it")
        values = [t for by in times.values() for curve in by.values() for t in curve.times]
        if not values or min(values) <= 0:
            raise ValueError("a step takes no time in it")
        return cls(times, reading, starts, agreed)


def _sizes(costs: Costs, rows: int) -> int:
    """How many sizes of a step are known of so many rows."""
    return max((len(curve.at) for curve in costs.times.get(rows, {}).values()), default=0)
