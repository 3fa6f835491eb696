"""The routes of `outrider serve`."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Annotated, NamedTuple

from fastapi import FastAPI, Form, Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException

import outrider
from outrider import arguments
from outrider.errors import OutriderError
from outrider.server import errors
from outrider.server.chat_prompts import Parsers
from outrider.server.engine_client import EngineClient, InProcessClient
from outrider.server.engine_factory import KEPT_BYTES, EngineConfig
from outrider.server.engine_loop import STILL_SECONDS
from outrider.server.messages import JsonObject
from outrider.server.metrics import ServerMetrics
from outrider.server.middleware import OPEN, App, AuthLimitMiddleware, RequestLimits as Sizes
from outrider.server.model_info import ModelInfo, SpeechModelInfo, TextModelInfo
from outrider.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorResponse,
    StreamOptions,
)
from outrider.server.request_parsing import RequestParser
from outrider.server.responses_api import ResponseDraft, ResponseStore, ResponsesWriter
from outrider.server.responses_bodies import ResponsesBody
from outrider.server.serving import Events, RequestHandler, Serving, running
from outrider.server.serving_transcription import TranscriptionForm, TranscriptionHandler
from outrider.server.tokens_api import (
    DetokenizeBody,
    TokenizeBody,
    detokenized,
    tokenized,
    tokenizer_info,
)
from outrider.text.speculator import Speculator

_log = logging.getLogger("outrider.server")
EVENTS = "text/event-stream"
RecordingForm = Annotated[TranscriptionForm, Form(media_type="multipart/form-data")]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
#: Of a recording: as much as OpenAI takes, and it is no JSON.
RECORDING = Sizes(body_bytes=25 << 20, body_seconds=120.0, depth=None)
#: Chats with images and recordings in base64.
WITH_MEDIA = Sizes(body_bytes=48 << 20, body_seconds=120.0)
#: What others' servers have and this one has not, and what to do.
_VECTORS = "this server writes text and has no vectors of it; ask an embedding model's server"
_ELSEWHERE = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/embedding", "/pooling"), _VECTORS),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v1/score", "/score", "/classify"), _VECTORS),
    **dict.fromkeys(("/completion", "/infill"), f"ask {COMPLETIONS}, with suffix for a gap"),
    "/v1/messages": f"Anthropic's form is not read; ask {CHATS} or {RESPONSES}",
    "/props": "what is served is told by /v1/models and /tokenizer_info",
    "/slots": "rows are counted by /health and /metrics, and their prompts are shown to nobody",
}
#: The page asks nobody but this server.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


@dataclass(frozen=True)
class ServerConfig:
    """How a server serves.

    max_num_seqs  requests decoded side by side
    max_model_len  slots of a row: prompt, answer and draft
    max_queued_requests  requests that may wait; more are refused
    timeout       seconds that an answer may take, waiting included
    keys          keys of which a client must have one; none: everybody may ask
    origins       pages of other sites that may ask (CORS), by exact name
    public        whether /metrics and the page need no key
    metrics       whether answers have `metrics`
    prefix        of the names in /metrics
    prefix_cache_bytes  of prompts that were read, for requests that begin alike; 0: none
    still_seconds  without the end of a turn, after which /health says 503
    hosts         names by which clients may ask (the header Host); none: any
    tool_call_parser, reasoning_parser  how answers are taken apart; None: by the chat template
    allow_remote_media  whether images of messages may be fetched from other machines
    """

    names: tuple[str, ...]
    max_num_seqs: int = 16
    max_model_len: int = 2048
    max_queued_requests: int = 64
    timeout: float = 600.0
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    public: bool = False
    metrics: bool = True
    prefix: str = "outrider:"
    prefix_cache_bytes: int = KEPT_BYTES
    hosts: Sequence[str] = ()
    still_seconds: float = STILL_SECONDS
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    allow_remote_media: bool = False

    def parsers(self, known: TextModelInfo) -> Parsers:
        """How a model's answers are taken apart. Raises UnknownName."""
        return Parsers.of(known.tokenizer, self.tool_call_parser, self.reasoning_parser)

    @property
    def engine_config(self) -> EngineConfig:
        """What it needs of a loop."""
        rows, length = self.max_num_seqs, self.max_model_len
        return EngineConfig(
            rows, length, self.max_queued_requests, self.prefix_cache_bytes, ready_first=True
        )


class Server(NamedTuple):
    """What is served: the ASGI application, and what decodes while it runs."""

    app: App
    engine: EngineClient


def build_app(speculator: Speculator, service: ServerConfig) -> Server:
    """The application, with an engine in this process that runs while it does."""
    return build_app_for(InProcessClient(speculator, service.engine_config), service)


def build_app_for(engine: EngineClient, service: ServerConfig) -> Server:
    """The application of a model that is decoded by `engine`, here or in another process."""
    known = engine.known
    counts = ServerMetrics(service.prefix, service.names[0])
    others = {TRANSCRIPTIONS: RECORDING, TRANSLATIONS: RECORDING}
    if isinstance(known, TextModelInfo):
        known = replace(known, remote_media=service.allow_remote_media)
        if known.media is not None:
            others[CHATS] = WITH_MEDIA
    app = FastAPI(
        title="outrider",
        version=outrider.__version__,
        docs_url=None,  # those pages load scripts from elsewhere; /openapi.json stays
        redoc_url=None,
        lifespan=lambda app: running(engine, counts.on_outputs),
        responses={kind: {"model": ErrorResponse} for kind in ("4XX", "5XX")},
    )
    _errors(app)
    parts = _Parts(app, engine, service, counts)
    if isinstance(known, SpeechModelInfo):
        _speech(parts, known)
    else:
        _texts(parts, known)
    counts.register(engine)
    _about(parts, known)
    free = (*OPEN, "/metrics", "/") if service.public else (*OPEN, "/")
    site: App = AuthLimitMiddleware(
        app, tuple(service.keys), free, others=others, hosts=tuple(service.hosts)
    )
    if service.origins:  # in front of the guard: a browser asks whether it may without a key
        origins = list(service.origins)
        site = CORSMiddleware(
            site, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return Server(site, engine)


class _Parts(NamedTuple):
    """What routes are made of, whatever the model."""

    app: FastAPI
    engine: EngineClient
    service: ServerConfig
    counts: ServerMetrics


def _texts(of: _Parts, known: TextModelInfo) -> None:
    """Completions and chats, and the page on which they can be watched."""
    app, engine, service, counts = of
    parsers = service.parsers(known)
    most = service.max_num_seqs + service.max_queued_requests
    parser = RequestParser(
        known, service.names, service.max_num_seqs, service.max_model_len, parsers, most
    )
    handler = RequestHandler(engine, parser, service.metrics)
    serving = Serving(engine, counts, service.timeout)

    async def answered(
        http: HttpRequest, body: CompletionRequest | ChatCompletionRequest
    ) -> Response:
        choices = await asyncio.to_thread(handler.choices, body)
        echo = isinstance(body, CompletionRequest) and body.echo
        writer = handler.writer(body)
        events = Events(body.stream_options or StreamOptions(), writer, echo)
        return await serving.answer(http, body, choices, writer, events, echo)

    @app.post(COMPLETIONS, responses=_also(EVENTS))
    async def completions(http: HttpRequest, body: CompletionRequest) -> Response:
        return await answered(http, body)

    @app.post(CHATS, responses=_also(EVENTS))
    async def chat(http: HttpRequest, body: ChatCompletionRequest) -> Response:
        return await answered(http, body)

    _responses(app, handler, serving)
    _tokens(app, parser)

    @app.get("/")
    async def page() -> HTMLResponse:
        text = (files("outrider.server") / "page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    if known.media is not None and known.media.reads_sound:
        ear = SpeechModelInfo(service.names[0], None, known.media.rate)
        _transcriptions(of, ear)
        _refuse_paths(app, service, "transcribes; ask it in a chat to translate", TRANSLATIONS)
        return
    what = "reads and writes text; transcriptions need a Whisper: --model openai/whisper-base"
    _refuse_paths(app, service, what, TRANSCRIPTIONS, TRANSLATIONS)


def _responses(app: FastAPI, handler: RequestHandler, serving: Serving) -> None:
    """Responses: chats whose turns are kept here."""
    store = ResponseStore()

    @app.post(RESPONSES, responses=_also(EVENTS))
    async def respond(http: HttpRequest, body: ResponsesBody) -> Response:
        try:
            last = body.previous_response_id
            before = [] if last is None else store.find(last, "previous_response_id").turns
            chat = body.chat(before)
            choices = await asyncio.to_thread(handler.choices, chat)
            body.model = handler.parser.name(chat.model)
        except ValidationError as error:
            return JSONResponse(errors.rejected(error.errors()), 400)
        started = ResponseDraft(body, handler.parser.known.fingerprint_of(body.model))
        writer = ResponsesWriter(started, store, before)
        return await serving.answer(http, chat, choices, writer, writer.flow)

    @app.get(RESPONSES + "/{response_id}")
    async def response(response_id: str) -> Response:
        return JSONResponse(store.find(response_id, "response_id").response)

    @app.delete(RESPONSES + "/{response_id}")
    async def forget(response_id: str) -> Response:
        store.forget(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _tokens(app: FastAPI, parser: RequestParser) -> None:
    """Tokens of texts, and texts of tokens."""

    @app.get("/tokenizer_info")
    async def info() -> JsonObject:
        return tokenizer_info(parser)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        return JSONResponse(await asyncio.to_thread(tokenized, parser, body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        return JSONResponse(await asyncio.to_thread(detokenized, parser, body))


def _speech(of: _Parts, known: SpeechModelInfo) -> None:
    """Transcriptions and translations, and nothing else."""
    app, ear = of.app, _transcriptions(of, known)
    into_english = replace(ear, task="translate")

    @app.post(TRANSLATIONS, responses=_also(EVENTS, "text/plain"))
    async def translations(http: HttpRequest, form: RecordingForm) -> Response:
        return await into_english.answer(http, form)

    what = f"turns speech into text; ask it at {TRANSCRIPTIONS}"
    _refuse_paths(app, of.service, what, COMPLETIONS, CHATS, RESPONSES)


def _transcriptions(of: _Parts, known: SpeechModelInfo) -> TranscriptionHandler:
    """Recordings as text, and by whom."""
    app, engine, service, counts = of
    ear = TranscriptionHandler(known, service.names, engine, counts, service.timeout)

    @app.post(TRANSCRIPTIONS, responses=_also(EVENTS, "text/plain"))
    async def transcriptions(http: HttpRequest, form: RecordingForm) -> Response:
        return await ear.answer(http, form)

    return ear


def _also(*kinds: str) -> dict[int | str, JsonObject]:
    """What an answer may be besides JSON, for the description."""
    return {200: {"content": {kind: {} for kind in kinds}}}


def _refuse_paths(app: FastAPI, service: ServerConfig, what: str, *paths: str) -> None:
    """Routes of another kind of model say why they are not served."""
    message = f"{service.names[0]} {what}"

    async def refuse() -> Response:
        return errors.response(errors.APIError(message, "model"))

    for path in paths:
        app.post(path, include_in_schema=False)(refuse)


def _about(of: _Parts, known: ModelInfo) -> None:
    """What is served, and how it is."""
    app, engine, service, counts = of
    started = int(time.time())

    adapters = known.adapters if isinstance(known, TextModelInfo) else {}
    served = (*service.names, *adapters)
    if doubled := set(service.names) & adapters.keys():
        do = "give it another one in --lora-modules"
        arguments.refuse("an adapter", "a name that is not the target's", doubled.pop(), do)

    def model(name: str) -> dict[str, object]:
        about = {"id": name, "object": "model", "created": started, "owned_by": "outrider"}
        about |= {"parent": service.names[0]} if name in adapters else {}
        if isinstance(known, TextModelInfo):
            return about | {"max_model_len": known.room(service.max_model_len)}
        return about

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [model(name) for name in served]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name not in served:
            return errors.response(errors.unknown_model(name, served))
        return JSONResponse(model(name))

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": outrider.__version__}

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> JSONResponse:
        load, still = engine.load, engine.still > service.still_seconds
        status = "dead" if engine.fault is not None else "still" if still else "ok"
        if not engine.alive and engine.fault is None:
            status = "closing or starting again"
        state = {"status": status, "running": load.running}
        return JSONResponse(state | {"waiting": load.waiting}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(counts.render(), media_type=CONTENT_TYPE_LATEST)


#: What a body is, what says so, and how curl sends it: of other routes, and of recordings'.
_JSON = "a body is JSON, said to be so", "application/json", "-H 'content-type: application/json'"
_FORM = "a recording comes in a form", "multipart/form-data", "-F 'file=@talk.wav'"


def _errors(app: FastAPI) -> None:
    """Whatever goes wrong is told in one format."""

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, error: RequestValidationError) -> JSONResponse:
        kind = http.headers.get("content-type", "nothing").partition(";")[0].strip()
        audio = "/v1/audio/" in http.url.path  # behind whatever a program mounts it under
        if not kind.startswith("multipart/") and (audio or kind != "application/json"):
            what, form, how = _FORM if audio else _JSON
            what += f"; got content type {kind!r}; send 'content-type: {form}' (curl: {how})"
            return JSONResponse(errors.content(what, 400), 400)
        return JSONResponse(errors.rejected(error.errors()), 400)

    @app.exception_handler(HTTPException)
    async def unknown(http: HttpRequest, error: HTTPException) -> JSONResponse:
        message = f"{http.method} {http.url.path}: {error.detail}"
        if error.status_code == 404 and (instead := _ELSEWHERE.get(http.url.path)):
            message = f"{http.url.path} is not served here: {instead}"
        return JSONResponse(errors.content(message, error.status_code), error.status_code)

    @app.exception_handler(errors.APIError)
    @app.exception_handler(OutriderError)
    @app.exception_handler(Exception)
    async def crashed(http: HttpRequest, error: Exception) -> JSONResponse:
        answer = errors.response(error)
        if answer.status_code == 500 and isinstance(error, OutriderError):  # others are logged
            _log.error("%s %s", http.method, http.url.path, exc_info=error)
        return answer
