"""`outrider serve`: OpenAI's API over a live batch of one model."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import EXIT_ERROR, err, fail
from outrider.cli.options import Dtype, Setup, with_setup
from outrider.errors import BackendUnavailable, ConfigurationError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@with_setup
def serve(
    setup: Setup,
    host: Annotated[
        str, typer.Option(help="Where to listen; all but this machine need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    rows: Annotated[int, typer.Option(min=1, help="Requests decoded side by side.")] = 16,
    capacity: Annotated[
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
    most_waiting: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; more are refused.")
    ] = 64,
    kept_prompts: Annotated[
        int, typer.Option(min=0, help="MiB of read prompts kept for others that begin alike.")
    ] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    metrics_prefix: Annotated[str, typer.Option(help="Of the names in /metrics.")] = "outrider:",
    per_request_metrics: Annotated[
        bool, typer.Option(help="Answers say how they were decoded.")
    ] = True,
    dtype: Dtype = "auto",
) -> None:
    """Serve completions and chats over HTTP, as OpenAI's clients ask for them."""
    keys = _keys(api_key_file)
    if host not in LOOPBACK and not keys and not no_auth:
        fail(
            f"other machines could ask without a key; got --host {host}; give --api-key-file or "
            "OUTRIDER_API_KEY, or say --no-auth"
        )
        raise typer.Exit(EXIT_ERROR)
    if "*" in (cors_origin or ()):
        raise ConfigurationError("--cors-origin names one site; got '*'; give it exactly")
    try:
        import uvicorn

        from outrider.server.apart import started
        from outrider.server.app import Service, around
        from outrider.server.known import Hears
    except ImportError as error:
        raise BackendUnavailable(
            f"serving needs the extra 'server' ({error.name} is missing); "
            "pip install 'outrider[server]'"
        ) from error
    name = served_model_name or named(setup.target)
    service = Service(
        (name,),
        rows,
        capacity,
        most_waiting,
        timeout,
        keys,
        tuple(cors_origin or ()),
        public_metrics or host in LOOPBACK,
        per_request_metrics,
        metrics_prefix,
        kept_prompts << 20,
    )
    engine = started(partial(setup.load, dtype), service.room)
    try:
        app, _ = around(engine.known, engine, service)
        address = f"http://{host}:{port}"
        err.print(f"serving {name} at {address} ({rows} rows of {capacity} tokens)")
        hears = isinstance(engine.known, Hears)
        page = "" if hears else f"; a browser finds a page to try it at {address}/"
        err.print(f"OpenAI's clients take base_url={address}/v1{page}")
        uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
    finally:
        engine.close()
        engine.join(10)
    if engine.fault is not None:
        fail(str(engine.fault))
        raise typer.Exit(EXIT_ERROR)


def _keys(path: Path | None) -> tuple[str, ...]:
    """Keys of a file and of the environment."""
    lines = path.read_text().splitlines() if path is not None else []
    own = os.environ.get("OUTRIDER_API_KEY", "")
    return tuple(key.strip() for key in [*lines, own] if key.strip())


def named(target: str | None) -> str:
    """What clients and files of requests call a target."""
    if target is None:
        return "outrider-pair"
    return Path(target).name if Path(target).exists() else target
