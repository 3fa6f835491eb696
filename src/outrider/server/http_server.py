"""uvicorn's server, which tells those who still wait that it is closing."""

import asyncio
import socket

import uvicorn

from outrider.server.app import Site

GRACE = 5.0  #: seconds in which answers under way may come to their end
_TOLD = 3  #: seconds in which those that did not are told


class HttpServer(uvicorn.Server):
    """Serves a site until a signal comes, and then what is under way for `grace` seconds more.

    What has not come to its end by then gets an error that says so: of a stream an event, else a
    503. uvicorn alone would cut connections off.
    """

    def __init__(self, site: Site, grace: float = GRACE) -> None:
        config = uvicorn.Config(
            site.app,
            log_level="warning",
            log_config=None,  # its own would close the handlers of everybody else's loggers
            timeout_graceful_shutdown=int(grace) + _TOLD,
        )
        super().__init__(config)
        self._engine, self._grace = site.loop, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nobody more, wait, and close."""
        late = asyncio.get_running_loop().call_later(self._grace, self._engine.close)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()
