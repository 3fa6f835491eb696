"""The routes of `outrider serve`."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

import outrider
from outrider.server import faults
from outrider.server.bodies import ChatBody, CompletionBody, FaultBody
from outrider.server.counts import Counts
from outrider.server.desk import Desk
from outrider.server.guard import OPEN, App, Guard
from outrider.server.lanes import Lanes
from outrider.server.loop import Loop
from outrider.server.serving import Serving
from outrider.text.speculator import Speculator

#: The page asks nobody but this server.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


@dataclass(frozen=True)
class Service:
    """How a server serves.

    rows          requests decoded side by side
    capacity      slots of a row: prompt, answer and draft
    most_waiting  requests that may wait; more are refused
    timeout       seconds that an answer may take, waiting included
    keys          keys of which a client must have one; none: everybody may ask
    origins       pages of other sites that may ask (CORS), by exact name
    public        whether /metrics and the page need no key
    metrics       whether answers have `metrics`
    prefix        of the names in /metrics
    """

    names: tuple[str, ...]
    rows: int = 16
    capacity: int = 2048
    most_waiting: int = 64
    timeout: float = 600.0
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    public: bool = False
    metrics: bool = True
    prefix: str = "outrider:"


def engine_loop(speculator: Speculator, service: Service) -> Loop:
    """The thread that decodes, not yet started."""
    lanes = Lanes(speculator.engine)
    return Loop(lanes, service.rows, service.capacity, service.most_waiting)


def make(speculator: Speculator, service: Service, loop: Loop | None = None) -> App:
    """The ASGI application; its loop runs while it does."""
    loop = loop or engine_loop(speculator, service)
    desk = Desk.open(speculator, service.names, loop, service.metrics)
    counts = Counts(service.prefix, service.names[0])
    counts.watch(loop)
    serving, started = Serving(loop, counts, service.timeout), int(time.time())

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        async with desk.running():
            yield

    faulty = {kind: {"model": FaultBody} for kind in ("4XX", "5XX")}
    app = FastAPI(
        title="outrider",
        version=outrider.__version__,
        lifespan=running,
        responses=faulty,  # type: ignore[arg-type]
    )
    _errors(app)
    if service.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )

    async def answered(http: HttpRequest, body: CompletionBody | ChatBody) -> Response:
        try:
            choices = await asyncio.to_thread(desk.choices, body)
        except Exception as error:
            return faults.response(error)
        echo = isinstance(body, CompletionBody) and body.echo
        return await serving.answer(http, body, choices, desk.writer(body), echo)

    @app.post("/v1/completions")
    async def completions(http: HttpRequest, body: CompletionBody) -> Response:
        return await answered(http, body)

    @app.post("/v1/chat/completions")
    async def chat(http: HttpRequest, body: ChatBody) -> Response:
        return await answered(http, body)

    def model(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": started, "owned_by": "outrider"}

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [model(name) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name not in service.names:
            known = ", ".join(service.names)
            message = f"no model {name!r} here; served: {known}"
            return faults.response(faults.Refusal(message, "model", 404, "model_not_found"))
        return JSONResponse(model(name))

    @app.get("/health")
    async def health() -> JSONResponse:
        load = loop.load
        state = {"status": "ok" if loop.alive else "dead", "running": load.running}
        return JSONResponse(state | {"waiting": load.waiting}, 200 if loop.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(counts.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def page() -> HTMLResponse:
        text = (files("outrider.server") / "page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    free = (*OPEN, "/metrics", "/") if service.public else (*OPEN, "/")
    return Guard(app, tuple(service.keys), free)


def _errors(app: FastAPI) -> None:
    """Whatever goes wrong is told in one format."""

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, error: RequestValidationError) -> JSONResponse:
        return faults.invalid(error)

    @app.exception_handler(HTTPException)
    async def unknown(http: HttpRequest, error: HTTPException) -> JSONResponse:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return JSONResponse(faults.content(message, error.status_code), error.status_code)

    @app.exception_handler(Exception)
    async def crashed(http: HttpRequest, error: Exception) -> JSONResponse:
        return JSONResponse(faults.content("internal error", 500), 500)
