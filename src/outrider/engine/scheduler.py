"""Requests find a row in the batch, and rows that are over leave it.

A server's requests wait in `outrider.server.engine_loop` first, until a row is free for them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

from torch import Tensor

from outrider import arguments
from outrider.engine.batch import Batch, Prefill, groups, slab
from outrider.engine.outputs import InFlightOutput, StepOutput
from outrider.engine.request import Request
from outrider.errors import ConfigurationError, NumericalError, PromptError
from outrider.models.prefix_cache import PrefixCache
from outrider.stats import RequestStats, Stats
from outrider.types import FAULT, REASONS, Drafter, LanguageModel

# What has become of the requests of a run: phases, counts, and blocks to be handed on. Host only.
#
# WAITING     in the queue, first come first served
# PREFILLING  its prompt is being read
# RUNNING     it has a row of the batch
# ENDED       a stop, its budget, the context, or a text that somebody ended (a stop string)
# CANCELLED   nobody wants it any more
# FAILED      an error of its own: `RequestState.error`


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

    def watch(self, watched_BV: Tensor, row: int) -> None:
        """Its prompt has been read in this row of a group."""
        if self.request.watched is not None:
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
        if entry.request.inputs is not None:  # what it has read is large
            entry.request = replace(entry.request, inputs=None)

    def record(self, output: InFlightOutput) -> list[StepOutput]:
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
            accepted, logs = min(block.accepted[at], len(ids)), output.logprobs_of(at, len(ids))
            drafted, trace = block.drafted[at], output.trace_of(at)
            blocks.append(StepOutput(number, ids, accepted, reason, drafted, trace, *logs))
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


CHUNK = 64  #: prompt tokens read between two steps of those who run, for each who waits for a row
MOST_TOKENS = 1024  #: of all of them
RESTS = 8  #: tokens that a draft model has not read when it is taken to rest

#: Whether no text of these requests depends on what is drafted, nor on when a draft model reads.
Free = Callable[[Sequence[Request]], bool]


@dataclass
class RowQueue:
    """The rows of the batch, the first `len(rows)` of `max_num_seqs`, and who waits for one.

    >>> queue = RowQueue(8, [10, 11, 12, 13])
    >>> queue.moves([1, 3])
    ([1], [2])
    >>> queue.leave([1, 3]); queue.rows
    [10, 12]
    """

    max_num_seqs: int
    rows: list[int] = field(default_factory=list)  #: request of each row of the batch
    waiting: deque[int] = field(default_factory=deque)  #: requests, first come first served

    def ahead(self) -> list[int]:
        """Those of the queue for whom there is a row."""
        return list(islice(self.waiting, self.max_num_seqs - len(self.rows)))

    def moves(self, gone: Sequence[int]) -> tuple[list[int], list[int]]:
        """If these rows left, in order: (holes, rows from the end that would move there)."""
        left = len(self.rows) - len(gone)
        holes = [row for row in gone if row < left]
        return holes, [row for row in range(left, len(self.rows)) if row not in gone]

    def leave(self, gone: Sequence[int]) -> None:
        """Free these rows."""
        for hole, mover in zip(*self.moves(gone), strict=True):
            self.rows[hole] = self.rows[mover]
        del self.rows[len(self.rows) - len(gone) :]


class Scheduler:
    """The batch of a run, its rows and its queue, and the group whose prompts are being read.

    `capacity` are the slots of a row. Nobody's entries are copied when others come or go, but for
    the one row that moves into a free row.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        requests: RequestTable,
        max_num_seqs: int,
        capacity: int,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.target, self.drafter, self.capacity = target, drafter, capacity
        # entries of other sources, and states that heads read, are not kept
        plain = target.reads == "text" and not drafter.aux_layers
        self.prefixes = prefixes if plain else None
        self.table, self.queue = requests, RowQueue(max_num_seqs)
        self.rows = self.queue.rows  #: the request of each row of the batch
        self.batch: Batch | None = None
        self._prefill: tuple[list[int], Prefill] | None = None

    @property
    def named(self) -> list[int]:
        """The requests that have a row, and those whose prompts are being read."""
        return self.rows + (self._prefill[0] if self._prefill is not None else [])

    def requests(self, numbers: Sequence[int]) -> list[Request]:
        """The requests with these numbers."""
        return [self.table.entries[number].request for number in numbers]

    def leave(self) -> None:
        """Rows that are over leave: rows from the end move into their places."""
        rows, entries = self.queue.rows, self.table.entries
        over = [row for row, number in enumerate(rows) if entries[number].over]
        if not over:
            return
        batch, left = self.batch, len(rows) - len(over)
        assert batch is not None
        holes, movers = self.queue.moves(over)
        if any(entries[rows[row]].poisoned for row in over):
            if self.prefixes is not None:
                self.prefixes.clear()
            # a NaN in a row's slots would poison who gets it next, masked or not
            moved = dict(zip(holes, movers, strict=True))
            alive = [moved.get(row, row) for row in range(left)]
            self.batch = batch.take(alive) if alive else None
            self.queue.leave(over)
            return
        if holes:
            batch = batch.put(holes, batch.take(movers))
        batch = batch.narrow(left)
        self.queue.leave(over)  # not before their rows are moved: that may fail
        if not any(request.sampling.shapes for request in self.requests(rows)):
            plain = batch.context.sampling._replace(shaping=None)
            batch = batch._replace(context=batch.context._replace(sampling=plain))
        self.batch = batch

    def arrive(self, free: Free | None = None) -> float:
        """Read prompts of those who wait: all of them while nobody runs, else a share of them.

        The more wait the more is read between two steps: a product takes less time a row the more
        rows it has, and a step of few rows, while they wait, about as long as one of many.
        `free`: the drafter may rest where it holds (None: it drafts in every step). Returns the
        seconds that it took.
        """
        if self._prefill is None and not self.queue.waiting:
            return 0.0
        started = time.perf_counter()
        left = None if not self.queue.rows else self._share()
        while self._prefill is not None or self._call(free):
            assert self._prefill is not None
            numbers, prefill = self._prefill
            before = prefill.read
            entries = self.table.entries
            alive = [at for at, number in enumerate(numbers) if not entries[number].over]
            try:
                newcomers = prefill.step(left) if alive else None
            except PromptError as error:  # images that do not fit the prompt: its own, no other's
                self._prefill = None
                self.table.ready += [self.table.fail(number, error) for number in numbers]
                continue
            if alive and newcomers is None:
                break
            if newcomers is not None:
                if prefill.watched_BV is not None:
                    for at in alive:
                        entries[numbers[at]].watch(prefill.watched_BV, at)
                joining = numbers
                if len(alive) < len(numbers):
                    newcomers = newcomers.take(alive)
                    joining = [numbers[at] for at in alive]
                self._join(joining, newcomers)
            self._prefill = None  # not before they joined: what fails on the way is tried again
            if left is not None:
                left -= len(numbers) * (prefill.read - before)
                if left < CHUNK // 2:  # too few to be worth a call
                    break
        return time.perf_counter() - started

    def _share(self) -> int:
        """How many tokens of prompts are read between two steps."""
        reading = len(self._prefill[0]) if self._prefill is not None else 0
        free = self.queue.max_num_seqs - len(self.queue.rows)
        return min(CHUNK * min(reading + len(self.queue.waiting), free), MOST_TOKENS)

    def _call(self, free: Free | None) -> bool:
        """Begin to read the next in the queue, with those behind it who fit and are as long."""
        ahead = self.queue.ahead()
        if not ahead:
            return False
        prompts: list[tuple[int, ...]] = []
        for request in self.requests(ahead):
            alone = request.media is not None  # who has images is read so
            if alone and prompts:
                break
            prompts.append(request.key)
            if alone:
                break
        ahead = ahead[: len(prompts)]
        some: Sequence[int] = range(len(ahead))
        if self.prefixes is not None:
            names = [request.lora_name for request in self.requests(ahead)]
            some = self.prefixes.together(self.target, prompts, names)
        group = next(sorted(g) for g in groups([len(prompts[at]) for at in some]) if 0 in g)
        numbers = [ahead[some[at]] for at in group]
        requests = self.requests(numbers)
        later = self._later(requests, free)
        waiting = [prompts[at] for at, number in enumerate(ahead) if number not in numbers]
        prefill = Prefill(
            self.target, self.drafter, requests, self.capacity, self.prefixes, later, waiting
        )
        self._prefill = numbers, prefill
        for number in numbers:
            self.queue.waiting.remove(number)
            entry = self.table.entries[number]
            entry.move(RequestStatus.PREFILLING)
            entry.stats.cached_tokens = prefill.copied
        return True

    def _later(self, newcomers: Sequence[Request], free: Free | None) -> bool:
        """Whether a draft model leaves these prompts for its first draft, which may never come.

        That is what a drafter at rest will have to do anyway; one at work would read every row
        anew for their sake. Heads are told the target's states of a prompt once.
        """
        if free is None or self.drafter.aux_layers:
            return False
        if not free([*newcomers, *self.requests(self.rows)]):
            return False
        if not self.rows:
            return self.prefixes is None  # what is kept of other prompts is copied now or never
        return self.batch is not None and self.batch.context.unread >= RESTS

    def _join(self, numbers: list[int], newcomers: Batch) -> None:
        """Join behind those who run: the newcomers' slots are copied, nobody else's."""
        if self.batch is None and len(numbers) == self.queue.max_num_seqs:
            self.batch = newcomers
        else:
            if self.batch is None:
                self.batch = slab(self.target, self.drafter, self.queue.max_num_seqs, self.capacity)
            first = len(self.queue.rows)
            self.batch = self.batch.put(range(first, first + len(numbers)), newcomers)
        self.queue.rows += numbers
        for number in numbers:
            entry = self.table.entries[number]
            entry.move(RequestStatus.RUNNING)
            entry.started = time.perf_counter()
