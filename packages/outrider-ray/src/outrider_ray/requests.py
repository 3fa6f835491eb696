"""Requests between replicas: where each goes, how it is asked, what was sent of its stream.

What was sent is enough for another replica to go on with it.

A seeded request is decoded with noise that is keyed by seed and place, so its text goes on as it
would have. Without a seed what comes is drawn anew behind what was sent, which is the same law.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from outrider.server.messages import JsonObject
from outrider.server.middleware import App, Message
from outrider.server.protocol import BaseRequest

# Which replica a request goes to: those that begin alike meet, where their prompt was read.

HEAD = 1024  #: characters of a prompt that say where it goes


def key(body: Mapping[str, Any]) -> str:
    """What requests have in common that should meet: `prompt_cache_key`, or how prompts begin.

    >>> key({"prompt": "def f(x):", "prompt_cache_key": "mine"}), key({"prompt": "def f(x):"})
    ('mine', '"def f(x):"')
    """
    told = body.get("prompt_cache_key")
    if isinstance(told, str):
        return told
    return json.dumps(body.get("prompt", body.get("messages")))[:HEAD]


def ranked(key: str, names: Sequence[str]) -> list[str]:
    """Names by preference of a key: when one comes or goes, no other two change places.

    Rendezvous hashing (Thaler and Ravishankar 1998).

    >>> first, second, third = ranked("a prompt", ["x", "y", "z"])
    >>> ranked("a prompt", [third, second]) == [second, third]
    True
    """
    return sorted(names, key=lambda name: blake2b(f"{name}\n{key}".encode()).digest())


# An ASGI application asked in its own process, without a socket.

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


Chunk = JsonObject


class StreamState:
    """A stream as its client has it, from whatever replicas its chunks come."""

    def __init__(self, asked: Mapping[str, Any], body: BaseRequest) -> None:
        self._asked, self._told_ids = asked, body.return_token_ids
        self._sent: dict[int, JsonObject] = {}
        self._name: Chunk = {}

    def body(self) -> JsonObject:
        """What the next replica is asked for."""
        options = {**(self._asked.get("stream_options") or {}), "include_obfuscation": False}
        more: JsonObject = {"return_token_ids": True, "stream_options": options}
        if self._sent:
            more["resume"] = [self._sent[index] for index in sorted(self._sent)]
        return {**self._asked, **more}

    def append(self, chunk: Chunk) -> Chunk | None:
        """A chunk as the client gets it; None for what it has already."""
        self._name = self._name or {"id": chunk["id"], "created": chunk["created"]}
        pieces = [piece for piece in chunk["choices"] if self._new(piece)]
        if chunk["choices"] and not pieces:
            return None
        return self._shown(chunk) | self._name | {"choices": [*map(self._shown, pieces)]}

    def _new(self, piece: Chunk) -> bool:
        """Whether it tells something; what opens a choice is told once."""
        fresh = {"token_ids": [], "characters": 0, "finish_reason": None}
        opens = piece["index"] not in self._sent
        sent = self._sent.setdefault(piece["index"], fresh)
        if "token_ids" not in piece:
            return opens
        # thoughts and calls are not counted: where there are any, the tokens say what was told
        text = piece["delta"].get("content", "") if "delta" in piece else piece["text"]
        sent["token_ids"] += piece["token_ids"]
        sent["characters"] += len(text)
        sent["finish_reason"] = piece["finish_reason"]
        return True

    def _shown(self, told: Chunk) -> Chunk:
        """A chunk, or a piece of one, without ids that the client has not asked for."""
        if self._told_ids:
            return told
        own = ("token_ids", "prompt_token_ids")
        return {name: value for name, value in told.items() if name not in own}
