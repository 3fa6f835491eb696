"""Options that several commands share, as the fields of one dataclass."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

Command = Callable[..., None]


def gathered(name: str, kind: type[Any]) -> Callable[[Command], Command]:
    """Make a command whose parameter `name` is typed as one option for each field of a dataclass.

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
        inspect.Parameter(field.name, by_name, default=field.default, annotation=hints[field.name])
        for field in fields(kind)
    ]

    def of(command: Command) -> Command:
        @functools.wraps(command)
        def run(**typed: object) -> None:
            chosen = {field.name: typed.pop(field.name) for field in fields(kind)}
            command(**{name: kind(**chosen)}, **typed)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            parameters += own if parameter.name == name else [parameter.replace(kind=by_name)]
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return of
