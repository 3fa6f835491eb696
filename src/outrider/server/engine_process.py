"""The loop in a process of its own: orders go there, events come back once a turn.

HTTP, JSON and words need the interpreter's lock that the thread which decodes needs, too; in two
processes neither waits for the other. What crosses is pickled: lists of requests one way, blocks of
tokens the other way. Texts, schemas and clients stay on this side, the model and the loop on that
one.
"""

import io
import logging
import multiprocessing
import pickle
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from llguidance import LLTokenizer

from outrider.engine.outputs import StepOutput
from outrider.engine.request import Request
from outrider.errors import ConfigurationError, OutriderError
from outrider.models.cpu_kernels import build
from outrider.server.batch_runners import TranscriptionRequest
from outrider.server.engine_factory import EngineConfig, build_engine
from outrider.server.engine_loop import (
    STILL_SECONDS,
    Broken,
    EngineLoop,
    EngineStoppedError,
    OutputCallback,
    OutputEvent,
    PendingRequest,
    QueueFullError,
    QueueStats,
    dispatch,
)
from outrider.server.grammar import vocabulary
from outrider.server.model_info import ModelInfo, TextModelInfo
from outrider.text.speculator import Speculator

PATIENCE = 120.0  #: seconds from its start that an engine waits for kernels being compiled
_BEAT = 1.0  #: seconds between signs of life
_RECENTLY, _MOST_STARTS = 600.0, 3  #: so many starts in so many seconds, and no more
_log = logging.getLogger("outrider.server")
_PATIENCE = 5.0  #: seconds in which the other process ends once nobody wants it


class AddRequest(NamedTuple):
    """A ticket on its way."""

    key: int
    lane: str
    request: Request | TranscriptionRequest
    deadline: float | None
    arrived: float


class AbortRequest(NamedTuple):
    """Nobody waits for a ticket any more."""

    key: int
    reason: str


class RequestOutput(NamedTuple):
    """An event on its way, with what the loop has noted on its ticket."""

    key: int
    event: OutputEvent
    scheduled: float | None
    cached: int


class Pulse(NamedTuple):
    """A sign of life: how long ago the loop has ended a turn."""

    still: float


class EngineDeadError(Broken):
    """The other process has ended by itself."""


def launch_engine(
    load: Callable[[], Speculator], room: EngineConfig, still: float = STILL_SECONDS
) -> "EngineClient":
    """A process in which `load` makes a speculator, and a loop over it. Both are pickled.

    It is started again if it ends by itself, or ends no turn for `still` seconds: texts go on.
    Raises what `load` raises, and EngineDeadError if the process ends before it is ready. To be
    called in the main thread.
    """
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork

    def begin() -> tuple[Connection, BaseProcess]:
        here, there = context.Pipe()
        process = context.Process(
            target=run_engine_process, args=(there, load, room), name="outrider-engine"
        )
        process.start()
        there.close()
        return here, process

    # Ctrl-C goes to both processes, and so does a service manager's SIGTERM; this one answers who
    # waits, and then ends the other
    before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        here, process = begin()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    return EngineClient(here, process, room.max_num_seqs, begin, still)


class EngineClient:
    """A `EngineProtocol` whose loop is at the other end of a pipe, in a process that ends with this
    one.

    known  what that process says of its model
    begin  starts another such process where this one ends by itself; None: nothing does
    still  seconds without a turn's end after which it is killed, and so started again
    """

    def __init__(
        self,
        pipe: Connection,
        process: BaseProcess,
        rows: int,
        begin: Callable[[], tuple[Connection, BaseProcess]] | None = None,
        still: float = STILL_SECONDS,
    ) -> None:
        self._pipe, self._process, self.rows = pipe, process, rows
        self._begin, self._most_still = begin, still
        self._life, self._starts, self._reviving = 0, deque[float](), False
        self._pulse = time.monotonic()
        self.deliver: OutputCallback = dispatch
        self.fault: BaseException | None = None
        self._lock = threading.Lock()
        self._open: dict[int, PendingRequest] = {}
        self._orders: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._closing = False
        self.known = self._introduction()
        self._pulse = time.monotonic()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._write, daemon=True).start()
        if begin is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    def _introduction(self) -> ModelInfo:
        """What the other process says first."""
        try:
            said: ModelInfo | Exception = self._pipe.recv()
        except EOFError:
            raise self._loss() from None
        except BaseException:  # asked to end while the model is loaded
            self._process.kill()  # it hears no other signal
            raise
        if isinstance(said, Exception):
            raise said
        return said

    # ------------------------------------------------------------------ a Decoder's

    @property
    def alive(self) -> bool:
        """Whether it decodes."""
        return self.fault is None and not self._closing and not self._reviving

    @property
    def still(self) -> float:
        """Seconds since it has last ended a turn."""
        return time.monotonic() - self._pulse

    @property
    def load(self) -> QueueStats:
        """As of what is known here: who came first runs, as many as there are rows."""
        count = len(self._open)
        return QueueStats(min(count, self.rows), max(count - self.rows, 0), self.rows)

    def submit(self, tickets: Sequence[PendingRequest]) -> None:
        """Send requests, all or none. Raises Stopped; events of the tickets say if it is Full."""
        asked = [AddRequest(t.key, t.lane, t.request, t.deadline, t.arrived) for t in tickets]
        with self._lock:
            if self.fault is not None or self._closing:
                raise EngineStoppedError
            self._open |= {ticket.key: ticket for ticket in tickets}
            self._orders.put((self._life, _pickled(asked)))

    def cancel(self, ticket: PendingRequest, reason: str = "cancelled") -> None:
        """Nobody waits for it any more; its row is free at the next turn."""
        with self._lock:
            if self._open.pop(ticket.key, None) is not None:
                ticket.over = True
                self._orders.put((self._life, _pickled(AbortRequest(ticket.key, reason))))

    def start(self) -> None:
        """It decodes from the beginning."""

    def close(self) -> None:
        """Take no more, end what runs, and stop."""
        with self._lock:
            self._closing = True
            self._orders.put((self._life, _pickled(None)))

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has stopped; after that time it is stopped."""
        self._listener.join(timeout)
        if self._listener.is_alive():
            self._process.kill()
            self._listener.join()

    # ------------------------------------------------------------------ threads of its own

    def _write(self) -> None:
        """Orders, so that a long recording holds nobody up who gives another."""
        while True:
            life, order = self._orders.get()
            with self._lock:
                pipe = self._pipe if life == self._life else None
            with suppress(OSError):  # of a process that has ended: what is open is asked again
                if pipe is not None:
                    pipe.send_bytes(order)

    def _watch(self) -> None:
        """Kill a process that ends no turn; what listens to it starts another."""
        while self.fault is None and not self._closing:
            time.sleep(min(1.0, self._most_still / 4))
            if self.still > self._most_still and not self._reviving:
                _log.error("the engine ended no turn for %.0f s; it is started again", self.still)
                self._pulse = time.monotonic()
                self._process.kill()

    def _listen(self) -> None:
        """Events, as long as there are any; then the tickets that are open have an error."""
        while True:
            with suppress(EOFError, OSError):
                while True:
                    self._on_outputs(self._pipe.recv())
            error = self._loss()
            if not self._revived(error):
                break
        with self._lock:
            if not self._closing:
                self.fault = error
            left, self._open = list(self._open.values()), {}
        why = self.fault or EngineStoppedError("the server is closing")
        self._give([(ticket, OutputEvent(error=why, over=True)) for ticket in left])

    def _revived(self, loss: EngineDeadError) -> bool:
        """Start another process in place of one that has ended; what is open goes on there."""
        now = time.monotonic()
        while self._starts and self._starts[0] < now - _RECENTLY:
            self._starts.popleft()
        if self._closing or self._begin is None or len(self._starts) >= _MOST_STARTS:
            return False
        _log.error("%s; another one is started", loss)
        self._starts.append(now)
        self._reviving = True
        try:
            pipe, self._process = self._begin()
            before, self._pipe = self._pipe, pipe
            before.close()
            self._introduction()
        except Exception:
            _log.exception("the engine cannot be started again")
            return False
        with self._lock:
            self._life += 1  # orders to the one before it are void
            again = [order for ticket in self._open.values() if (order := _again(ticket))]
            self._orders.put((self._life, _pickled(again)))
            if self._closing:
                self._orders.put((self._life, _pickled(None)))
            lost = [ticket for ticket in self._open.values() if _again(ticket) is None]
            self._reviving, self._pulse = False, time.monotonic()
        self._give([(ticket, OutputEvent(error=loss, over=True)) for ticket in lost])
        return True

    def _on_outputs(self, said: Sequence[RequestOutput] | Pulse) -> None:
        if isinstance(said, Pulse):
            self._pulse = time.monotonic() - said.still
            return
        events = []
        for key, event, scheduled, cached in said:
            ticket = self._open.get(key)
            if ticket is not None:
                ticket.scheduled, ticket.cached = scheduled, cached
                ticket.begun |= event.block is not None
                if isinstance(event.block, StepOutput):
                    ticket.had += event.block.token_ids
                events.append((ticket, event))
        self._give(events)

    def _give(self, events: list[tuple[PendingRequest, OutputEvent]]) -> None:
        for ticket, event in events:
            ticket.over = event.over
            if event.over:
                self._open.pop(ticket.key, None)
        self.deliver(events)

    def _loss(self) -> EngineDeadError:
        self._process.join(_PATIENCE)
        return EngineDeadError(
            f"the engine's process has ended; got exit code {self._process.exitcode}"
        )


def _again(ticket: PendingRequest) -> AddRequest | None:
    """What is asked of another process, behind what is told; None: that cannot be gone on with."""
    request = ticket.request
    if not isinstance(request, Request):
        if ticket.begun:
            return None
    elif ticket.had:
        most = request.limits.max_new_tokens
        left = None if most is None else most - len(ticket.had)
        if left is not None and left < 1:
            return None
        request = replace(
            request,
            prompt=[*request.prompt, *ticket.had],
            limits=replace(request.limits, max_new_tokens=left),
            written=request.written + len(ticket.had),
        )
    return AddRequest(ticket.key, ticket.lane, request, ticket.deadline, ticket.arrived)


# ---------------------------------------------------------------------- in the other process


def run_engine_process(
    pipe: Connection, load: Callable[[], Speculator], room: EngineConfig
) -> None:
    """Take orders from a pipe and tell events there, until nobody is at its other end."""
    if multiprocessing.parent_process() is not None:  # one that was started later has the usual
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
    # It answers for as long as the server lives, and one that takes its place rounds as it does:
    # neither is to go on without kernels that are still being compiled.
    build.PATIENCE = PATIENCE
    try:
        known, loop = build_engine(load(), room)
    except Exception as error:
        pipe.send(_portable(error))
        return
    tickets: dict[int, PendingRequest] = {}
    telling = threading.Lock()  # the loop's thread and the one that takes orders

    def deliver(events: list[tuple[PendingRequest, OutputEvent]]) -> None:
        said = []
        for ticket, event in events:
            if event.error is not None:
                event = event._replace(error=_portable(event.error))
            if event.over:
                tickets.pop(ticket.key, None)
            said.append(RequestOutput(ticket.key, event, ticket.scheduled, ticket.cached))
        with telling, suppress(OSError):
            pipe.send_bytes(pickle.dumps(said, pickle.HIGHEST_PROTOCOL))

    loop.deliver = deliver
    with suppress(OSError):
        pipe.send(known)

    def live() -> None:
        with suppress(OSError):
            while loop.fault is None:
                time.sleep(_BEAT)
                with telling:
                    pipe.send_bytes(pickle.dumps(Pulse(loop.still), pickle.HIGHEST_PROTOCOL))

    threading.Thread(target=live, daemon=True).start()
    obey = threading.Thread(target=_handle_commands, args=(pipe, known, loop, tickets), daemon=True)
    obey.start()
    loop.run()  # a fault of it is this process's


def _handle_commands(
    pipe: Connection, known: ModelInfo, loop: EngineLoop, tickets: dict[int, PendingRequest]
) -> None:
    """Orders, one after the other. Whatever ends them ends the loop."""
    try:
        while (order := _Unpickler(pipe.recv_bytes(), known).load()) is not None:
            if isinstance(order, AbortRequest):
                if (dropped := tickets.pop(order.key, None)) is not None:
                    loop.cancel(dropped, order.reason)
                continue
            fresh = [
                PendingRequest(lane, request, _nothing, deadline, arrived, key=key)
                for key, lane, request, deadline, arrived in order
            ]
            tickets |= {ticket.key: ticket for ticket in fresh}
            try:
                loop.submit(fresh)
            except (QueueFullError, EngineStoppedError) as error:
                loop.deliver([(ticket, OutputEvent(error=error, over=True)) for ticket in fresh])
    except (EOFError, OSError):
        pass  # nobody is there any more
    finally:
        loop.close()


def _nothing(event: OutputEvent) -> None:
    """Events are told to the other process."""


def _portable(error: BaseException) -> BaseException:
    """The error if it can be pickled, or one that says the same."""
    with suppress(Exception):
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    if isinstance(error, ConfigurationError):  # UnknownName takes more than a message
        return ConfigurationError(str(error))
    if isinstance(error, OutriderError):
        return OutriderError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Pickler(pickle.Pickler):
    """A grammar's words are those of the tokenizer, which both sides have."""

    def persistent_id(self, value: Any) -> str | None:
        """Names them."""
        return "words" if isinstance(value, LLTokenizer) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: ModelInfo) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def persistent_load(self, name: Any) -> LLTokenizer:
        """The words of this side."""
        assert isinstance(self._known, TextModelInfo)
        known = self._known
        return vocabulary(known.tokenizer, known.vocab_size, known.eos_ids)


def _pickled(order: Sequence[AddRequest] | AbortRequest | None) -> bytes:
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(order)
    return data.getvalue()
