"""Names that are imported when they are first asked for (PEP 562), so that a package opens fast."""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Generic, TypeVar

Value = TypeVar("Value")
_SELDOM, _USUAL = (100_000, 50, 100), gc.get_threshold()


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage in cycles meanwhile.

    Importing torch and transformers makes very many objects that stay, and looking at them again
    and again takes time.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """In here Ctrl-C ends the program at once, with code 130, where nobody else sees to it.

    Packages that are being imported may catch KeyboardInterrupt and go on, or fail with an error
    of their own.
    """
    usual = signal.default_int_handler
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def collect_seldom() -> None:
    """The same until `collect_as_usual`, for a program that is about to import much; nearly: it
    looks after a hundred thousand new objects, in case that never comes."""
    gc.set_threshold(*_SELDOM)


def collect_as_usual() -> None:
    """After the imports and the first load: look for garbage as usual, but no more at what these
    made, which takes 0.1 to 0.3 s and came in the middle of some text.

    A program that called `collect_seldom` leaves it out for good (`gc.freeze`). Elsewhere objects
    are not ours to keep, and it is looked at once, now: after that only when a quarter is new.

    >>> collect_seldom()
    >>> collect_as_usual()
    >>> gc.get_threshold() == _USUAL
    True
    """
    if gc.get_threshold() == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_USUAL)
        atexit.register(_unfrozen)
    elif gc.isenabled() and not gc.get_freeze_count():
        _collected()


def _unfrozen() -> None:
    """Triton's bindings print a page on objects that are still there when a program has ended.
    Without them it ends sooner, as nothing is looked through then either."""
    if "triton" in sys.modules:
        gc.unfreeze()


@cache
def _collected() -> int:
    """Once in a process."""
    return gc.collect()


def exports(
    package: str, homes: Mapping[str, str], parts: tuple[str, ...] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose names live in other modules.

    package  the package's `__name__`
    homes    the module that each name is imported from
    parts    subpackages that are attributes of the package as well

    What was asked for once is an attribute of the package from then on. Other names raise
    AttributeError.

    >>> get, _ = exports("outrider.lazy", {"sqrt": "math"})
    >>> get("sqrt")(9.0)
    3.0
    """

    def get(name: str) -> object:
        if name in parts:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with uncollected():
            value: object = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *parts})

    return get, names


class Registry(MutableMapping[str, Value], Generic[Value]):
    """Things by name, each imported when it is first looked up; others can be added.

    `plugins`, given the names here, says what else there is. It is asked once, when a name that is
    not here is looked for, or all names are.

    >>> found = Registry({"pi": "math:pi", "empty": "builtins:list()"})
    >>> found["e"] = 2.7
    >>> list(found), found["pi"] > 3, found["empty"]
    (['pi', 'empty', 'e'], True, [])
    """

    def __init__(
        self,
        homes: Mapping[str, str],
        plugins: "Callable[[frozenset[str]], Mapping[str, Value]] | None" = None,
    ) -> None:
        """homes: for each name "module:attribute", or "module:attribute()" for what it returns."""
        self._homes: dict[str, str] = dict(homes)
        self._found: dict[str, Value] = {}
        self._plugins = plugins

    def _look(self) -> None:
        """Add what plug-ins bring; while they are imported they see what is here."""
        if self._plugins is not None:
            plugins, self._plugins = self._plugins, None
            self.update(plugins(frozenset(self._homes)))

    def __getitem__(self, name: str) -> Value:
        if name not in self._found:
            if name not in self:
                raise KeyError(name)
            if name in self._found:  # a plug-in's
                return self._found[name]
            module, _, attribute = self._homes[name].partition(":")
            with uncollected():
                value = getattr(import_module(module), attribute.removesuffix("()"))
            self._found[name] = value() if attribute.endswith("()") else value
        return self._found[name]

    def __setitem__(self, name: str, value: Value) -> None:
        self._homes.setdefault(name, "")
        self._found[name] = value

    def __delitem__(self, name: str) -> None:
        del self._homes[name]
        self._found.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        self._look()
        return iter(self._homes)

    def __len__(self) -> int:
        self._look()
        return len(self._homes)

    def __contains__(self, name: object) -> bool:
        if name not in self._homes:
            self._look()
        return name in self._homes

    def __repr__(self) -> str:
        return f"Registry({', '.join(self._homes)})"


__all__ = [
    "Registry",
    "collect_as_usual",
    "collect_seldom",
    "ended_by_interrupt",
    "exports",
    "uncollected",
]
