"""Statistics: what a person wants to look at, apart from what the next step needs."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import mul

import torch

# Chances that the next drafted token is kept, learnt from one row's own verdicts.
#
# What one row shows is not counted for another here: rows may share a seed, and then one row's
# verdict would tell another's noise (docs/planner.md).

BUCKETS = 12  #: two for every doubling of a length, from 1 to 45 and above
STRENGTH = 5.0  #: looks that a prior nobody measured is worth
FORGET = 0.99  #: what earlier looks of a bucket count for beside its next one


def bucket(length: int) -> int:
    """The bucket of a match or a streak of so many tokens.

    >>> [bucket(length) for length in (0, 1, 2, 3, 4, 8, 1000)]
    [0, 0, 2, 3, 4, 6, 11]
    """
    return BUCKET_OF[min(length, LAST)]


def _computed() -> list[int]:
    """The bucket of every length up to the last one's."""
    table = [0, 0]
    while table[-1] < BUCKETS - 1:  # bucket 2 k begins at 2^k, bucket 2 k + 1 at 2^(k + 1/2)
        table.append((len(table) ** 2).bit_length() - 1)
    return table


BUCKET_OF = _computed()  #: by length, the last one's and those above it
LAST = len(BUCKET_OF) - 1


def gains(chances: Sequence[float], length: int, most: int) -> list[float]:
    """Tokens that n tokens in a row are expected to add behind so long a match or streak.

    `chances` are by bucket; n is 0, 1, ..., `most`.

    >>> gains([0.5] * BUCKETS, 1, 3)
    [0.0, 0.5, 0.75, 0.875]
    """
    expected, survives, found = 0.0, 1.0, [0.0]
    for streak in range(length, length + most):
        survives *= chances[BUCKET_OF[min(streak, LAST)]]
        expected += survives
        found.append(expected)
    return found


class AcceptanceStats:
    """Success counts by bucket, with a prior, and old looks counting less.

    >>> odds = AcceptanceStats([0.5] * BUCKETS, strength=2)
    >>> odds.observe(0, kept=True)
    >>> round(odds.chance(0), 2), odds.chance(1)
    (0.67, 0.5)
    """

    __slots__ = ("_kept", "_seen", "chances", "forget")

    def __init__(
        self, prior: Sequence[float], strength: float = STRENGTH, forget: float = FORGET
    ) -> None:
        self._kept = list(map(mul, prior, repeat(strength)))
        self._seen = [strength] * len(prior)
        self.chances = list(prior)  #: by bucket
        self.forget = forget

    def chance(self, at: int) -> float:
        """The chance in this bucket."""
        return self.chances[at]

    def observe(self, at: int, kept: float) -> None:
        """A token of this bucket was verified, or something of this worth was seen."""
        kept = self._kept[at] = self._kept[at] * self.forget + kept
        seen = self._seen[at] = self._seen[at] * self.forget + 1
        self.chances[at] = kept / seen

    def copy(self) -> "AcceptanceStats":
        other = AcceptanceStats((), 0, self.forget)
        other._kept, other._seen = self._kept.copy(), self._seen.copy()
        other.chances = self.chances.copy()
        return other


class Clock:
    """Sums the time of named pieces of work: wall time on a CPU, device events on CUDA.

    >>> clock = Clock()
    >>> clock.start(); clock.lap("propose"); clock.lap("score")
    >>> list(clock.read())
    ['propose', 'score']
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._last = 0.0
        self._event: torch.cuda.Event | None = None
        self._ms: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Time from here on belongs to the next lap."""
        if self._cuda:
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._last = time.perf_counter()

    def lap(self, name: str, more: float = 0.0) -> None:
        """What was done since the last mark has this name; on a CPU so many seconds besides."""
        last, event = self._last, self._event
        self.start()
        if event is None or self._event is None:
            self._ms[name] += 1e3 * (self._last - last + more)
        else:
            self._events.append((name, event, self._event))

    def read(self) -> dict[str, float]:
        """Milliseconds by name; on CUDA this waits for the device once."""
        if self._events:
            torch.cuda.synchronize()
            for name, start, end in self._events:
                self._ms[name] += start.elapsed_time(end)
            self._events.clear()
        return dict(self._ms)


def _add(mine: object, theirs: object, names: Iterable[str]) -> None:
    """Add fields of the one to those of the other."""
    for name in names:
        setattr(mine, name, getattr(mine, name) + getattr(theirs, name))


@dataclass(kw_only=True)
class RequestStats:
    """Counts of one request, or of many summed.

    prompt_tokens            tokens of the prompt
    cached_tokens            those of them whose entries were copied from a prompt read before
    steps                    target calls while the request was running
    new_tokens               tokens emitted, the stop token included
    drafted, accepted        drafted children offered to the rule, and those it kept
    accepted_per_position    how often the child at depth 1, 2, ... was accepted
    overlap, overlaps        sum and count of sum min(target, draft) over examined positions
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    overlap: float = 0.0
    overlaps: int = 0
    seconds: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps: counts the residual or bonus token, as vLLM and others do."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per target call (less than the above if a block was cut by a stop)."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted; positions behind a rejection count as drafted. This is not alpha."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def alpha(self) -> float | None:
        """Mean of sum min(target, draft) over examined positions that had a law, else None."""
        return self.overlap / self.overlaps if self.overlaps else None

    @property
    def tokens_per_second(self) -> float:
        """new_tokens / seconds."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def accept(self, count: int) -> None:
        """Add one step that accepted `count` drafted tokens."""
        self.accepted += count
        places = self.accepted_per_position
        if count > len(places):
            places.extend([0] * (count - len(places)))
        for depth in range(count):
            places[depth] += 1

    def add(self, other: "RequestStats") -> None:
        """Add another request's counts (not its seconds: requests overlap in time)."""
        names = ("prompt_tokens", "cached_tokens", "new_tokens", "steps", "drafted", "accepted")
        _add(self, other, (*names, "overlaps"))
        self.overlap += other.overlap
        mine, theirs = self.accepted_per_position, other.accepted_per_position
        mine.extend([0] * (len(theirs) - len(mine)))
        for depth, count in enumerate(theirs):
            mine[depth] += count

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON, derived figures included."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_per_position": list(self.accepted_per_position),
            "mean_acceptance_length": self.mean_acceptance_length,
            "block_efficiency": self.block_efficiency,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "alpha": self.alpha,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


VERBS = ("propose", "score", "verify", "commit", "emit")
GRAPHS = ("graph", "capture")  #: the first four in one piece


@dataclass
class Stats(RequestStats):
    """Totals of a run, with the time of each part in milliseconds.

    propose  drafting, the draft model included
    score    the target, and its laws: penalties, temperature, filters
    verify   the rule
    commit   what is kept: caches, text, why rows end
    graph    all four above in one, where they are replayed as a CUDA graph
    capture  the same of steps that were captured, or run ahead of a capture
    emit     reading what was emitted
    host     everything else, rows that come and go included
    prefill  prompts into the caches; not in `seconds`
    """

    engine_steps: int = 0  #: steps of the loop; rows of a batch share them
    propose_ms: float = 0.0
    score_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    graph_ms: float = 0.0
    capture_ms: float = 0.0
    emit_ms: float = 0.0
    host_ms: float = 0.0
    prefill_ms: float = 0.0
    sizes: Counter[int] = field(default_factory=Counter)  #: steps by nodes of a row; 1: plain ones
    predicted_ms: float = 0.0  #: of these steps, by the planner's costs; 0 without any
    why_plain: str = ""  #: of a planner: why most steps were plain, if they were
    why_dropped: str = ""  #: of a planner: why a draft model is asked no more, if it is not
    captures: int = 0  #: steps that were captured as CUDA graphs
    replays: int = 0  #: steps that were replays of one
    why_eager: str = ""  #: why steps run without CUDA graphs, if they do

    @property
    def plain_steps(self) -> int:
        """Steps in which nothing was drafted."""
        return self.sizes[1]

    @property
    def measured_ms(self) -> float:
        """What the steps have taken, the host's part included: beside `predicted_ms`."""
        return self.seconds * 1e3

    def clock(self, times: Mapping[str, float]) -> None:
        """Note the milliseconds of each verb; what is left of `seconds` is the host's."""
        for verb in (*VERBS, *GRAPHS):
            setattr(self, f"{verb}_ms", times.get(verb, 0.0))
        self.host_ms = self.seconds * 1e3 - sum(times.values())

    def follow(self, other: "Stats") -> None:
        """Add a run that came after this one: its counts and its times."""
        self.add(other)
        times = (f"{part}_ms" for part in (*VERBS, *GRAPHS, "host", "prefill"))
        counts = "engine_steps", "captures", "replays"
        _add(self, other, ("seconds", "predicted_ms", *counts, *times))
        self.sizes.update(other.sizes)
        self.why_plain = other.why_plain or self.why_plain
        self.why_dropped = other.why_dropped or self.why_dropped
        self.why_eager = other.why_eager

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        times = (f"{part}_ms" for part in (*VERBS, *GRAPHS, "host", "prefill"))
        return super().as_dict() | {
            "engine_steps": self.engine_steps,
            "sizes": dict(sorted(self.sizes.items())),
            "plain_steps": self.plain_steps,
            "predicted_ms": self.predicted_ms,
            "measured_ms": self.measured_ms,
            "why_plain": self.why_plain,
            "why_dropped": self.why_dropped,
            "captures": self.captures,
            "replays": self.replays,
            "why_eager": self.why_eager,
            **{name: getattr(self, name) for name in times},
        }
