"""What concurrent calls of one model object share: evaluation mode, and room for a patch.

Threads may drive one model at once, each with a cache of its own. What a call has to change on the
model itself is changed here: for its time alone, once however many calls overlap, and put back by
the last of them whatever happened in between.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, RLock, get_ident
from types import ModuleType
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch

from outrider.models.module_tree import ModuleTree

P = ParamSpec("P")
R = TypeVar("R")

#: Held by whoever narrows a configuration for a check, and by whoever reads one meanwhile. One for
#: all models: several may share a configuration object.
CONFIGURATION = RLock()


class _Locked:
    """The locks of one model, and the parts of it that calls under way have changed."""

    def __init__(self) -> None:
        self.patch = RLock()
        self.mode = Lock()
        self.inside = 0
        self.switched: list[torch.nn.Module] = []
        #: modules, names of attributes, and what was there: `_NOTHING`, or an own one
        self.replaced: list[tuple[torch.nn.Module, str, object]] = []


_GUARDS: WeakKeyDictionary[torch.nn.Module, _Locked] = WeakKeyDictionary()
_LOCK = Lock()
_NOTHING = object()


def _guard(model: torch.nn.Module) -> _Locked:
    with _LOCK:
        guard = _GUARDS.get(model)
        if guard is None:
            guard = _GUARDS[model] = _Locked()
        return guard


def alone(model: torch.nn.Module) -> RLock:
    """A lock for one call at a time: for families whose module is patched while it runs."""
    return _guard(model).patch


@contextmanager
def evaluating(model: torch.nn.Module, parts: ModuleTree | None = None) -> Iterator[None]:
    """Without dropout for the time of a block; every module's own mode comes back behind it.

    `parts` are the model's, if they are at hand: to find them takes longer than to ask. Their
    products stand in for the layers' own, and forwards for what torch.compile made of them, in
    whatever thread, as long as there is such a call.
    """
    guard = _guard(model)
    with guard.mode:
        guard.inside += 1
        for module in model.modules() if parts is None else parts.modules:
            if module.training:  # also inside another call: somebody may have switched it since
                guard.switched.append(module)
                module.__dict__["training"] = False  # torch's own way takes microseconds a module
        for module, product in () if parts is None else parts.products:
            if "forward" not in module.__dict__:  # nobody else's call is under way
                guard.replaced.append((module, "forward", _NOTHING))
                module.__dict__["forward"] = product
        for module, name, own in () if parts is None else parts.compiled:
            if module.__dict__.get(name) is not own:
                guard.replaced.append((module, name, module.__dict__[name]))
                module.__dict__[name] = own
    try:
        yield
    finally:
        with guard.mode:
            guard.inside -= 1
            if not guard.inside:
                for module in guard.switched:
                    module.__dict__["training"] = True
                guard.switched.clear()
                for module, name, before in guard.replaced:
                    if before is _NOTHING:
                        del module.__dict__[name]
                    else:
                        module.__dict__[name] = before
                guard.replaced.clear()


def mine(value: Callable[P, R], others: Callable[P, R]) -> Callable[P, R]:
    """A function that is `value` in this thread and `others` in every other."""
    me = get_ident()

    def either(*args: P.args, **keywords: P.kwargs) -> R:
        return (value if get_ident() == me else others)(*args, **keywords)

    return either


@contextmanager
def instead(
    lock: AbstractContextManager[bool | None],
    owner: torch.nn.Module | ModuleType,
    name: str,
    value: Callable[..., object],
) -> Iterator[None]:
    """A function replaced for a moment, in this thread; an instance's own leaves no trace."""
    with lock:
        own = vars(owner)
        had, before = name in own, own.get(name)
        setattr(owner, name, mine(value, getattr(owner, name)))
        try:
            yield
        finally:
            if had:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
