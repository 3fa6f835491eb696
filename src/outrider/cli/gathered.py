"""Options that several commands share, as the fields of one dataclass."""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from outrider.models.calibrate import cores

Command = Callable[..., None]
Target = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Target: local path, GGUF file or hub name. Default: shipped."
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, max=cores(), help="CPU threads; default: measured.")
]


def gathered(
    name: str, kind: type[Any], panel: str | None = None, without: Sequence[str] = ()
) -> Callable[[Command], Command]:
    """Make a command whose parameter `name` is typed as one option for each field of a dataclass.

    `panel` is the heading under which --help lists them, behind the command's own. Fields of
    `without` are no options: they have their defaults.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size:
    ...     width: int = 2
    ...     depth: int = 3
    >>> @gathered("size", Size)
    ... def area(size: Size) -> None:
    ...     print(size.width * size.depth)
    >>> area(width=5, depth=3)
    15
    """
    hints = get_type_hints(kind, include_extras=True)
    by_name = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter(
            field.name, by_name, default=field.default, annotation=_under(panel, hints[field.name])
        )
        for field in fields(kind)
        if field.name not in without
    ]

    def of(command: Command) -> Command:
        @functools.wraps(command)
        def run(**typed: object) -> None:
            chosen = {option.name: typed.pop(option.name) for option in own}
            command(**{name: kind(**chosen)}, **typed)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            parameters += own if parameter.name == name else [parameter.replace(kind=by_name)]
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return of


def _under(panel: str | None, hint: object) -> Any:
    """An option's annotation with that heading."""
    if panel is None:
        return hint
    kind, *about = get_args(hint)
    about = [copy.copy(one) for one in about]
    for one in about:
        if isinstance(one, OptionInfo):
            one.rich_help_panel = panel
    return Annotated[kind, *about]
