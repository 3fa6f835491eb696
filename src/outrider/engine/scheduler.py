"""Requests find a row in the batch, and rows that are over leave it.

A server's requests wait in `outrider.server.engine_loop` first, until a row is free for them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from outrider.engine.batch import Batch, Prefill, groups, read_rest, slab
from outrider.engine.outputs import RequestStatus, RequestTable
from outrider.engine.request import Request
from outrider.errors import PromptError
from outrider.models.cache import SlotCache
from outrider.models.prefix_cache import PrefixCache
from outrider.types import Drafter, LanguageModel

CHUNK = 64  #: prompt tokens read between two steps of those who run, for each who waits for a row
MOST_TOKENS = 1024  #: of all of them
RESTS = 8  #: tokens that a draft model has not read when it is taken to rest

#: Whether no text of these requests depends on what is drafted, nor on when a draft model reads.
IgnoresDrafts = Callable[[Sequence[Request]], bool]


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

    `capacity` are the slots of a row; `at_once`: see `Prefill`. Nobody's entries are copied when
    others come or go, but for the one row that moves into a free row.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        requests: RequestTable,
        max_num_seqs: int,
        capacity: int,
        prefixes: PrefixCache | None = None,
        at_once: bool = False,
    ) -> None:
        self.target, self.drafter, self.capacity = target, drafter, capacity
        self.at_once = at_once
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

    def requests(self, request_ids: Sequence[int]) -> list[Request]:
        """The requests of these ids."""
        return [self.table.entries[request_id].request for request_id in request_ids]

    def leave(self) -> None:
        """Rows that are over leave: rows from the end move into their places."""
        rows, entries, over = self.queue.rows, self.table.entries, []
        for row, request_id in enumerate(rows):
            if entries[request_id].over:
                over.append(row)
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
            cache, length_B = None, batch.context.length_B
            if type(batch.cache) is SlotCache and length_B.device.type == "cpu":
                # known without waiting: a short row beside a long one is moved as what it is
                cache = batch.cache.take(movers, int(length_B[movers].max()))
            batch = batch.put(holes, batch.take(movers, cache))
        batch = batch.narrow(left)
        self.queue.leave(over)  # not before their rows are moved: that may fail
        if not any(request.sampling.shapes for request in self.requests(rows)):
            plain = batch.context.sampling._replace(shaping=None)
            batch = batch._replace(context=batch.context._replace(sampling=plain))
        self.batch = batch

    def arrive(self, ignores_drafts: IgnoresDrafts | None = None) -> float:
        """Read prompts of those who wait: all of them while nobody runs, else a share of them. Of
        some the first step reads the end (`Prefill`).

        The more wait the more is read between two steps: a product takes less time a row the more
        rows it has, and a step of few rows, while they wait, about as long as one of many.
        `ignores_drafts`: the drafter may rest where it holds (None: it drafts in every step).
        Returns the seconds that it took.
        """
        if self._prefill is None and not self.queue.waiting:
            return 0.0
        started = time.perf_counter()
        left = None if not self.queue.rows else self._share()
        while self._prefill is not None or self._call(ignores_drafts):
            assert self._prefill is not None
            request_ids, prefill = self._prefill
            before = prefill.read
            entries, alive = self.table.entries, []
            for at, request_id in enumerate(request_ids):
                if not entries[request_id].over:
                    alive.append(at)
            try:
                newcomers = prefill.step(left) if alive else None
            except PromptError as error:  # images that do not fit the prompt: its own, no other's
                self._prefill = None
                self.table.ready += [
                    self.table.fail(request_id, error) for request_id in request_ids
                ]
                continue
            if alive and newcomers is None:
                break
            if newcomers is not None:
                if prefill.watched_BV is not None:
                    for at in alive:
                        entries[request_ids[at]].watch(prefill.watched_BV, at)
                joining = request_ids
                if len(alive) < len(request_ids):
                    newcomers = read_rest(self.target, newcomers).take(alive)
                    joining = [request_ids[at] for at in alive]
                self._join(joining, newcomers)
            self._prefill = None  # not before they joined: what fails on the way is tried again
            if left is not None:
                left -= len(request_ids) * (prefill.read - before)
                if left < CHUNK // 2:  # too few to be worth a call
                    break
        return time.perf_counter() - started

    def _share(self) -> int:
        """How many tokens of prompts are read between two steps."""
        reading = len(self._prefill[0]) if self._prefill is not None else 0
        num_free = self.queue.max_num_seqs - len(self.queue.rows)
        return min(CHUNK * min(reading + len(self.queue.waiting), num_free), MOST_TOKENS)

    def _call(self, ignores_drafts: IgnoresDrafts | None) -> bool:
        """Begin to read the next in the queue, with those behind it who fit and are as long."""
        queue, entries = self.queue, self.table.entries
        ahead: list[int] = []  # who get a row
        prompts: list[tuple[int, ...]] = []
        for request_id in islice(queue.waiting, queue.max_num_seqs - len(queue.rows)):
            request = entries[request_id].request
            if request.media is not None and ahead:  # who has images is read alone
                break
            ahead.append(request_id)
            prompts.append(request.key)
            if request.media is not None:
                break
        if not ahead:
            return False
        some: Sequence[int] = range(len(ahead))
        lengths = list(map(len, prompts))
        if self.prefixes is not None:
            names = [request.lora_name for request in self.requests(ahead)]
            some = self.prefixes.together(self.target, prompts, names)
            lengths = [lengths[at] for at in some]
        request_ids, requests, others = [], [], dict(zip(ahead, prompts, strict=True))
        for group in groups(lengths):
            for at in sorted(group) if 0 in group else ():
                request_id = ahead[some[at]]
                request_ids.append(request_id)
                requests.append(entries[request_id].request)
                del others[request_id]
        later, waiting = self._later(requests, ignores_drafts), list(others.values())
        # with nobody else about the next step is theirs alone, and reads the rest of their prompts
        alone = not queue.rows and len(requests) == len(queue.waiting)
        prefill = Prefill(
            self.target, self.drafter, requests, self.capacity, self.prefixes, later, waiting,
            at_once=alone and self.at_once,
        )  # fmt: skip
        self._prefill = request_ids, prefill
        for request_id in request_ids:
            queue.waiting.remove(request_id)
            entry = entries[request_id]
            entry.move(RequestStatus.PREFILLING)
            entry.stats.cached_tokens = prefill.copied
        return True

    def bounded(self, in_flight: int, most: int) -> Batch:
        """The batch with the length that no row exceeds: blocks that are unread count in full, as
        `most` tokens. And with the one that all rows have: these do not count."""
        assert self.batch is not None
        lengths = []
        for request_id in self.rows:
            lengths.append(self.table.entries[request_id].length)
        bound = min(max(lengths) + in_flight * most, self.capacity - most)
        unread = min(self.batch.context.unread, bound)  # longer rows may have left
        context = self.batch.context._replace(bound=bound, unread=unread, least=min(lengths))
        return self.batch._replace(context=context)

    def _later(self, newcomers: Sequence[Request], ignores_drafts: IgnoresDrafts | None) -> bool:
        """Whether a draft model leaves these prompts for its first draft, which may never come.

        That is what a drafter at rest will have to do anyway; one at work would read every row
        anew for their sake. Heads are told the target's states of a prompt once.
        """
        if ignores_drafts is None or self.drafter.aux_layers:
            return False
        if not self.rows:  # what is kept of other prompts is copied now or never
            return self.prefixes is None and ignores_drafts(newcomers)
        if self.batch is None or self.batch.context.unread < RESTS:
            return False
        return ignores_drafts([*newcomers, *self.requests(self.rows)])

    def _join(self, request_ids: list[int], newcomers: Batch) -> None:
        """Join behind those who run: the newcomers' slots are copied, nobody else's."""
        if self.batch is None and len(request_ids) == self.queue.max_num_seqs:
            self.batch = newcomers
        else:
            if self.batch is None:
                self.batch = slab(self.target, self.drafter, self.queue.max_num_seqs, self.capacity)
            first = len(self.queue.rows)
            if first:
                self.batch = read_rest(self.target, self.batch)
            self.batch = self.batch.put(range(first, first + len(request_ids)), newcomers)
        self.queue.rows += request_ids
        for request_id in request_ids:
            entry = self.table.entries[request_id]
            entry.move(RequestStatus.RUNNING)
            entry.started = time.perf_counter()
