"""Who may come in, and with how much: keys, sizes of headers and bodies, time to send them.

An ASGI layer around the routes. What it refuses never reaches them.
"""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from outrider.server.errors import content

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

#: What a client without a key may ask for where one is needed.
OPEN = ("/health", "/ping")
_PATIENCE = 8  #: how many times too long a body may be before its sender is cut off


@dataclass(frozen=True)
class RequestLimits:
    """What a request may take."""

    body_bytes: int = 1 << 20
    header_bytes: int = 16 << 10
    body_seconds: float = 30.0
    depth: int | None = 32  #: of JSON; None: it is none


class _RequestRejected(Exception):
    """A request is refused."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class AuthLimitMiddleware:
    """The routes behind limits and keys; no keys: everybody may ask for everything."""

    app: App
    keys: Sequence[str] = ()
    open: Sequence[str] = OPEN
    limits: RequestLimits = RequestLimits()
    others: Mapping[str, RequestLimits] = field(default_factory=dict)  #: of some paths
    hosts: Sequence[str] = ()  #: what the header Host may name; none: anything

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            try:
                self._check_headers(scope)
            except _RequestRejected:
                with suppress(_RequestRejected):  # who still sends hears no answer
                    await self._body(scope, receive)
                raise
            whole = await self._body(scope, receive)
        except _RequestRejected as error:
            await _refuse(send, error)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": whole, "more_body": False}

        await self.app(scope, replay, send)

    def _check_headers(self, scope: Message) -> None:
        headers = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > self.limits.header_bytes:
            raise _RequestRejected(431, f"headers have more than {self.limits.header_bytes} bytes")
        self._check_host([value for name, value in headers if name == b"host"])
        if not self.keys or scope["path"] in self.open:
            return
        said = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = said.partition(b" ")
        if scheme.lower() != b"bearer":
            key = b""
        # all of them are compared, so that time tells nothing
        fits = [hmac.compare_digest(key, known.encode()) for known in self.keys]
        if not any(fits):
            raise _RequestRejected(
                401, "no valid key; send 'Authorization: Bearer KEY'", "invalid_api_key"
            )

    def _check_host(self, said: Sequence[bytes]) -> None:
        """Refuse a page that came by another name, which now means this machine (DNS rebinding)."""
        for value in said if self.hosts else ():
            name = host_of(value.decode("latin-1"))
            if name not in self.hosts:
                raise _RequestRejected(
                    403,
                    f"this server is not called {name!r}; ask it as {' or '.join(self.hosts)}, or "
                    f"start it with --allowed-host {name or 'NAME'} or with a key",
                    "invalid_host",
                )

    async def _body(self, scope: Message, receive: Receive) -> bytes:
        """All that the client sends; its own word about the length is not trusted."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return b""
        limits = self.others.get(scope["path"], self.limits)
        most, parts, size = limits.body_bytes, [], 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _RequestRejected(400, "the body broke off")
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    # what is too long is read on for a while: who still sends hears no answer
                    if not message.get("more_body", False) or size > _PATIENCE * most:
                        break
        except TimeoutError:
            raise _RequestRejected(408, f"no body within {limits.body_seconds:g} s") from None
        if size > most:
            raise _RequestRejected(413, f"the body has more than {most} bytes")
        whole = b"".join(parts)
        if limits.depth is not None and nesting(whole) > limits.depth:
            raise _RequestRejected(400, f"JSON is nested more than {limits.depth} levels deep")
        return whole


def host_of(value: str) -> str:
    """The name in a header Host, without the port.

    >>> host_of("LocalHost:8000"), host_of("[::1]:8000"), host_of("::1")
    ('localhost', '::1', '::1')
    """
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value if value.count(":") > 1 else value.partition(":")[0]


def nesting(text: bytes) -> int:
    """How deep brackets are nested outside strings.

    >>> nesting(b'{"a": [[1], "[[["]}')
    3
    """
    depth = deepest = 0
    inside = escaped = False
    for byte in text:
        if inside:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                inside = False
        elif byte == 0x22:
            inside = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


async def _refuse(send: Send, error: _RequestRejected) -> None:
    body = json.dumps(content(str(error), error.status, code=error.code)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
