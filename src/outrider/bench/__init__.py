"""Benchmarks behind `outrider bench`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench import commands

app = typer.Typer(help="Measure: claims stand beside the command that prints them.")


@app.callback()
def _benchmarks() -> None:
    """Measure: claims stand beside the command that prints them."""


@app.command("wagner")
def run_wagner(
    quick: Annotated[bool, typer.Option(help="under ten minutes on two cores")] = False,
    target: Annotated[str | None, typer.Option(help="target model; default: shipped")] = None,
    draft: Annotated[str | None, typer.Option(help="draft model")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines: prompt, reference")] = None,
    device: Annotated[str, typer.Option(help="where the models run")] = "cpu",
    bound: Annotated[float, typer.Option(help="the sigmoid's -alpha and beta")] = 1e4,
    out: Annotated[Path | None, typer.Option(help="write the JSON document here")] = None,
) -> None:
    """Verification time in assisted generation: transformers, the paper's kernels, ours."""
    from outrider.bench import wagner as protocol
    from outrider.bench.wagner_tables import render
    from outrider.errors import ConfigurationError

    pair = None
    if (target is None) != (draft is None):
        raise ConfigurationError("a pair needs both --target and --draft; give both or neither")
    if target is not None and draft is not None:
        if prompts is None:
            raise ConfigurationError("a pair of your own needs --prompts, a file of JSON lines")
        lines = [json.loads(line) for line in prompts.read_text().splitlines() if line.strip()]
        pair = protocol.load_pair(target, draft, lines, device)
    elif device != "cpu":
        pair = protocol.shipped_pair(8 if quick else 48, device)
    document = protocol.run(
        pair, quick=quick, bound=bound, progress=lambda text: typer.echo(text, err=True)
    )
    typer.echo(render(document))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")


commands.register(app)
