"""Benchmarks behind `outrider bench`."""

import typer

from outrider_lab.book import command as book
from outrider_lab.papers import commands

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _benchmarks() -> None:
    """Repeat the papers' experiments on the shipped pair or on your own."""


commands.register(app)
book.register(app)
