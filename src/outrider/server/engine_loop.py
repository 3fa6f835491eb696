"""The thread that owns the live batch: orders come in, events go out once per turn.

A turn: orders (new requests, cancellations) are taken; who has waited longest gets a row; every
lane with work makes one step; what was emitted is delivered. Nobody else touches the engine.
"""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.errors import OutriderError
from outrider.server.batch_runners import (
    TranscriptionOutput,
    TranscriptionRequest,
)

STILL_SECONDS = 120.0  #: without the end of a turn, after which an engine is taken to stand still


class QueueFullError(Exception):
    """The queue is as long as it may be."""


class EngineStoppedError(Exception):
    """The engine's thread has died, or is being closed."""


class Broken(Exception):
    """The engine has ended by a fault of its own."""


class StepTiming(NamedTuple):
    """What one step of a lane took and brought."""

    seconds: float
    tokens: int  #: written, with the prompts of those whose first tokens came
    nodes: int  #: most tokens that a row's draft was given, and its pending one


class OutputEvent(NamedTuple):
    """What has happened to a request: a block of its answer, or why there will be none."""

    block: StepOutput | TranscriptionOutput | None = None
    error: BaseException | None = None
    over: bool = False
    step: StepTiming | None = (
        None  #: the step that brought the block: told with the first of its blocks
    )


@dataclass(eq=False)
class PendingRequest:
    """One request on its way. `sink` is called with its events, on the thread that delivers."""

    lane: str
    request: Request | TranscriptionRequest
    sink: Callable[[OutputEvent], None]
    deadline: float | None = None  #: when it is given up, by `time.monotonic`
    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None  #: when a row was free for it
    number: int | None = None  #: in its lane's run
    cached: int = 0  #: tokens of its prompt that were copied from another one
    begun: bool = False  #: whether any of its answer has come
    over: bool = False
    had: list[int] = field(default_factory=list)  #: tokens that were told, in another process
    key: int = field(default_factory=itertools.count().__next__)  #: names it in its process


class QueueStats(NamedTuple):
    """How busy the loop is."""

    running: int
    waiting: int
    rows: int


class BatchRunner(Protocol):
    """A lane's requests being decoded: an `outrider.EngineRun`, or recordings being transcribed."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""

    @property
    def errors(self) -> Mapping[int, Exception]:
        """Of requests that failed."""

    def submit(self, request: Any) -> int:
        """Take a request; its number."""

    def step(self) -> Sequence[StepOutput | TranscriptionOutput]:
        """One step of all of them, and what it brought; the last block of each says why it ends."""

    def end(self, number: int, reason: str) -> None:
        """Nobody wants it any more."""

    def release(self, number: int) -> object:
        """Keep nothing of a request that is over."""

    def cached(self, number: int) -> int:
        """Tokens of its prompt that were copied from another one."""


OutputCallback = Callable[[list[tuple[PendingRequest, OutputEvent]]], None]


class EngineProtocol(Protocol):
    """What decodes for those who have tickets: a `EngineLoop` of this process, or one in another.

    deliver  hands events to their tickets' sinks; set before it is started
    fault    what has ended it, if anything has
    """

    deliver: OutputCallback
    fault: BaseException | None

    @property
    def rows(self) -> int:
        """Requests decoded side by side."""

    @property
    def alive(self) -> bool:
        """Whether it decodes."""

    @property
    def still(self) -> float:
        """Seconds since it has last ended a turn."""

    @property
    def load(self) -> QueueStats:
        """Rows under way, requests in the queue, rows in all."""

    def submit(self, tickets: Sequence[PendingRequest]) -> None:
        """Queue requests, all or none. Raises Full or Stopped, or the tickets' events tell it."""

    def cancel(self, ticket: PendingRequest, reason: str = "cancelled") -> None:
        """Nobody waits for it any more."""

    def start(self) -> None:
        """Begin to decode."""

    def close(self) -> None:
        """Take no more, end what runs, and stop."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has stopped."""


class EngineLoop(threading.Thread):
    """Decodes requests of all lanes, `rows` at a time, first come first served.

    opened        makes a lane's run when its first request gets a row
    most_waiting  requests in the queue beyond which more are refused: `QueueFullError`
    deliver       hands events to their tickets' sinks on another thread; None: at once
    most_still    seconds without a turn's end after which it is given up; None: never
    """

    def __init__(
        self,
        opened: Callable[[str], BatchRunner],
        rows: int,
        most_waiting: int,
        deliver: OutputCallback | None = None,
        most_still: float | None = None,
    ) -> None:
        super().__init__(name="outrider-engine", daemon=True)
        self._most_still = most_still
        self._opened, self.rows, self.most_waiting = opened, rows, most_waiting
        self.deliver = deliver or dispatch
        self.fault: BaseException | None = None
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0  # orders under way included
        self._waiting: deque[PendingRequest] = deque()
        self._runs: dict[str, BatchRunner] = {}
        self._running: dict[tuple[str, int], PendingRequest] = {}
        self._events: list[tuple[PendingRequest, OutputEvent]] = []
        self._closing = False
        self._turned = time.monotonic()

    # ------------------------------------------------------------------ from any thread

    def submit(self, tickets: Sequence[PendingRequest]) -> None:
        """Queue requests, all or none. Raises Full, or Stopped."""
        with self._lock:
            if self.fault is not None or self._closing:
                raise EngineStoppedError
            if self._queued + len(tickets) > self.most_waiting + self.rows - len(self._running):
                raise QueueFullError
            self._queued += len(tickets)
            self._orders.put(lambda: self._waiting.extend(tickets))

    def cancel(self, ticket: PendingRequest, reason: str = "cancelled") -> None:
        """Nobody waits for it any more; its row is free at the next turn."""
        self._orders.put(lambda: self._end(ticket, reason))

    def close(self) -> None:
        """Take no more, end what runs, and stop."""

        def order() -> None:
            self._closing = True

        self._orders.put(order)

    def start(self) -> None:
        """Begin to decode, and to look whether it does."""
        super().start()
        if self._most_still is not None:
            watch = partial(self._watch, self._most_still)
            threading.Thread(target=watch, name="outrider-watch", daemon=True).start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has stopped; one that was never started has."""
        if self.ident is not None:
            super().join(timeout)

    @property
    def alive(self) -> bool:
        """Whether it decodes."""
        return self.is_alive() and self.fault is None and not self._closing

    @property
    def still(self) -> float:
        """Seconds since it has last ended a turn; one that waits for work turns, too."""
        return time.monotonic() - self._turned

    @property
    def load(self) -> QueueStats:
        """Rows under way, requests in the queue, rows in all."""
        return QueueStats(len(self._running), self._queued, self.rows)

    def _watch(self, most_still: float) -> None:
        """Tell whoever waits once it stands still: a thread cannot be ended, nor started again."""
        while self.alive:
            time.sleep(min(1.0, most_still / 4))
            if self.alive and self.still > most_still:
                lost = Broken(f"the engine ended no turn for {self.still:.0f} s")
                with self._lock:
                    self.fault, self._closing = lost, True
                self._give_up(lost)

    # ------------------------------------------------------------------ the thread's own

    def run(self) -> None:
        """Turns until it is closed; a fault is told to everybody who waits."""
        try:
            while not self._closing:
                self._turned = time.monotonic()
                self._take_orders()
                self._expire()
                self._schedule()
                for lane, run in self._runs.items():
                    if not run.done:
                        self._tell(lane, run)
                self._flush()
            self._give_up(EngineStoppedError("the server is closing"))
        except BaseException as error:
            with self._lock:
                self.fault = self.fault or error
            self._give_up(Broken(f"{type(error).__name__}: {error}"))
            raise

    def _take_orders(self) -> None:
        """All that are there; with nothing to do, wait for one."""
        idle = not self._running and not self._waiting
        while True:
            try:
                order = self._orders.get(timeout=0.5) if idle else self._orders.get_nowait()
            except queue.Empty:
                return
            order()
            idle = False

    def _expire(self) -> None:
        now = time.monotonic()
        every = [*self._waiting, *self._running.values()]
        for ticket in every:
            if ticket.deadline is not None and ticket.deadline < now:
                self._event(ticket, OutputEvent(error=TimeoutError(), over=True))
                self._end(ticket, "cancelled")

    def _schedule(self) -> None:
        while self._waiting and len(self._running) < self.rows:
            ticket = self._waiting[0]  # in the queue until it has a row: a fault is told to it, too
            ticket.scheduled = time.monotonic()
            try:
                run = self._run(ticket.lane)
                ticket.number = run.submit(ticket.request)
            except Exception as error:  # this request's own
                self._event(ticket, OutputEvent(error=_of_a_row(error), over=True))
            else:
                self._running[ticket.lane, ticket.number] = ticket
            self._waiting.popleft()
            self._left(1)

    def _run(self, lane: str) -> BatchRunner:
        if lane not in self._runs:
            self._runs[lane] = self._opened(lane)
        return self._runs[lane]

    def _tell(self, lane: str, run: BatchRunner) -> None:
        """One step of a lane."""
        began = time.perf_counter()
        blocks = run.step()
        step = self._step(lane, blocks, time.perf_counter() - began)
        for block in blocks:
            ticket = self._running.get((lane, block.row))
            if ticket is None:
                continue
            ticket.cached = run.cached(block.row)
            reason = block.finish_reason
            error = _of_a_row(run.errors[block.row]) if reason == "error" else None
            self._event(ticket, OutputEvent(block, error, reason is not None, step))
            ticket.begun, step = True, None
            if reason is not None:
                self._leave(ticket, run)

    def _step(
        self, lane: str, blocks: Sequence[StepOutput | TranscriptionOutput], seconds: float
    ) -> StepTiming | None:
        """The step that wrote these blocks; None where nothing was written, and for recordings."""
        wrote = [block for block in blocks if isinstance(block, StepOutput) and block.token_ids]
        if not wrote:
            return None
        tokens = sum(len(block.token_ids) for block in wrote)
        for block in wrote:
            ticket = self._running.get((lane, block.row))
            if ticket is not None and not ticket.begun and isinstance(ticket.request, Request):
                tokens += len(ticket.request.asked)
        return StepTiming(seconds, tokens, 1 + max(block.drafted for block in wrote))

    def _end(self, ticket: PendingRequest, reason: str) -> None:
        """End a request from outside, wherever it stands; one that is over stays so."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._left(1)
        elif ticket.number is not None and (ticket.lane, ticket.number) in self._running:
            run = self._runs[ticket.lane]
            run.end(ticket.number, reason)
            self._leave(ticket, run)
        ticket.over = True

    def _leave(self, ticket: PendingRequest, run: BatchRunner) -> None:
        assert ticket.number is not None
        del self._running[ticket.lane, ticket.number]
        run.release(ticket.number)

    def _left(self, count: int) -> None:
        with self._lock:
            self._queued -= count

    def _event(self, ticket: PendingRequest, event: OutputEvent) -> None:
        if not ticket.over:
            ticket.over = event.over
            self._events.append((ticket, event))

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self.deliver(events)

    def _give_up(self, error: BaseException) -> None:
        """Whoever waits hears that nothing will come."""
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                break
            with suppress(Exception):  # the engine may be broken; who waits matters
                order()
        for ticket in [*self._waiting, *self._running.values()]:
            self._event(ticket, OutputEvent(error=error, over=True))
        self._flush()


def _of_a_row(error: Exception) -> OutriderError:
    """What ended a row alone. Of what is not ours the kind is told: its words may quote a text."""
    if isinstance(error, OutriderError):
        return error
    return OutriderError(
        f"the decoding of this request failed; got {type(error).__name__}; ask once more, or "
        "without what limits its tokens"
    )


def dispatch(events: list[tuple[PendingRequest, OutputEvent]]) -> None:
    """Hand each ticket its events."""
    for ticket, event in events:
        ticket.sink(event)
