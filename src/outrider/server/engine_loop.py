"""One thread that owns the live batch, and the messages between it and those who ask.

`EngineRequest` and `AbortRequest` go in, `EngineOutput` comes out: whoever asks, from this process
or another one (`outrider.server.engine_client`).

Each turn: orders (new requests, cancellations) are taken; who has waited longest of the least
priority gets a row; every lane with work makes one step; what was emitted is delivered. Nobody else
touches the engine.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.errors import OutriderError
from outrider.server.batch_runners import TranscriptionOutput, TranscriptionRequest

STILL_SECONDS = 120.0  #: without the end of a turn, after which an engine is taken to stand still


class QueueFullError(Exception):
    """The queue is as long as it may be."""


class EngineStoppedError(Exception):
    """The engine's thread has died, or is being closed."""


class Broken(Exception):
    """The engine has ended by a fault of its own."""


@dataclass(frozen=True, eq=False)
class EngineRequest:
    """One text or recording that an engine is asked for, as it crosses to it."""

    lane: str
    request: Request | TranscriptionRequest
    deadline: float | None = None  #: when it is given up, by `time.monotonic`
    arrived: float = field(default_factory=time.monotonic)
    priority: int = 0  #: of those who wait the least has the next row, and then who came first
    key: int = field(default_factory=itertools.count().__next__)  #: names it


class AbortRequest(NamedTuple):
    """Nobody waits for a request any more."""

    key: int
    reason: str


class StepTiming(NamedTuple):
    """What one step of a lane took and brought."""

    seconds: float
    tokens: int  #: written, with the prompts of those whose first tokens came
    nodes: int  #: most tokens that a row's draft was given, and its pending one


class EngineOutput(NamedTuple):
    """What has happened to a request: a block of its answer, or why there will be none.

    The last one is `over`; with neither a block nor an error it says that its abortion is done.
    """

    key: int
    block: StepOutput | TranscriptionOutput | None = None
    error: BaseException | None = None
    over: bool = False
    step: StepTiming | None = None  #: that brought the block: told with the first of its blocks
    scheduled: float | None = None  #: when a row was free for it
    cached: int = 0  #: tokens of its prompt that were copied from another one


OutputCallback = Callable[[list[EngineOutput]], None]


class BatchRunner(Protocol):
    """A lane's requests being decoded: an `outrider.EngineRun`, or recordings being transcribed."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""

    @property
    def errors(self) -> Mapping[int, Exception]:
        """Of requests that failed."""

    def submit(self, request: Any) -> int:
        """Take a request; its id."""

    def step(self) -> Sequence[StepOutput | TranscriptionOutput]:
        """One step of all of them, and what it brought; the last block of each says why it ends."""

    def end(self, request_id: int, reason: str) -> None:
        """Nobody wants it any more."""

    def release(self, request_id: int) -> object:
        """Keep nothing of a request that is over."""

    def cached(self, request_id: int) -> int:
        """Tokens of its prompt that were copied from another one."""


@dataclass(eq=False)
class _Scheduled:
    """A request that has a row."""

    asked: EngineRequest
    request_id: int  #: in its lane's run
    scheduled: float
    begun: bool = False  #: whether any of its answer has come


class EngineLoop(threading.Thread):
    """Decodes requests of all lanes, `rows` at a time: by priority, then first come first served.

    opened      makes a lane's run when its first request gets a row
    deliver     takes what has happened, once a turn, on this thread
    most_still  seconds without a turn's end after which it is given up; None: never
    ahead       what is done while nobody asks, a part at a time; True: lanes' runs are made anew
    """

    def __init__(
        self,
        opened: Callable[[str], BatchRunner],
        rows: int,
        deliver: OutputCallback,
        most_still: float | None = None,
        ahead: Iterator[bool] | None = None,
    ) -> None:
        super().__init__(name="outrider-engine", daemon=True)
        self._most_still = most_still
        self._opened, self.rows, self._deliver = opened, rows, deliver
        self._ahead = ahead
        self.fault: BaseException | None = None
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[int, EngineRequest] = {}  # by key, in the order in which they came
        self._running: dict[int, _Scheduled] = {}
        self._runs: dict[str, BatchRunner] = {}
        self._outputs: list[EngineOutput] = []
        self._closing = self._ended = False
        self._turned = time.monotonic()

    # ------------------------------------------------------------------ from any thread

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests. Raises EngineStoppedError."""
        with self._lock:
            if self._ended:
                raise EngineStoppedError
            self._orders.put(lambda: self._waiting.update({one.key: one for one in requests}))

    def abort(self, order: AbortRequest) -> None:
        """Nobody waits for it any more; its row is free at the next turn."""
        self._orders.put(lambda: self._abort(order))

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

    @property
    def alive(self) -> bool:
        return self.is_alive() and self.fault is None and not self._closing

    @property
    def still(self) -> float:
        """Seconds since it has last ended a turn; one that waits for work turns, too."""
        return time.monotonic() - self._turned

    def _watch(self, most_still: float) -> None:
        """Tell whoever waits once it stands still: a thread cannot be ended, nor started again."""
        while self.alive:
            time.sleep(min(1.0, most_still / 4))
            if self.alive and self.still > most_still:
                self.fault = Broken(f"the engine ended no turn for {self.still:.0f} s")
                self._closing = True
                self._give_up(self.fault)

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
                        self._step(lane, run)
                self._flush()
            self._give_up(EngineStoppedError("the server is closing"))
        except BaseException as error:
            self.fault = self.fault or error
            self._give_up(Broken(f"{type(error).__name__}: {error}"))
            raise

    def _take_orders(self) -> None:
        """All that are there; with nothing to do, do what can be done ahead, or wait for one."""
        idle = not self._running and not self._waiting
        waits = idle and self._ahead is None
        while True:
            try:
                order = self._orders.get(timeout=0.5) if waits else self._orders.get_nowait()
            except queue.Empty:
                if idle and not waits:
                    self._prepare()
                return
            order()
            idle = waits = False

    def _prepare(self) -> None:
        """One part of what is done ahead; runs that were made without it are over."""
        assert self._ahead is not None
        try:
            if next(self._ahead):
                self._runs.clear()
        except StopIteration:
            self._ahead = None

    def _expire(self) -> None:
        now = time.monotonic()
        every = [*self._waiting.values(), *(one.asked for one in self._running.values())]
        for one in every:
            if one.deadline is not None and one.deadline < now:
                scheduled = self._removed(one.key, "cancelled")
                late = EngineOutput(one.key, error=TimeoutError(), over=True, scheduled=scheduled)
                self._outputs.append(late)

    def _schedule(self) -> None:
        while self._waiting and len(self._running) < self.rows:
            # in the queue until it has a row: a fault is told to it, too
            asked = min(self._waiting.values(), key=attrgetter("priority"))
            key = asked.key
            now = time.monotonic()
            try:
                request_id = self._run(asked.lane).submit(asked.request)
            except Exception as error:  # this request's own
                own = _of_a_row(error)
                self._outputs.append(EngineOutput(key, error=own, over=True, scheduled=now))
            else:
                self._running[key] = _Scheduled(asked, request_id, now)
            del self._waiting[key]

    def _run(self, lane: str) -> BatchRunner:
        if lane not in self._runs:
            self._runs[lane] = self._opened(lane)
        return self._runs[lane]

    def _step(self, lane: str, run: BatchRunner) -> None:
        """One step of a lane."""
        began = time.perf_counter()
        blocks = run.step()
        seconds = time.perf_counter() - began
        scheduled = {
            one.request_id: one for one in self._running.values() if one.asked.lane == lane
        }
        step = _timing(scheduled, blocks, seconds)
        for block in blocks:
            one = scheduled.get(block.request_id)
            if one is None or one.asked.key not in self._running:
                continue
            cached, reason = run.cached(block.request_id), block.finish_reason
            error = _of_a_row(run.errors[block.request_id]) if reason == "error" else None
            over, key = reason is not None, one.asked.key
            self._outputs.append(EngineOutput(key, block, error, over, step, one.scheduled, cached))
            one.begun, step = True, None
            if over:
                self._leave(one, run)

    def _abort(self, order: AbortRequest) -> None:
        """End a request that is not over, and say so."""
        if order.key in self._waiting or order.key in self._running:
            scheduled = self._removed(order.key, order.reason)
            self._outputs.append(EngineOutput(order.key, over=True, scheduled=scheduled))

    def _removed(self, key: int, reason: str) -> float | None:
        """End a request from outside, wherever it stands; when it had got a row, if it had."""
        one = self._running.get(key)
        if one is None:
            del self._waiting[key]
            return None
        run = self._runs[one.asked.lane]
        run.end(one.request_id, reason)
        self._leave(one, run)
        return one.scheduled

    def _leave(self, one: _Scheduled, run: BatchRunner) -> None:
        del self._running[one.asked.key]
        run.release(one.request_id)

    def _flush(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._deliver(outputs)

    def _give_up(self, error: BaseException) -> None:
        """Whoever waits hears that nothing will come, once."""
        with self._lock:
            self._ended = True
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                break
            with suppress(Exception):  # the engine may be broken; who waits matters
                order()
        left, self._waiting, self._running = [*self._waiting, *self._running], {}, {}
        self._outputs += [EngineOutput(key, error=error, over=True) for key in left]
        self._flush()


def _timing(
    scheduled: Mapping[int, _Scheduled],
    blocks: Sequence[StepOutput | TranscriptionOutput],
    seconds: float,
) -> StepTiming | None:
    """Of the step that wrote these blocks; None where nothing was written, and for recordings."""
    wrote = [block for block in blocks if isinstance(block, StepOutput) and block.token_ids]
    if not wrote:
        return None
    tokens = sum(len(block.token_ids) for block in wrote)
    for block in wrote:
        one = scheduled.get(block.request_id)
        if one is not None and not one.begun and isinstance(one.asked.request, Request):
            tokens += len(one.asked.request.asked)
    return StepTiming(seconds, tokens, 1 + max(block.drafted for block in wrote))


def _of_a_row(error: Exception) -> OutriderError:
    """What ended a row alone. Of what is not ours the kind is told: its words may quote a text."""
    if isinstance(error, OutriderError):
        return error
    return OutriderError(
        f"the decoding of this request failed; got {type(error).__name__}; ask once more, or "
        "without what limits its tokens"
    )
