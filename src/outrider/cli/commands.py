"""The program `outrider`: its commands, what other distributions add, and its exit codes."""

import copy
import errno
import functools
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperOption

import outrider
from outrider import arguments, lazy
from outrider.cli import batch, chat, generate, serve, train_draft, transcribe
from outrider.cli.console import EXIT_CLOSED, EXIT_ERROR, EXIT_INTERRUPTED, err, fail, speak_utf8
from outrider.errors import ConfigurationError, OutriderError, out_of_memory
from outrider.models import isa
from outrider.plugins import by_name, origins

# Commands that other distributions bring, by the entry-point group `outrider.commands`.
#
# An entry point names a `typer.Typer`, which becomes a group of commands, or a function, which
# becomes one. What cannot be used says why when it is called, and keeps nothing else from working.

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
    _once(app)


class _Once(TyperCommand):
    """A command that refuses two values of an option of which one counts, and names a wrong one."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read what was typed."""
        if ctx.resilient_parsing:  # for completion, of what is half typed
            return super().parse_args(ctx, args)
        single = [one for one in self.params if isinstance(one, TyperOption) and not one.multiple]
        every, repeated = copy.copy(self), [copy.copy(one) for one in single]
        for one in repeated:
            one.multiple = True
        every.params = [one for one in self.params if one not in single] + list(repeated)
        typed, _, _ = every.make_parser(ctx).parse_args(args=list(args))
        for one in single:
            said = list(dict.fromkeys(typed.get(one.name, ())))
            if len(said) > 1:
                flags = [*one.opts[:1], *one.secondary_opts] if one.is_flag else map(repr, said)
                flag = max((*one.opts, *one.secondary_opts), key=len)
                what = f"{flag} has one value; got {' and '.join(flags)}; give one of them"
                raise ConfigurationError(what)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            given = None if error.param is None else typed.get(error.param.name)
            each = [repr(one) for one in given] if isinstance(given, list) else []
            if each and not any(one in error.message for one in each):
                error.message = f"{error.message.rstrip('.')}; got {' and '.join(each)}"
            raise


def _once(app: typer.Typer) -> None:
    """Have all commands refuse what would be lost, but for those with a class of their own."""
    for command in app.registered_commands:
        if command.cls in (None, TyperCommand):
            command.cls = _Once
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _once(group.typer_instance)


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


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

lazy.collect_seldom()

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    name="outrider",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        beside = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
        typer.echo(f"outrider {outrider.__version__} ({beside})")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and leave."),
    ] = False,
) -> None:
    """Speculative decoding that is exact, fast and a pleasure to use."""
    isa.level()  # a misspelt OUTRIDER_ISA is an error of every command


def _at_home(command: Callable[..., None]) -> Callable[..., None]:
    """The command, told where ~ is: no shell says it in --option=~/file."""

    @functools.wraps(command)
    def run(**typed: object) -> None:
        text = {name: one for name, one in typed.items() if not _paths(one)}
        command(**text, **{n: arguments.at_home(one) for n, one in typed.items() if n not in text})

    return run


def _paths(typed: object) -> bool:
    """Whether the option parser made paths of it."""
    return isinstance(typed[0] if isinstance(typed, list) and typed else typed, Path)


app.command("batch")(_at_home(batch.batch))
app.command("chat")(_at_home(chat.chat))
app.command("generate")(_at_home(generate.generate))
app.command("serve")(_at_home(serve.serve))
app.command("train-draft")(_at_home(train_draft.command))
app.command("transcribe")(_at_home(transcribe.transcribe))
register(app)


def main() -> None:
    """Entry point.

    Exit codes: 0 done or exact, 1 not exact or not all of it done, 2 an error that the message
    explains, 3 was inconclusive, 130 interrupted, 141 the output was closed.
    """
    speak_utf8()
    try:
        code = app(standalone_mode=False)  # typer hands the code of an Exit back
        if isinstance(code, int) and code:
            sys.exit(code)
    except OutriderError as error:
        fail(str(error))
        sys.exit(EXIT_ERROR)
    except SystemExit as leave:  # of a closed pipe typer and rich make exit code 1
        if isinstance(leave.__context__, BrokenPipeError):
            sys.exit(EXIT_CLOSED)
        raise
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is on the screen
            sys.exit(EXIT_ERROR)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            where = "" if error.filename is None else f" {error.filename}"
            fail(f"cannot write{where}; got {error.strerror!r}; make room, or write elsewhere")
            sys.exit(EXIT_ERROR)
        if isinstance(error, OSError) and error.filename is not None:
            fail(f"cannot open {error.filename}; got {error.strerror!r}; check the path")
            sys.exit(EXIT_ERROR)
        if out_of_memory(error):
            fail(f"out of memory: {str(error)[:200]!r}; use a smaller model, draft or dtype")
            sys.exit(EXIT_ERROR)
        if hasattr(error, "format_message"):  # a usage error of the option parser
            fail(error.format_message())
            sys.exit(EXIT_ERROR)
        raise


__all__ = ["app", "main"]
