"""The command line. Thin: every command calls public functions and prints."""

from typing import TYPE_CHECKING

from outrider import lazy

if TYPE_CHECKING:
    from outrider.cli.commands import app as app
    from outrider.cli.commands import main as main

__all__ = ["app", "main"]

_HOMES = {"app": "outrider.cli.commands", "main": "outrider.cli.commands"}

__getattr__, __dir__ = lazy.exports(__name__, _HOMES)
