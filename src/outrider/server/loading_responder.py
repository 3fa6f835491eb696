"""Who answers while a model is loading: every request with a 503 that says so.

Needs nothing beside Python's own modules, none of this package's either, so that a server listens
before anything else is imported: torch and HTTP's packages take seconds on a slow core.
"""

import asyncio
import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterator

RETRY_SECONDS = 2  #: after which a client may ask again
_HEAD_SECONDS = 5.0  #: that a request's head may take
_HEAD_BYTES = 1 << 16
_DRAINED = 1 << 20  #: bytes of a body that are read, so that its sender reads the answer


@contextlib.contextmanager
def answering(place: socket.socket) -> Iterator[None]:
    """Listen at this bound socket, and answer all who ask until the block ends.

    `GET /health` gets {"status": "loading"}, anything else an error in OpenAI's form, both with
    status 503 and Retry-After. Who asks in between this and the server itself waits in the
    socket's queue.
    """
    place.listen()
    there = queue.SimpleQueue[asyncio.AbstractEventLoop]()
    answers = threading.Thread(target=_run, args=(place.dup(), there), daemon=True)
    answers.start()
    loop = there.get()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        answers.join()


def _run(place: socket.socket, there: queue.SimpleQueue[asyncio.AbstractEventLoop]) -> None:
    loop = asyncio.new_event_loop()  # not in the main thread: a signal would leave half of it
    asyncio.set_event_loop(loop)
    server = loop.run_until_complete(asyncio.start_server(_answer, sock=place, limit=_HEAD_BYTES))
    loop.call_soon(there.put, loop)
    try:
        loop.run_forever()
    finally:
        server.close()
        under_way = asyncio.all_tasks(loop)
        if under_way:
            loop.run_until_complete(asyncio.wait(under_way, timeout=1.0))
        for late in asyncio.all_tasks(loop):
            late.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request, one answer, and the connection ends."""
    with contextlib.suppress(OSError, EOFError, ValueError, asyncio.TimeoutError):
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(_response(head))
            await writer.drain()
            async with asyncio.timeout(0.2):
                await reader.read(_DRAINED)
        finally:
            writer.close()
            await writer.wait_closed()


def _response(head: bytes) -> bytes:
    """The answer to a request with this head.

    >>> _response(b"GET /health HTTP/1.1\\r\\n\\r\\n").split(b"\\r\\n")[0]
    b'HTTP/1.1 503 Service Unavailable'
    """
    path = head.split(b"\r\n")[0].split(b" ")[1:2]
    message = "the model is loading; ask again in some seconds (GET /health tells when it is ready)"
    error = {"message": message, "type": "server_error", "param": None, "code": "loading"}
    told: dict[str, object] = {"status": "loading"} if path == [b"/health"] else {"error": error}
    body = json.dumps(told).encode()
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"retry-after: {RETRY_SECONDS}",
        "connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
