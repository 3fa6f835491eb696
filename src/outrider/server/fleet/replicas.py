"""A server as a replica of Ray Serve, and the application around several of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.config import RequestRouterConfig

from outrider.load import load
from outrider.server.app import Service, make
from outrider.server.desk import running
from outrider.server.fleet.ingress import Ingress
from outrider.server.fleet.routing import PrefixRouter
from outrider.server.guard import App, Message

Header = tuple[bytes, bytes]


class Settings(BaseModel):
    """What replicas serve, and how.

    `deployment` and `ingress` are options of Serve's deployments as it has them: `num_replicas` or
    `autoscaling_config`, `ray_actor_options`, `graceful_shutdown_timeout_s` and so on.
    """

    model_config = ConfigDict(extra="forbid")

    target: str | None = None
    draft: str | None = None
    name: str = "outrider-pair"
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    rows: int = 16
    capacity: int = 2048
    most_waiting: int = 64
    timeout: float = 600.0
    keys: tuple[str, ...] = ()
    deployment: dict[str, Any] = {}
    ingress: dict[str, Any] = {}


class Replica:
    """The server's own application, asked in this process; one loop decodes."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]
        threads = "auto" if settings.threads is None else settings.threads
        speculator = load(
            settings.target,
            settings.draft,
            dtype=settings.dtype,
            device=settings.device,
            threads=threads,
        )
        service = Service(
            (settings.name,),
            settings.rows,
            settings.capacity,
            settings.most_waiting,
            settings.timeout,
            settings.keys,
        )
        site = make(speculator, service)
        self._app, self._loop = site.app, site.loop
        self._running = AsyncExitStack()
        await self._running.enter_async_context(running(self._loop))

    async def ask(
        self, method: str, path: str, headers: Sequence[Header], body: bytes, key: str
    ) -> AsyncIterator[Message]:
        """What the application says to a request: ASGI messages. `key` is for the router."""
        async for message in asked(self._app, method, path, headers, body):
            yield message

    def check_health(self) -> None:
        """Serve replaces a replica whose engine has stopped."""
        if not self._loop.alive:
            raise RuntimeError("the engine has stopped")


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


def application(settings: Settings) -> serve.Application:
    """An application for `serve run` or `serve.run`: replicas, and one ingress in front of them."""
    router = RequestRouterConfig(request_router_class=PrefixRouter)
    replicas = serve.deployment(Replica).options(
        **{
            "name": "outrider",
            "request_router_config": router,
            "max_ongoing_requests": settings.rows + settings.most_waiting,
            **settings.deployment,
        }
    )
    ingress = serve.deployment(Ingress).options(
        **{"name": "ingress", "max_ongoing_requests": 1000, **settings.ingress}
    )
    return ingress.bind(replicas.bind(settings))
