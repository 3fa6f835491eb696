"""What other distributions bring by entry points, a group each: drafters, rules, heads, runners.

They are looked for when a name is asked for that is not ours, or all names are. What cannot be used
is named once in the log, and again to who asks for it; the others work.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from importlib import metadata
from typing import Any, Generic, TypeVar

from outrider import arguments
from outrider.errors import ConfigurationError

Value = TypeVar("Value")
_log = logging.getLogger("outrider")


def by_name(group: str) -> dict[str, list[metadata.EntryPoint]]:
    """The entry points of a group, those of one name together."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=group):
        found.setdefault(point.name, []).append(point)
    return dict(sorted(found.items()))


def subclass(given: object, base: type[Value], what: str) -> type[Value]:
    """A class that a package gives; ConfigurationError for anything else: `what` is a subclass of
    a class by name."""
    if isinstance(given, type) and issubclass(given, base):
        return given
    raise ConfigurationError(f"{what}; got {arguments.shown(given)}; give that class")


def origins(points: Iterable[metadata.EntryPoint]) -> str:
    """Where they are from: "a-package (module:name), ..."."""
    return ", ".join(
        f"{point.dist.name if point.dist else '?'} ({point.value})" for point in points
    )


def required(group: str, name: str, option: str, package: str) -> Any:
    """What an option takes from another distribution: the group's one entry point of that name.

    Raises ConfigurationError if there is none, if two packages bring it, or if it cannot be
    imported.
    """
    points = by_name(group).get(name, [])
    if not points:
        raise ConfigurationError(
            f"{option} needs {package}, which is not installed; pip install {package}, or leave "
            f"{option} out"
        )
    if len(points) > 1:
        raise ConfigurationError(
            f"two packages bring {option}; got {origins(points)}; uninstall one"
        )
    try:
        return points[0].load()
    except ImportError as error:
        raise ConfigurationError(
            f"{option} comes from {origins(points)}, which cannot be imported; got {error!r}; "
            f"install or mend what it misses, or leave {option} out"
        ) from error


class PluginGroup(Generic[Value]):
    """What the entry points of one group bring to a registry.

    group  "outrider.drafters", say
    kind   a word for one of them: "drafter"
    read   what an object is in the registry; raises ConfigurationError where it is of no use
    lab    names that come with outrider-lab
    """

    def __init__(
        self, group: str, kind: str, read: Callable[[object], Value], lab: Collection[str] = ()
    ) -> None:
        self.group, self.kind, self.read, self.lab = group, kind, read, lab
        self.broken: dict[str, str] = {}  #: why a name cannot be used

    def names(self) -> list[str]:
        """What is installed, usable or not: nothing is imported for this."""
        return list(by_name(self.group))

    def load(self, ours: Collection[str]) -> dict[str, Value]:
        """All that can be used, by name; what has one of our names is left out."""
        found: dict[str, Value] = {}
        for name, points in by_name(self.group).items():
            told = f"the {self.kind} {name!r} of {origins(points)}"
            if name in ours:
                _log.warning("left out: %s: outrider has a %s of that name", told, self.kind)
            elif len(points) > 1:
                self.broken[name] = f"two packages bring {told}; uninstall one"
            else:
                try:
                    value = self.read(points[0].load())
                    called = getattr(value, "name", name)
                    if called != name:
                        raise ConfigurationError(f"it is called {called!r}; name both alike")
                    found[name] = value
                except ConfigurationError as error:
                    self.broken[name] = f"{told} is of no use: {error}"
                except Exception as error:  # of whatever kind: it is another's code
                    told += f" cannot be imported; got {error!r}"
                    self.broken[name] = f"{told}; install or mend what it misses"
            if name in self.broken:
                _log.warning("left out: %s", self.broken[name])
        return found

    def refuse_broken(self, name: str) -> None:
        """Raise ConfigurationError with the reason if a plug-in of that name cannot be used."""
        if name in self.broken:
            raise ConfigurationError(self.broken[name])
        if name in self.lab:
            raise ConfigurationError(
                f"the {self.kind} {name!r} comes with outrider-lab, which is not installed; pip "
                "install outrider-lab"
            )

    def refuse_taken(self, name: object, registry: Collection[str]) -> None:
        """Raise ConfigurationError for what is no name, or one that something else has."""
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"a {self.kind}'s name is a text; got {name!r}; write one")
        if name in registry:
            raise ConfigurationError(
                f"there is a {self.kind} {name!r}; got another of that name; choose another name"
            )
