"""The command line. Thin: every command calls public functions and prints."""

from typing import TYPE_CHECKING

from outrider import lazy

if TYPE_CHECKING:
    from outrider.cli.commands import app as app

__all__ = ["app", "main"]


def main() -> None:
    """The program. What it needs is imported when it is called: a server's other process imports
    the script that calls it, and nothing else of that."""
    with lazy.ended_by_interrupt():
        from outrider.cli import commands

    commands.main()


__getattr__, __dir__ = lazy.exports(__name__, {"app": "outrider.cli.commands"})
