"""uvicorn's server, which tells those who still wait that it is closing."""

import asyncio
import math
import socket
from types import FrameType
from typing import Any, cast

import uvicorn

from outrider.server.app import Server

HEADER_SECONDS = 30.0  #: in which the head of a request must be there, from its first byte on
GRACE = 5.0  #: seconds in which answers under way may come to their end
_TOLD = 1.0  #: seconds in which those that did not are told, or cut off


class HeaderDeadline(asyncio.Protocol):
    """Closes connections whose next request has no whole head in time, over uvicorn's own.

    The time begins with the connection, and later with the first byte that comes while no request
    is under way; bytes that trickle in behind it do not prolong it.
    """

    seconds: float = HEADER_SECONDS
    cycle: Any  #: uvicorn's: the request under way, or the last one
    _late: asyncio.TimerHandle | None = None
    _to: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody is there."""
        super().connection_made(transport)
        self._to = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._wait()

    def data_received(self, data: bytes) -> None:
        """A part of a request, or several requests."""
        super().data_received(data)
        if self._reading:
            self._wait()
        else:
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._rest()
        super().connection_lost(exc)

    @property
    def _reading(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _wait(self) -> None:
        if self._late is None:
            self._late = asyncio.get_running_loop().call_later(self.seconds, self._close)

    def _rest(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        self._late = None
        if self._to is not None and self._reading:
            self._to.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\r\n")
            self._to.close()


class TimedConfig(uvicorn.Config):
    """uvicorn's configuration, whose connections have a deadline for heads of requests."""

    def load(self) -> None:
        """Choose what speaks HTTP."""
        super().load()
        kind: Any = self.http_protocol_class
        self.http_protocol_class = type("Timed", (HeaderDeadline, kind), {})


class HttpServer(uvicorn.Server):
    """Serves a site until a signal comes, and then what is under way for `grace` seconds more.

    What has not come to its end by then gets an error that says so: of a stream an event, else a
    503. uvicorn alone would cut connections off; here those are whose clients do not read what they
    are told, or have not sent all of what they ask. A second signal ends the wait, and a third
    one is uvicorn's own second: it waits for no handler either. One that `ends` does so when its
    engine has, too.
    """

    def __init__(self, site: Server, grace: float = GRACE, ends: bool = False) -> None:
        config = TimedConfig(
            site.app,
            ws="none",
            log_level="warning",
            log_config=None,  # its own would close the handlers of everybody else's loggers
            timeout_graceful_shutdown=math.ceil(grace + _TOLD) + 1,  # of what waits for neither
        )
        super().__init__(config)
        self._engine, self._grace, self._ends = site.engine, grace, ends
        self._hurried = False  #: whether a signal came while it was ending
        self._loop: asyncio.AbstractEventLoop | None = None  #: while it waits for answers to end

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal; uvicorn would leave at the second one, with a traceback for each connection."""
        if not self.should_exit:
            super().handle_exit(sig, frame)
            return
        self.force_exit = self._hurried  # the third: handlers may wait for what never comes
        self._hurried = True
        self._grace = 0.0
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._engine.close)
            self._loop.call_soon_threadsafe(self._loop.call_later, _TOLD, self._cut_off)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; an engine that is gone for good ends its server."""
        if self._ends and self._engine.fault is not None:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nobody more, wait, and close."""
        self._loop = asyncio.get_running_loop()
        later = self._loop.call_later
        late = later(self._grace, self._engine.close), later(self._grace + _TOLD, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            self._loop = None
            for each in late:
                each.cancel()

    def _cut_off(self) -> None:
        """Close what is open still: those who wait there were told."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
