"""Where a fleet's requests come in. A stream whose replica dies goes on from another one."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError
from pydantic_core import to_json
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from outrider.server.app import CHATS, COMPLETIONS
from outrider.server.errors import content
from outrider.server.middleware import Message, RequestLimits
from outrider.server.protocol import (
    BaseRequest,
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from outrider.server.serving import event
from outrider_ray.requests import StreamState, key

_BODIES: dict[str, type[BaseRequest]] = {
    COMPLETIONS: CompletionRequest,
    CHATS: ChatCompletionRequest,
}
_ATTEMPTS = 8  #: replicas that may die under one request
_PAUSE = 0.5  #: seconds before another replica is asked

_log = logging.getLogger(__name__)


class _Lost(Exception):
    """The replica has died, or is about to."""


class Ingress:
    """Hands requests to replicas and their answers back. Nobody but it knows that replicas die."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._ask = replicas.options(stream=True, method_name="ask")

    async def __call__(self, http: HttpRequest) -> Response:
        """One request."""
        body = await http.body()
        try:
            asked = json.loads(body) if len(body) <= RequestLimits().body_bytes else None
        except (ValueError, RecursionError):
            asked = None  # a replica says what is wrong with it
        if isinstance(asked, dict) and asked.get("stream") and http.url.path in _BODIES:
            try:
                kind = _BODIES[http.url.path].model_validate(asked)
            except ValidationError:
                pass
            else:
                return await self._streamed(http, asked, kind)
        return await self._whole(http, body, key(asked) if isinstance(asked, dict) else "")

    async def _whole(self, http: HttpRequest, body: bytes, key: str) -> Response:
        """An answer in one piece; of a replica that died nothing was told, so it is asked again."""
        for _ in range(_ATTEMPTS):
            start, said = None, b""
            try:
                async for message in self._messages(http, body, key):
                    start = start or message
                    said += message.get("body", b"")
            except _Lost:
                await asyncio.sleep(_PAUSE)
                continue
            assert start is not None
            return Response(said, start["status"], _headers(start))
        return _gone()

    async def _streamed(
        self, http: HttpRequest, asked: Mapping[str, object], body: BaseRequest
    ) -> Response:
        going = StreamState(asked, body)
        options = body.stream_options or StreamOptions()
        for _ in range(_ATTEMPTS):
            messages = self._messages(http, json.dumps(going.body()).encode(), key(asked))
            try:
                start = await anext(messages)
                if start["status"] == 200:
                    events = self._events(http, going, messages, options, key(asked))
                    return StreamingResponse(
                        events, media_type="text/event-stream", headers=_headers(start)
                    )
                said = b"".join([message.get("body", b"") async for message in messages])
                return Response(said, start["status"], _headers(start))
            except _Lost:
                await asyncio.sleep(_PAUSE)
        return _gone()

    async def _events(
        self,
        http: HttpRequest,
        going: StreamState,
        messages: AsyncGenerator[Message, None],
        options: StreamOptions,
        key: str,
    ) -> AsyncIterator[bytes]:
        """The stream's events, from one replica after another."""
        for attempt in range(_ATTEMPTS):
            try:
                if attempt:
                    body = json.dumps(going.body()).encode()
                    messages = self._messages(http, body, key)
                    if (await anext(messages))["status"] != 200:
                        raise _Lost
                async for said in _said(messages):
                    if said == b"[DONE]":
                        yield b"data: [DONE]\n\n"
                        return
                    chunk = json.loads(said)
                    if "error" in chunk:
                        yield b"data: " + said + b"\n\n"
                        return
                    mine = going.append(chunk)
                    if mine is not None:
                        yield event(to_json(mine), options)
                raise _Lost  # a stream that ends without saying so
            except _Lost:
                _log.warning("a replica was lost in mid-stream; another one goes on")
                await asyncio.sleep(_PAUSE)
            finally:
                await messages.aclose()
        yield b"data: " + json.dumps(content(_NOBODY, 503)).encode() + b"\n\n"

    async def _messages(
        self, http: HttpRequest, body: bytes, key: str
    ) -> AsyncGenerator[Message, None]:
        """What a replica says. Raises _Lost if it dies."""
        headers = [(name, value) for name, value in http.headers.raw if name != b"content-length"]
        answer = self._ask.remote(http.method, http.url.path, headers, body, key=key)
        try:
            async for message in answer:
                yield message
        except RayActorError as error:
            raise _Lost from error
        finally:
            answer.cancel()


_NOBODY = "no replica answers; try again"


def _gone() -> Response:
    return Response(json.dumps(content(_NOBODY, 503)), 503, media_type="application/json")


def _headers(start: Message) -> dict[str, str]:
    """A replica's headers but for those that every server writes itself."""
    own = (b"content-length", b"connection")
    return {name.decode(): value.decode() for name, value in start["headers"] if name not in own}


async def _said(messages: AsyncIterator[Message]) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    left = b""
    async for message in messages:
        left += message.get("body", b"")
        *whole, left = left.split(b"\n\n")
        for one in whole:
            yield one.removeprefix(b"data: ")
