"""`outrider serve`: OpenAI's API over a live batch of one model."""

import atexit
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from outrider import arguments, lazy
from outrider.cli.console import EXIT_ERROR, err, fail, read_file
from outrider.cli.options import Dtype, load_speculator, target_name, with_setup
from outrider.errors import BackendUnavailable, ConfigurationError
from outrider.load_config import LoadConfig
from outrider.models import budget
from outrider.models.calibrate import cores
from outrider.models.program_imports import import_lean

if TYPE_CHECKING:
    from outrider.server.engine_client import EngineClient
    from outrider.server.engine_factory import EngineConfig
    from outrider.text.speculator import Speculator

LOOPBACK = ("127.0.0.1", "::1", "localhost")


AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        help="A name by which clients ask (the header Host); may be repeated. Default: this "
        "machine's, where it listens to this machine without a key; else any."
    ),
]
Still = Annotated[
    float,
    typer.Option(
        min=1,
        help="Seconds without the end of a turn after which the engine stands still: /health "
        "says 503, and a process of its own is started again; one process ends with code 2.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2,
        help="2: HTTP has a process of its own, beside the one that decodes. 1: both are in "
        "one. Default: 2 where two cores may be used, else 1.",
    ),
]


@with_setup
def serve(
    setup: LoadConfig,
    host: Annotated[
        str, typer.Option(help="Where to listen; all but this machine need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests decoded side by side.")] = 16,
    max_model_len: Annotated[
        int, typer.Option(min=64, help="Tokens of a row: prompt, answer and draft.")
    ] = 2048,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name that clients give. Default: the target's.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="A file of keys, one a line. Or set OUTRIDER_API_KEY to one."),
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Let everybody in, from other machines, too.")
    ] = False,
    public_metrics: Annotated[
        bool, typer.Option("--public-metrics", help="/metrics needs no key.")
    ] = False,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may ask; may be repeated.")
    ] = None,
    allowed_host: AllowedHost = None,
    max_queued_requests: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; more are refused.")
    ] = 64,
    prefix_cache_mib: Annotated[
        int, typer.Option(min=0, help="MiB of read prompts kept for others that begin alike.")
    ] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    still: Still = 120.0,
    metrics_prefix: Annotated[str, typer.Option(help="Of the names in /metrics.")] = "outrider:",
    per_request_metrics: Annotated[
        bool, typer.Option(help="Answers say how they were decoded.")
    ] = True,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="How the model writes calls of tools. Default: by its chat template."),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="How the model marks thoughts. Default: by its chat template."),
    ] = None,
    allow_remote_media: Annotated[
        bool,
        typer.Option(
            "--allow-remote-media",
            help="Fetch images of messages from other machines (http and https), never from this "
            "one or a private network.",
        ),
    ] = False,
    processes: Processes = None,
    dtype: Dtype = "auto",
) -> None:
    """Serve completions and chats over HTTP, as OpenAI's clients ask for them."""
    keys = _keys(api_key_file)
    if host not in LOOPBACK and not keys and not no_auth:
        raise ConfigurationError(
            f"other machines could ask without a key; got --host {host}; give --api-key-file or "
            "OUTRIDER_API_KEY, or say --no-auth"
        )
    name = named(target_name(setup)) if served_model_name is None else served_model_name
    _check(name, cors_origin or (), timeout, metrics_prefix)
    with _extra():
        for package in ("fastapi", "prometheus_client", "uvicorn"):
            if find_spec(package) is None:  # imported while the server listens
                raise ImportError(name=package)
        from outrider.server.tool_parsers import reasoning_parser as thoughts, tool_parser
    tool_parser(tool_call_parser, ""), thoughts(reasoning_parser, "")  # such names there are
    settings = (
        (name,),
        max_num_seqs,
        max_model_len,
        max_queued_requests,
        timeout,
        keys,
        tuple(cors_origin or ()),
        public_metrics or host in LOOPBACK,
        per_request_metrics,
        metrics_prefix,
        prefix_cache_mib << 20,
        _hosts(host, keys, allowed_host or ()),
        still,
        tool_call_parser,
        reasoning_parser,
        allow_remote_media,
    )
    _run(partial(_loaded, setup, dtype), name, settings, host, port, processes)


def _loaded(setup: LoadConfig, dtype: str) -> "Speculator":
    """What is served; what its steps cost is measured while nobody asks."""
    with budget.postponing():
        return load_speculator(setup, dtype)


def _hosts(host: str, keys: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """Names by which clients may ask; none: any.

    A page of another site can have its own name mean this machine (DNS rebinding). Nothing else
    keeps it out where no key is asked for.
    """
    if host not in LOOPBACK or keys:
        return tuple(map(str.lower, allowed))
    return tuple(dict.fromkeys((*LOOPBACK, *map(str.lower, allowed))))


def _run(
    load: "Callable[[], Speculator]",
    name: str,
    settings: tuple[Any, ...],
    host: str,
    port: int,
    processes: int | None,
) -> None:
    """Serve until it is ended. `settings` are `ServerConfig`'s: it is imported while this
    listens."""
    from outrider.server.loading_responder import answering

    with _ended(), _bound(host, port) as place, ExitStack() as loading:
        err.print(f"reading {name}")
        with _free(host, port):
            loading.enter_context(answering(place))
        at = f"http://{f'[{host}]' if ':' in host else host}:{place.getsockname()[1]}"
        err.print(f"listening at {at}; until {name} is loaded all answers are 503, /health's too")
        import_lean()
        for variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
            os.environ.pop(variable, None)  # perhaps of no folder: this is one process
        with _extra():
            from outrider.server.app import ServerConfig, build_app_for
            from outrider.server.http_server import HttpServer
            from outrider.server.model_info import SpeechModelInfo
        apart, how = _parted(processes)
        service = ServerConfig(*settings)
        engine = _engine(load, service.engine_config, apart, service.still_seconds)
        lazy.collect_as_usual()  # where another process loads the model, this one never does
        try:
            site = build_app_for(engine, service)
            loading.close()
            room = f"{service.max_num_seqs} rows of {service.max_model_len} tokens"
            known = engine.known
            page = (
                ""
                if isinstance(known, SpeechModelInfo)
                else f"; a browser finds a page to try it at {at}/"
            )
            err.print(f"serving {service.names[0]} at {at} ({room}; {how})")
            err.print(f"OpenAI's clients take base_url={at}/v1{page}")
            if not isinstance(known, SpeechModelInfo):
                err.print(f"chats have {service.parsers(known).describe()}")
            with suppress(KeyboardInterrupt):
                HttpServer(site, ends=True).run([place])
        finally:
            engine.close()
            ended = engine.join(0)
        if engine.fault is not None:
            fail(f"{type(engine.fault).__name__}: {engine.fault}")
        code = 0 if engine.fault is None else EXIT_ERROR
        if not ended:
            _leave(code)
        if code:
            raise typer.Exit(code)


def _leave(code: int) -> None:
    """End the process although a kernel is under way: what ends with it (a compiler, a temporary
    folder, other ranks) is told, for a second at most."""
    tell = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    tell.start()
    tell.join(1.0)
    os._exit(code)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: somebody wants the server to end, as with Ctrl-C."""


@contextmanager
def _ended() -> Iterator[None]:
    """In here SIGTERM ends a server as Ctrl-C does, and is no failure, while a model is read, too.

    uvicorn waits for answers under way, and then raises the signal again: its default would end the
    process with a code that says so, before the engine is closed.
    """
    if threading.current_thread() is not threading.main_thread():  # signals go to that one
        yield
        return

    def ask(number: int, frame: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, ask)
    try:
        with suppress(_Terminated):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _extra() -> Iterator[None]:
    """Say so if the packages of the extra are missing."""
    try:
        yield
    except ImportError as error:
        raise BackendUnavailable(
            f"serving needs the extra 'server' ({error.name} is missing); "
            "pip install 'outrider[server]'"
        ) from error


def _check(name: str, origins: Sequence[str], timeout: float, prefix: str) -> None:
    """Refuse what no server can have."""
    if not name:
        arguments.refuse("--served-model-name", "a name", name, "leave it out for the target's")
    for origin in origins:
        scheme, place, *more = urlsplit(origin)
        if scheme not in ("http", "https") or not place or any(more):
            what = "one site, such as https://example.org"
            arguments.refuse("--cors-origin", what, origin, "give its scheme, name and port alone")
    if not timeout > 0:
        arguments.refuse("--timeout", "a positive number of seconds", timeout, "leave it out: 600")
    if not re.fullmatch("([a-zA-Z_:][a-zA-Z0-9_:]*)?", prefix):
        what = "letters, digits, _ and :, without a digit first"
        arguments.refuse("--metrics-prefix", what, prefix, "try vllm:")


@contextmanager
def _free(host: str, port: int) -> Iterator[None]:
    """Say so if this address cannot be had."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at --host {host} --port {port}; got {error.strerror!r}; give others "
            "(--port 0: any that is free), or end what listens there"
        ) from error


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket of this address; it refuses those who ask until it listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _free(host, port):
            place.bind((host, port))
        yield place


def _parted(processes: int | None) -> tuple[bool, str]:
    """Whether decoding has a process of its own, and how that is said."""
    if processes == 2 or (processes is None and cores() > 1):
        return True, "decoding in a process of its own"
    if processes == 1:
        return False, "one process"
    return False, "one process for one core; --processes 2 makes it two"


def _engine(
    load: "Callable[[], Speculator]", room: "EngineConfig", apart: bool, still: float
) -> "EngineClient":
    """What decodes, in this process or in another."""
    from outrider.server.engine_client import InProcessClient
    from outrider.server.engine_process import launch_engine

    return launch_engine(load, room, still) if apart else InProcessClient(load(), room, still)


def _keys(path: Path | None) -> tuple[str, ...]:
    """Keys of a file and of the environment."""
    lines = [] if path is None else read_file(path, "keys").split()
    if path is not None and not lines:
        arguments.refuse("--api-key-file", "a file of keys, one a line", str(path), "put one in")
    own = os.environ.get("OUTRIDER_API_KEY", "").strip()
    return tuple([*lines, own] if own else lines)


def named(target: str | None) -> str:
    """What clients and files of requests call a target."""
    if target is None:
        return "outrider-pair"
    return Path(target).name if Path(target).exists() else target
