"""The command line. Thin: every command calls public functions and prints."""

import os
import sys
from typing import TYPE_CHECKING

from outrider import lazy

if TYPE_CHECKING:
    from outrider.cli.commands import app as app

__all__ = ["app", "main"]


def main() -> None:
    """The program. What it needs is imported when it is called: a server's other process imports
    the script that calls it, and nothing else of that."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if vars(sys)[name] is None:  # it was closed: the next file, or a client, has its number
            vars(sys)[name] = open(os.open(os.devnull, os.O_RDWR), mode, closefd=False)
    with lazy.ended_by_interrupt():
        from outrider.cli import commands

    commands.main()


__getattr__, __dir__ = lazy.exports(__name__, {"app": "outrider.cli.commands"})
