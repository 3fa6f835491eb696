"""A server as a replica of Ray Serve, and the application around several of them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from outrider import arguments
from outrider.loading import load
from outrider.server.app import ServerConfig, build_app
from outrider.server.messages import JsonObject
from outrider.server.middleware import Message
from outrider.server.serving import running
from outrider_ray.ingress import Ingress
from outrider_ray.requests import Header, asked, ranked

# Serve's choice of a replica, by `routing`.


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """By the key of a request; when that replica is full, the next one."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are asked."""
        by_name = {str(one.replica_id): one for one in candidate_replicas}
        told = "" if pending_request is None else pending_request.kwargs.get("key", "")
        return [[by_name[name]] for name in ranked(told, list(by_name))]


class ReplicaConfig(BaseModel):
    """What replicas serve, and how.

    `deployment` and `ingress` are options of Serve's deployments as it has them: `num_replicas` or
    `autoscaling_config`, `ray_actor_options`, `graceful_shutdown_timeout_s` and so on.
    """

    model_config = ConfigDict(extra="forbid")

    target: str | None = None
    draft: str | None = None
    #: in Jinja, by its file or its text; read where this is made, as replicas have no such file
    chat_template: Annotated[str, BeforeValidator(arguments.template)] | None = None
    name: str = "outrider-pair"
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    max_num_seqs: int = 16
    max_model_len: int = 2048
    max_queued_requests: int = 64
    timeout: float = 600.0
    keys: tuple[str, ...] = ()
    deployment: JsonObject = {}
    ingress: JsonObject = {}


class Replica:
    """The server's own application, asked in this process; one loop decodes."""

    async def __init__(self, settings: ReplicaConfig) -> None:  # type: ignore[misc]
        threads = "auto" if settings.threads is None else settings.threads
        speculator = load(
            settings.target,
            settings.draft,
            chat_template=settings.chat_template,
            dtype=settings.dtype,
            device=settings.device,
            threads=threads,
        )
        service = ServerConfig(
            (settings.name,),
            settings.max_num_seqs,
            settings.max_model_len,
            settings.max_queued_requests,
            settings.timeout,
            settings.keys,
        )
        site = build_app(speculator, service)
        self._app, self._engine = site.app, site.engine
        self._running = AsyncExitStack()
        await self._running.enter_async_context(running(self._engine))

    async def ask(
        self, method: str, path: str, headers: Sequence[Header], body: bytes, key: str
    ) -> AsyncIterator[Message]:
        """What the application says to a request: ASGI messages. `key` is for the router."""
        async for message in asked(self._app, method, path, headers, body):
            yield message

    def check_health(self) -> None:
        """Serve replaces a replica whose engine has stopped."""
        if not self._engine.alive:
            raise RuntimeError("the engine has stopped")


def application(settings: ReplicaConfig) -> serve.Application:
    """An application for `serve run` or `serve.run`: replicas, and one ingress in front of them."""
    router = RequestRouterConfig(request_router_class=PrefixRouter)
    replicas = serve.deployment(Replica).options(
        **{
            "name": "outrider",
            "request_router_config": router,
            "max_ongoing_requests": settings.max_num_seqs + settings.max_queued_requests,
            **settings.deployment,
        }
    )
    ingress = serve.deployment(Ingress).options(
        **{"name": "ingress", "max_ongoing_requests": 1000, **settings.ingress}
    )
    return ingress.bind(replicas.bind(settings))
