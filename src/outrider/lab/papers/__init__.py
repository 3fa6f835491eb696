"""Benchmarks behind `outrider bench`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.lab.book import command as book
from outrider.lab.papers import commands
from outrider.lab.papers.options import Draft, Prompts, Target, both
from outrider.lab.papers.record import file

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _benchmarks() -> None:
    """Repeat the papers' experiments on the shipped pair or on your own."""


@app.command("wagner")
def run_wagner(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer prompts and tokens: ten minutes on two cores.")
    ] = False,
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    device: Annotated[str, typer.Option(help="Where the models run: cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Of the models: float32, bfloat16 or float16.")
    ] = "float32",
    recordings: Annotated[
        Path | None,
        typer.Option(help="Folder of recordings with transcripts, for a Whisper pair: WER."),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="Spoken in the recordings; default: English.")
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(help="The sigmoid's -alpha and beta; default: 1e4, of speech 1e3."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a JSON document to this file.")] = None,
) -> None:
    """Wagner et al. 2024: verification time in transformers' assisted generation."""
    from outrider.errors import ConfigurationError
    from outrider.lab.papers import wagner as protocol
    from outrider.lab.papers.score import ready
    from outrider.lab.papers.wagner_pairs import load_pair, shipped_pair
    from outrider.lab.papers.wagner_tables import render
    from outrider.lab.prompts import read_rows
    from outrider.models.sources import DTYPES, usable

    both(target, draft)
    if recordings is None:
        ready()
    if bound is not None and not 0 < bound < float("inf"):
        raise ConfigurationError(f"--bound must be positive; got {bound:g}; leave it out")
    if recordings is not None and (prompts is not None or target is None):
        raise ConfigurationError(
            "--recordings go with --target and --draft of a Whisper pair, and without --prompts; "
            f"got {str(recordings)!r}; see outrider bench wagner --help"
        )
    if recordings is None and language is not None:
        raise ConfigurationError(f"--language goes with --recordings; got {language!r} alone")
    if out is not None:
        file(out)
    usable(device)
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    rows = None if prompts is None else read_rows(prompts)
    if target is None or draft is None:
        pair = shipped_pair(8 if quick else 48, device, rows, dtype)
    elif recordings is not None:
        from outrider.lab.papers.wagner_speech import speech_pair
        from outrider.lab.recordings import read_folder

        pair = speech_pair(target, draft, read_folder(recordings), language, device, dtype)
    elif rows is None:
        raise ConfigurationError(
            "a pair of your own needs --prompts, a file of JSON lines, or --recordings"
        )
    else:
        pair = load_pair(target, draft, rows, device, dtype)
    document = protocol.run(
        pair, quick=quick, bound=bound, progress=lambda text: typer.echo(text, err=True)
    )
    if recordings is not None and target is not None and draft is not None:
        from outrider.lab.papers import wagner_engine

        typer.echo("outrider's own transcription", err=True)
        document["engine"] = wagner_engine.run(
            pair, target, draft, language, dtype, document["prompts"]
        )
    typer.echo(render(document))
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n")


commands.register(app)
book.register(app)
