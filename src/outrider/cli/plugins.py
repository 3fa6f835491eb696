"""Commands that other distributions bring, by the entry-point group `outrider.commands`.

An entry point names a `typer.Typer`, which becomes a group of commands, or a function, which
becomes one. What cannot be used says why when it is called, and keeps nothing else from working.
"""

from importlib import metadata

import typer

from outrider.cli.console import err
from outrider.errors import ConfigurationError
from outrider.plugins import by_name, origins

GROUP = "outrider.commands"
#: Commands of ours that have a distribution of their own.
ELSEWHERE = dict.fromkeys(("bench", "certify", "compare", "demo", "plan"), "outrider-lab")


def register(app: typer.Typer) -> None:
    """Add to an application what is installed, and in place of what is not how to install it."""
    ours = {command.name for command in app.registered_commands}
    found = by_name(GROUP)
    for name, points in found.items():
        if name in ours:
            err.print(f"left out: {origins(points)}: outrider has a command {name!r}", markup=False)
        elif len(points) > 1:
            told = f"two packages bring the command {name!r}; got {origins(points)}; uninstall one"
            _refuse(app, name, told)
        else:
            _add(app, points[0])
    for name, distribution in ELSEWHERE.items():
        if name not in found:
            told = f"`outrider {name}` needs {distribution}, which is not installed"
            _refuse(app, name, f"{told}; pip install {distribution}", hidden=True)


def _add(app: typer.Typer, point: metadata.EntryPoint) -> None:
    try:
        command = point.load()
    except Exception as error:  # of whatever kind: it is another's code
        told = f"the command {point.name!r} of {origins([point])} cannot be imported"
        _refuse(app, point.name, f"{told}; got {error!r}; install or mend what it misses")
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=point.name)
    elif callable(command) and not isinstance(command, type):
        app.command(point.name)(command)
    else:
        told = f"an entry point of {GROUP!r} is a typer.Typer or a function; got {command!r}"
        _refuse(app, point.name, f"{told} from {origins([point])}; mend it, or uninstall it")


def _refuse(app: typer.Typer, name: str, told: str, hidden: bool = False) -> None:
    """A command that says one sentence, whatever words follow it."""

    def refuse(context: typer.Context) -> None:
        raise ConfigurationError(told)

    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(
        name, hidden=hidden, help="Unusable.", add_help_option=False, context_settings=anything
    )(refuse)
