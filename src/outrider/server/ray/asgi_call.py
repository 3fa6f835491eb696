"""An ASGI application asked in its own process, without a socket."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from outrider.server.middleware import App, Message

Header = tuple[bytes, bytes]


async def asked(
    app: App, method: str, path: str, headers: Sequence[Header], body: bytes
) -> AsyncIterator[Message]:
    """What an ASGI application says to a request; who stops listening has gone away."""
    told: asyncio.Queue[Message | None] = asyncio.Queue()
    gone, given = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal given
        if given:
            await gone.wait()
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": list(headers),
    }
    task = asyncio.ensure_future(app(scope, receive, told.put))
    task.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (message := await told.get()) is not None:
            yield message
        await task
    finally:
        gone.set()
        if not task.done():
            task.cancel()
