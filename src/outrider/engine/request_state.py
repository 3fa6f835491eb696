"""What has become of the requests of a run: phases, counts, and blocks to be handed on. Host only.

WAITING     in the queue, first come first served
PREFILLING  its prompt is being read
RUNNING     it has a row of the batch
ENDED       a stop, its budget, the context, or a text that somebody ended (a stop string)
CANCELLED   nobody wants it any more
FAILED      an error of its own: `RequestState.error`
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import Tensor

from outrider import arguments
from outrider.engine.outputs import InFlightOutput, StepOutput
from outrider.engine.request import Request
from outrider.errors import ConfigurationError, NumericalError
from outrider.stats import RequestStats, Stats
from outrider.types import FAULT, REASONS


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"
    CANCELLED = "cancelled"
    FAILED = "failed"


OVER = (RequestStatus.ENDED, RequestStatus.CANCELLED, RequestStatus.FAILED)
#: What may follow what. A text that has ended by itself may still be cut: its last block can hold
#: a stop string, and then it ended there.
NEXT: dict[RequestStatus, tuple[RequestStatus, ...]] = {
    RequestStatus.WAITING: (RequestStatus.PREFILLING, RequestStatus.ENDED, RequestStatus.CANCELLED),
    RequestStatus.PREFILLING: (RequestStatus.RUNNING, *OVER),
    RequestStatus.RUNNING: OVER,
    RequestStatus.ENDED: (RequestStatus.ENDED, RequestStatus.CANCELLED),
    RequestStatus.CANCELLED: (),
    RequestStatus.FAILED: (),
}


@dataclass
class RequestState:
    """One request of a run."""

    request: Request
    stats: RequestStats
    length: int  #: committed tokens that the host knows of
    phase: RequestStatus = RequestStatus.WAITING
    reason: str | None = None  #: why it is over
    error: Exception | None = None
    cut: bool = False  #: ended from outside
    poisoned: bool = False  #: NaN or +inf came out of its row: its cache may hold some
    started: float = 0.0  #: when it got its row
    watched_V: Tensor | None = None  #: logits behind the watched place of its prompt

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.reason is not None

    def watch(self, watched_BV: Tensor | None, row: int) -> None:
        """Its prompt has been read in this row of a group."""
        if watched_BV is not None and self.request.watched is not None:
            self.watched_V = watched_BV[row].clone()

    def move(self, phase: RequestStatus, reason: str | None = None) -> None:
        """Go on to another phase, one that may follow."""
        assert phase in NEXT[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase, self.reason = phase, reason


@dataclass
class RequestTable:
    """The requests of a run by number, their counts and the run's, and what is to be told."""

    entries: dict[int, RequestState] = field(default_factory=dict)
    count: int = 0  #: requests so far, those that are forgotten included
    stats: Stats = field(default_factory=Stats)
    ready: deque[StepOutput] = field(default_factory=deque)
    left: int = 0  #: how many are not over
    forgotten: set[int] = field(default_factory=set)  #: to be dropped

    def add(self, request: Request) -> int:
        """A new request, waiting; its number."""
        size, number = len(request.prompt), self.count
        self.entries[number] = RequestState(request, RequestStats(prompt_tokens=size), size)
        self.stats.prompt_tokens += size
        self.left += 1
        self.count += 1
        return number

    def forget(self, number: int) -> RequestStats:
        """Keep nothing of a request that is over once nobody names it any more; its statistics."""
        self.check(number)
        entry = self.entries[number]
        if not entry.over:
            raise ConfigurationError(
                f"request {number} is not over; got forget({number}); end it first"
            )
        self.forgotten.add(number)
        return entry.stats

    def sweep(self, named: Sequence[int]) -> None:
        """Drop what is to be forgotten, but for requests that rows or prompts under way name."""
        if self.forgotten:
            for number in self.forgotten.difference(named):
                del self.entries[number]
            self.forgotten.intersection_update(named)

    def check(self, number: int) -> None:
        """Refuse a number that names no request: ConfigurationError."""
        if not arguments.is_whole(number) or number not in self.entries:
            raise ConfigurationError(
                f"no request {number!r}: this run has {len(self.entries)}; give a number that "
                "submit returned"
            )

    def run(self, number: int) -> None:
        """It has a row."""
        entry = self.entries[number]
        entry.move(RequestStatus.RUNNING)
        entry.started = time.perf_counter()

    def check_end(self, number: int, reason: str) -> None:
        """Refuse to end what is not there, or was ended or failed before: ConfigurationError."""
        self.check(number)
        entry = self.entries[number]
        if entry.cut or entry.error is not None:
            raise ConfigurationError(
                f"request {number} is over already ({entry.reason}); got end({number}, "
                f"{reason!r}); end it once"
            )

    def end(self, number: int, reason: str, keep: int | None) -> None:
        """End a request from outside and count the tokens it keeps; what was not told is dropped.

        `keep=None` keeps all that were told.
        """
        entry = self.entries[number]
        told = entry.stats.new_tokens
        told -= sum(len(block.token_ids) for block in self.ready if block.row == number)
        if keep is not None:
            if not arguments.is_whole(keep) or not 0 <= keep <= told:
                raise ConfigurationError(
                    f"keep must be a number of tokens that request {number} has told, at most "
                    f"{told}; got {keep!r}; leave it out to keep them all"
                )
            told = keep
        self.ready = deque(block for block in self.ready if block.row != number)
        self.stats.new_tokens -= entry.stats.new_tokens - told
        entry.stats.new_tokens, entry.cut = told, True
        self._over(
            entry, RequestStatus.CANCELLED if reason == "cancelled" else RequestStatus.ENDED, reason
        )

    def fail(self, number: int, error: Exception) -> StepOutput:
        """Its own error, and nobody else's; its last block."""
        entry = self.entries[number]
        entry.error = error
        self._over(entry, RequestStatus.FAILED, "error")
        return StepOutput(number, [], 0, "error")

    def _over(self, entry: RequestState, phase: RequestStatus, reason: str) -> None:
        if not entry.over:
            self.left -= 1
            if entry.started:
                entry.stats.seconds = time.perf_counter() - entry.started
        entry.move(phase, reason)
        entry.request = replace(entry.request, inputs=None)  # what it has read is large

    def tell(self, output: InFlightOutput) -> list[StepOutput]:
        """Read what a step emitted, count it for its requests, and make it ready."""
        block, blocks = output.read(), []
        for at, number in enumerate(output.requests):
            entry = self.entries[number]
            fault = block.reason[at] == FAULT
            entry.poisoned = entry.poisoned or fault
            if entry.over:
                continue
            if fault:
                blocks.append(self.fail(number, _without_law(number, entry)))
                continue
            ids = block.tokens[at][: block.emitted[at]]
            entry.length += len(ids)
            for record in (entry.stats, self.stats):
                record.steps += 1
                record.new_tokens += len(ids)
                record.drafted += block.drafted[at]
                record.accept(block.accepted[at])
                record.overlap += block.overlap[at]
                record.overlaps += block.overlaps[at]
            reason = REASONS[block.reason[at]] if block.reason[at] else None
            if reason is not None:
                self._over(entry, RequestStatus.ENDED, reason)
            accepted, said = min(block.accepted[at], len(ids)), output.told_of(at, len(ids))
            drafted, trace = block.drafted[at], output.trace_of(at)
            blocks.append(StepOutput(number, ids, accepted, reason, drafted, trace, *said))
        self.ready += blocks
        return blocks


def _without_law(number: int, entry: RequestState) -> NumericalError:
    """What may have left a request without a law, the likeliest first."""
    models = "the target or draft model returned NaN or +inf, or masked every token"
    where, do = f"request {number} after {entry.length} tokens", "check weights and dtype"
    if entry.request.sampling.shapes:
        models = f"bans, rules or processors of its sampling left no token, or {models}"
        do = f"loosen those, or {do}"
    return NumericalError(f"{models}, for {where}; {do}")
