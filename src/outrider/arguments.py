"""What users give as arguments: read once, as plain Python values, or refused by name.

Scalars of NumPy and torch are numbers here. Booleans are not: `top_k=True` is a slip. A number that
must be whole is given as one: 3, not 3.0.
"""

import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeGuard, TypeVar, cast, runtime_checkable

from outrider.errors import ConfigurationError, kind_of

LONGEST = 80  #: characters of a value in a message

Given = TypeVar("Given")
_PYTHONS = frozenset({bool, float, int, str, type(None)})


@runtime_checkable
class Listable(Protocol):
    """An array, a tensor or a column: what makes a list of itself."""

    def tolist(self) -> object:
        """Its values as Python's."""


def refuse(name: str, what: str, given: object, do: str) -> NoReturn:
    """Raise ConfigurationError: `name` must be `what`, this was given, do that."""
    raise ConfigurationError(f"{name} must be {what}; got {shown(given)}; {do}")


def shown(given: object) -> str:
    """A value for a message: its type where the representation fills the screen.

    >>> shown("0.6"), shown(list(range(99)))
    ("'0.6'", 'a list of 99')
    """
    if isinstance(given, _loaded("torch.nn", "Module")):
        return f"a {type(given).__name__}"
    text = repr(given)
    if len(text) <= LONGEST and "\n" not in text:
        return text
    count = f" of {len(given)}" if isinstance(given, Sized) else ""
    return f"a {type(given).__name__}{count}"


def plain(given: Given) -> Given:
    """A scalar of NumPy or torch as Python's; anything else as it is."""
    if type(given) in _PYTHONS:
        return given
    kinds = _loaded("numpy", "generic", "ndarray") + _loaded("torch", "Tensor")
    if isinstance(given, kinds) and given.shape == ():
        return cast(Given, given.item())
    return given


def at_home(given: Any) -> Any:
    """Paths, alone or in lists and mappings, with a ~ at their beginning as a shell reads it.

    >>> at_home("org/name"), at_home(None), at_home("~/model") == str(Path.home() / "model")
    ('org/name', None, True)
    """
    if isinstance(given, Mapping):
        return {name: at_home(one) for name, one in given.items()}
    if type(given) in (list, tuple):
        return type(given)(map(at_home, given))
    if isinstance(given, (str, Path)) and str(given).startswith("~"):
        return type(given)(os.path.expanduser(given))
    return given


def template(given: object) -> str:
    """The text of a chat template that is given as a file, or as its text.

    Raises ConfigurationError for a file that cannot be read, or has no template in it.
    """
    what, signs = "chat_template", re.compile(r"\{[{%]")
    if not isinstance(given, (str, Path)):
        refuse(what, "a file, or the text of a template", given, "name the file")
    if isinstance(given, str) and signs.search(given):
        return given
    do = "give a file, or the text of a template in Jinja"
    try:
        text = Path(at_home(given)).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{what} cannot be read; got {str(given)!r} ({kind_of(error)}); {do}"
        ) from error
    if not signs.search(text):
        raise ConfigurationError(f"{what} is no template; got {str(given)!r} without Jinja; {do}")
    return text


def fields_of(given: object, names: Iterable[str]) -> dict[str, Any]:
    """Fields of an object by name, in this order: to go through several alike.

    >>> fields_of(1j, ("imag", "real"))
    {'imag': 1.0, 'real': 0.0}
    """
    return {name: getattr(given, name) for name in names}


def _loaded(module: str, *names: str) -> tuple[Any, ...]:
    """Types of a library, if it is loaded: nobody gives an object of one that is not."""
    found = sys.modules.get(module)
    return () if found is None else tuple(getattr(found, name) for name in names)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is a whole number of at least 1."""
    return is_whole(value) and value > 0


def is_size(value: object) -> TypeGuard[int]:
    """Whether it is a whole number of at least 0."""
    return is_whole(value) and value >= 0


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(
    name: str, given: object, do: str, least: int | None = None, most: int = 2**63 - 1
) -> int:
    """A whole number of at least `least`; `do` says what to do about another value.

    >>> whole("top_k", 5, "use 0 to switch it off", least=0)
    5
    """
    value = plain(given)
    if not is_whole(value) or (least is not None and value < least):
        refuse(name, "a whole number" + at_least(least), given, do)
    if not -(2**63) <= value <= most:
        refuse(name, "a whole number of 64 bits", given, do)
    return operator.index(value)


def wholes(of: object, do: str, **least: int) -> None:
    """Read these fields of a frozen dataclass in place: whole numbers, each of at least so much.

    To be called by its `__post_init__`; `do` says what to do about another value.
    """
    for name, low in least.items():
        object.__setattr__(of, name, whole(name, vars(of)[name], do, least=low))


def at_least(least: int | None) -> str:
    """The end of a sentence about a whole number."""
    return "" if least is None else f" of at least {least}"


def number(name: str, given: object, what: str, do: str) -> float:
    """A number. Its range is the caller's to check; `what` and `do` tell the user.

    >>> number("top_p", 1, "a number in (0, 1]", "use 1 to switch it off")
    1
    """
    value = plain(given)
    if not is_number(value):
        refuse(name, what, given, do)
    try:
        wide = float(value)
    except OverflowError:
        refuse(name, what, given, do)
    return value if type(value) in (int, float) else wide


def by_name(name: str, given: object) -> dict[str, object]:
    """Options by name, the empty dictionary for None.

    >>> by_name("rule_options", {"lenience": 0.3})
    {'lenience': 0.3}
    """
    options = {} if given is None else given
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        what = "a mapping of names to values"
        refuse(name, what, given, f"write {name}={{'name': value}}")
    return dict(options)


def several(
    name: str, given: object, what: str, do: str, fits: Callable[..., bool], *, ordered: bool = True
) -> tuple[Any, ...]:
    """The items of a list, tuple or array, each of which fits; sets only where order is nothing.

    >>> several("branching", [3, 2], "whole numbers", "write (3, 2)", is_whole)
    (3, 2)
    """
    if isinstance(given, (str, bytes, Mapping)) or (ordered and isinstance(given, Set)):
        refuse(name, what, given, do)
    if not isinstance(given, Iterable):
        refuse(name, what, given, do)
    try:
        values = tuple(map(plain, given))
    except TypeError:  # an array of no dimension
        refuse(name, what, given, do)
    if not all(map(fits, values)):
        refuse(name, what, values if isinstance(given, Iterator) else given, do)
    return values
