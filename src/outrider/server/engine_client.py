"""What a server asks of an engine, wherever that decodes: here, or in another process.

`InProcessClient` has an `EngineLoop` in a thread of this process; `ProcessClient`
(`outrider.server.engine_process`) has one at the other end of a pipe.
"""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from outrider.engine.outputs import StepOutput
from outrider.server.engine_factory import EngineConfig, build_engine
from outrider.server.engine_loop import (
    AbortRequest,
    EngineOutput,
    EngineRequest,
    EngineStoppedError,
    OutputCallback,
    QueueFullError,
)
from outrider.server.model_info import ModelInfo
from outrider.text.speculator import Speculator

T = TypeVar("T")
LATE = 1.0  #: seconds behind a deadline in which an engine that works has said so
OutputSink = Callable[[EngineOutput], object]


class QueueStats(NamedTuple):
    """How busy an engine is."""

    running: int
    waiting: int
    rows: int


@dataclass(eq=False)
class OpenRequest:
    """A request that is not over, and what has come of it."""

    asked: EngineRequest
    sink: OutputSink
    had: list[int] = field(default_factory=list)  #: tokens
    begun: bool = False  #: whether anything has come
    over: bool = False  #: whether its last output has come, which is still to be dispatched
    unwanted: bool = False


class EngineClient(ABC):
    """Sends requests to an engine and hands what comes back to those who asked.

    known    what there is to know of its model
    rows     requests decoded side by side
    waiting  requests beyond those that may be open, too; more are refused
    deliver  has outputs as they come, on a thread of the engine's; by default it dispatches them
    """

    def __init__(self, known: ModelInfo, rows: int, waiting: int) -> None:
        self.known, self.rows, self._most = known, rows, rows + waiting
        self.deliver: OutputCallback = self.dispatch
        self._lock = threading.Lock()
        self._open: dict[int, OpenRequest] = {}
        self._closing = False

    # ------------------------------------------------------------------ for those who ask

    @property
    def load(self) -> QueueStats:
        """Who came first runs, as many as there are rows."""
        count = len(self._open)
        return QueueStats(min(count, self.rows), max(count - self.rows, 0), self.rows)

    def submit(self, requests: Sequence[EngineRequest], sink: OutputSink) -> None:
        """Send requests, all or none; `sink` has their outputs.

        Raises QueueFullError and EngineStoppedError.
        """
        with self._lock:
            if self.fault is not None or self._closing:
                raise EngineStoppedError
            if len(self._open) + len(requests) > self._most:
                raise QueueFullError
            self._send(requests)
            self._open |= {one.key: OpenRequest(one, sink) for one in requests}

    def abort(self, key: int, reason: str = "cancelled") -> None:
        """Nobody waits for it any more; its row is free at the next turn, and then it is over."""
        with self._lock:
            one = self._open.get(key)
            if one is not None and not one.over and not one.unwanted:
                one.unwanted = True
                self._send(AbortRequest(key, reason))

    async def stream(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[EngineOutput, None]:
        """What becomes of requests, as it comes; those that are not over at its end are aborted.

        Raises QueueFullError, EngineStoppedError, and TimeoutError soon after the last deadline if
        the engine does not say so first.
        """
        inbox: asyncio.Queue[EngineOutput] = asyncio.Queue()
        left = {one.key for one in requests}
        deadlines = [one.deadline for one in requests]
        last = max((at for at in deadlines if at is not None), default=None)
        self.submit(requests, inbox.put_nowait)
        try:
            while left:
                output = await within(inbox.get(), None if None in deadlines else last)
                if output.over:
                    left.discard(output.key)
                yield output
        finally:
            for key in left:
                self.abort(key)

    def dispatch(self, outputs: Sequence[EngineOutput]) -> None:
        """Hand outputs to those who wait for them."""
        for output in outputs:
            with self._lock:
                one = self._open.get(output.key)
                if output.over:
                    self._open.pop(output.key, None)
            if one is not None:
                one.sink(output)

    def close(self) -> None:
        """Take no more, end what runs, and stop. Whoever waits is told now, however long the step
        under way takes."""
        with self._lock:
            self._closing = True
            self._send(None)
            left = [key for key, one in self._open.items() if not one.over]
        why = EngineStoppedError("the server is closing")
        self._receive([EngineOutput(key, error=why, over=True) for key in left])

    # ------------------------------------------------------------------ an engine's own

    @property
    @abstractmethod
    def fault(self) -> BaseException | None:
        """What has ended it, if anything has."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it decodes."""

    @property
    @abstractmethod
    def still(self) -> float:
        """Seconds since it has last ended a turn."""

    @abstractmethod
    def start(self) -> None:
        """Begin to decode."""

    @abstractmethod
    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has stopped, so many seconds at most; whether it has."""

    @abstractmethod
    def _send(self, order: Sequence[EngineRequest] | AbortRequest | None) -> None:
        """An order on its way; None: it is to stop."""

    def _receive(self, outputs: list[EngineOutput]) -> None:
        """Outputs have come."""
        with self._lock:
            for output in outputs:
                if (one := self._open.get(output.key)) is not None:
                    one.begun |= output.block is not None
                    one.over |= output.over
                    if isinstance(output.block, StepOutput):
                        one.had += output.block.token_ids
        self.deliver(outputs)


class InProcessClient(EngineClient):
    """The client of a loop in a thread of this process.

    most_still  seconds without a turn's end after which it is given up; None: never
    """

    def __init__(
        self, speculator: Speculator, room: EngineConfig, most_still: float | None = None
    ) -> None:
        known, self._loop = build_engine(speculator, room, self._receive, most_still)
        super().__init__(known, room.max_num_seqs, room.max_queued_requests)

    @property
    def fault(self) -> BaseException | None:
        return self._loop.fault

    @property
    def alive(self) -> bool:
        return self._loop.alive and not self._closing

    @property
    def still(self) -> float:
        return self._loop.still

    def start(self) -> None:
        self._loop.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has stopped; one that was never started has."""
        if self._loop.ident is not None:
            self._loop.join(timeout)
        return not self._loop.is_alive()

    def _send(self, order: Sequence[EngineRequest] | AbortRequest | None) -> None:
        if order is None:
            self._loop.close()
        elif isinstance(order, AbortRequest):
            self._loop.abort(order)
        else:
            self._loop.submit(order)


async def within(work: Awaitable[T], deadline: float | None) -> T:
    """What `work` gives. Raises TimeoutError soon after the deadline, whatever the engine does.

    The engine says so first, if it is there to say anything.
    """
    if deadline is None:
        return await work
    left = deadline - time.monotonic()
    return await asyncio.wait_for(work, max(left, 0.0) + LATE)
