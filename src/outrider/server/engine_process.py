"""The loop in a process of its own: orders go there, outputs come back once a turn.

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
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from llguidance import LLTokenizer

from outrider.engine.request import Request
from outrider.errors import ConfigurationError, OutriderError
from outrider.models.cpu_kernels import build
from outrider.models.program_imports import run_lean
from outrider.server.engine_client import EngineClient, OpenRequest
from outrider.server.engine_factory import EngineConfig, build_engine
from outrider.server.engine_loop import (
    STILL_SECONDS,
    AbortRequest,
    Broken,
    EngineLoop,
    EngineOutput,
    EngineRequest,
    EngineStoppedError,
)
from outrider.server.grammar import vocabulary
from outrider.server.model_info import ModelInfo, TextModelInfo
from outrider.text.speculator import Speculator

PATIENCE = 120.0  #: seconds from its start that an engine waits for kernels being compiled
_BEAT = 1.0  #: seconds between signs of life
_RECENTLY, _MOST_STARTS = 600.0, 3  #: so many starts in so many seconds, and no more
_log = logging.getLogger("outrider.server")
_PATIENCE = 5.0  #: seconds in which the other process ends once nobody wants it


class Pulse(NamedTuple):
    """A sign of life: how long ago the loop has ended a turn."""

    still: float


class EngineDeadError(Broken):
    """The other process has ended by itself."""


def launch_engine(
    load: Callable[[], Speculator], room: EngineConfig, still: float = STILL_SECONDS
) -> "ProcessClient":
    """A process in which `load` makes a speculator, and a loop over it. Both are pickled.

    It is started again if it ends by itself, or ends no turn for `still` seconds: texts go on.
    Raises what `load` raises, and EngineDeadError if the process ends before it is ready. To be
    called in the main thread.
    """
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    entry = pickle.dumps(partial(run_engine_process, load=load, room=room))

    def begin() -> tuple[Connection, BaseProcess]:
        here, there = context.Pipe()
        process = context.Process(target=run_lean, args=(entry, there), name="outrider-engine")
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
    return ProcessClient(here, process, room, begin, still)


class ProcessClient(EngineClient):
    """The client of a loop at the other end of a pipe, in a process that ends with this one.

    begin  starts another such process where this one ends by itself; None: nothing does
    still  seconds without a turn's end after which it is killed, and so started again
    """

    def __init__(
        self,
        pipe: Connection,
        process: BaseProcess,
        room: EngineConfig,
        begin: Callable[[], tuple[Connection, BaseProcess]] | None = None,
        still: float = STILL_SECONDS,
    ) -> None:
        self._pipe, self._process = pipe, process
        self._begin, self._most_still = begin, still
        self._life, self._starts, self._reviving = 0, deque[float](), False
        self._fault: EngineDeadError | None = None
        self._orders: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        super().__init__(self._introduction(), room.max_num_seqs, room.max_queued_requests)
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

    @property
    def fault(self) -> EngineDeadError | None:
        """That the process has ended, and is not started again."""
        return self._fault

    @property
    def alive(self) -> bool:
        return self._fault is None and not self._closing and not self._reviving

    @property
    def still(self) -> float:
        return time.monotonic() - self._pulse

    def start(self) -> None:
        """It decodes from the beginning."""

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has stopped; after that time it is stopped."""
        self._listener.join(timeout)
        if self._listener.is_alive():
            self._process.kill()
            self._listener.join()
        return True

    def _send(self, order: Sequence[EngineRequest] | AbortRequest | None) -> None:
        self._orders.put((self._life, _pickled(order)))

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
        while self._fault is None and not self._closing:
            time.sleep(min(1.0, self._most_still / 4))
            if self.still > self._most_still and not self._reviving:
                _log.error("the engine ended no turn for %.0f s; it is started again", self.still)
                self._pulse = time.monotonic()
                self._process.kill()

    def _listen(self) -> None:
        """Outputs, as long as there are any; then the requests that are open have an error."""
        while True:
            with suppress(EOFError, OSError):
                while True:
                    said: list[EngineOutput] | Pulse = self._pipe.recv()
                    if isinstance(said, Pulse):
                        self._pulse = time.monotonic() - said.still
                    else:
                        self._receive(said)
            error = self._loss()
            if not self._revived(error):
                break
        with self._lock:
            if not self._closing:
                self._fault = error
            left = [key for key, one in self._open.items() if not one.over]
        self._receive([EngineOutput(key, error=error, over=True) for key in left])

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
            again, lost = list[EngineRequest](), list[EngineOutput]()
            for key, one in self._open.items():
                if (order := _again(one)) is not None:
                    again.append(order)
                elif not one.over:
                    why = None if one.unwanted else loss
                    lost.append(EngineOutput(key, error=why, over=True))
            self._send(again)
            if self._closing:
                self._send(None)
            self._reviving, self._pulse = False, time.monotonic()
        self._receive(lost)
        return True

    def _loss(self) -> EngineDeadError:
        self._process.join(_PATIENCE)
        return EngineDeadError(
            f"the engine's process has ended; got exit code {self._process.exitcode}"
        )


def _again(one: OpenRequest) -> EngineRequest | None:
    """What is asked of another process, behind what has come; None: that cannot be gone on with."""
    request = one.asked.request
    if one.over or one.unwanted or (one.begun and not isinstance(request, Request)):
        return None
    if not one.had or not isinstance(request, Request):
        return one.asked
    most = request.limits.max_new_tokens
    left = None if most is None else most - len(one.had)
    if left is not None and left < 1:
        return None
    return replace(
        one.asked,
        request=replace(
            request,
            prompt=[*request.prompt, *one.had],
            limits=replace(request.limits, max_new_tokens=left),
            written=request.written + len(one.had),
        ),
    )


# ---------------------------------------------------------------------- in the other process


def run_engine_process(
    pipe: Connection, load: Callable[[], Speculator], room: EngineConfig
) -> None:
    """Take orders from a pipe and send outputs there, until nobody is at its other end."""
    if multiprocessing.parent_process() is not None:  # one that was started later has the usual
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
    # It answers for as long as the server lives, and one that takes its place rounds as it does:
    # neither is to go on without kernels that are still being compiled.
    build.be_patient(PATIENCE)
    telling = threading.Lock()  # the loop's thread, the one that beats, and this one

    def tell(said: list[EngineOutput] | Pulse) -> None:
        with telling:
            pipe.send_bytes(pickle.dumps(said, pickle.HIGHEST_PROTOCOL))

    def deliver(outputs: list[EngineOutput]) -> None:
        with suppress(OSError):
            tell(
                [
                    one if one.error is None else one._replace(error=_portable(one.error))
                    for one in outputs
                ]
            )

    try:
        known, loop = build_engine(load(), room, deliver)
    except Exception as error:
        pipe.send(_portable(error))
        return
    with suppress(OSError):
        pipe.send(known)

    def live() -> None:
        with suppress(OSError):
            while loop.fault is None:
                time.sleep(_BEAT)
                tell(Pulse(loop.still))

    threading.Thread(target=live, daemon=True).start()
    threading.Thread(target=_handle_commands, args=(pipe, known, loop), daemon=True).start()
    loop.run()  # a fault of it is this process's


def _handle_commands(pipe: Connection, known: ModelInfo, loop: EngineLoop) -> None:
    """Orders, one after the other. Whatever ends them ends the loop."""
    try:
        while (order := _Unpickler(pipe.recv_bytes(), known).load()) is not None:
            if isinstance(order, AbortRequest):
                loop.abort(order)
            else:
                loop.submit(order)
    except (EOFError, OSError, EngineStoppedError):
        pass  # nobody is there any more, at one end or the other
    finally:
        loop.close()


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


def _pickled(order: Sequence[EngineRequest] | AbortRequest | None) -> bytes:
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(order)
    return data.getvalue()
