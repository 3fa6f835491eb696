"""What concurrent calls of one model object share: evaluation mode, and room for a patch.

Threads may drive one model at once, each with a cache of its own. What a call has to change on the
model itself is changed here: for its time alone, once however many calls overlap, and put back by
the last of them whatever happened in between.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, RLock, get_ident
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch

from outrider.models.config import read
from outrider.models.linear import BatchInvariantLinear, Product, steady

# The modules of a model that runs through its own forward, and what stands in for some in a call.
#
# In half precision on a CPU a product may round a row otherwise in calls of more rows. A batch, a
# prompt or an encoder brings any number of them, so such layers have other products for the time of
# a call (`evaluating`), and the model itself stays what it is. So do modules that `torch.compile`
# has made code for: every number of nodes and every width of a cache would be compiled anew, for
# minutes, so that their own forwards are called.


class ModuleTree(NamedTuple):
    """All modules, and a product of its own for each that needs one.

    `compiled` has of each module that is compiled the attribute that calls the compiled code, and
    what is there without it.
    """

    modules: tuple[torch.nn.Module, ...]
    products: tuple[tuple[torch.nn.Module, Product], ...] = ()
    compiled: tuple[tuple[torch.nn.Module, str, Any], ...] = ()


def parts_of(model: torch.nn.Module) -> ModuleTree:
    """Those of this model; where it needs to be, numbers of rows are tried once for each shape.

    Not of layers whose weight is sharded or whose forward somebody has replaced.
    """
    modules = tuple(model.modules())
    return ModuleTree(modules, tuple(_steady(modules)), tuple(_compiled(modules)))


def uncompiled(given: Any) -> Any:
    """The model inside what `torch.compile(model)` returns; anything else as it is.

    >>> uncompiled(3)
    3
    """
    whole = type(given).__name__ == "OptimizedModule" and isinstance(given, torch.nn.Module)
    return given.get_submodule("_orig_mod") if whole else given


def _compiled(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """By `module.compile()`, and where a forward is a compiled function."""
    for module in modules:
        own = vars(module)
        if own.get("_compiled_call_impl") is not None:
            yield module, "_compiled_call_impl", None
        forward = read(own.get("forward"), "_torchdynamo_orig_callable", object)
        if forward is not None:
            yield module, "forward", forward


def _steady(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, Product]]:
    for module in modules:
        if type(module) is not torch.nn.Linear or type(module.weight) is not torch.nn.Parameter:
            continue
        if not isinstance(vars(module).get("forward"), BatchInvariantLinear | None):
            continue  # one of ours is there while another call of the model is under way
        if sharded(module) is None and (product := steady(module)) is not None:
            yield module, product


def sharded(module: torch.nn.Linear) -> torch.Tensor | None:
    """This process's part of a weight that is sharded; None: it is whole."""
    return read(module.weight, "_local_tensor", torch.Tensor)


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
