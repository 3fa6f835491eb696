"""Handles in place of states, and the functions of modelling files that are made to know them.

A function, or the forward of a mixer that calls none, is replaced once, for good, by one that looks
for a handle and calls transformers' own where there is none: the user's own calls of the model, and
`plain`, are what they were.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock, local
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from outrider.models.config import read
from outrider.models.recurrent import MIXERS
from outrider.models.recurrent.call import Recurrence
from outrider.models.recurrent.states import RecurrentStates

Function: TypeAlias = Callable[..., Any]

_LOCK = Lock()
_DONE = "_outrider_knows_handles"


@dataclass(frozen=True)
class StateHandle:
    """What a mixer gets in place of a state: a layer's part of the rows' states."""

    states: RecurrentStates
    layer: int
    number: int = 0  #: of the state, in a layer that has several

    def to(self, *_: object, **__: object) -> "StateHandle":
        """Itself: a state's dtype and place are outrider's business."""
        return self

    def copy_(self, other: object) -> "StateHandle":
        """Itself, where a model copies what a mixer returned into its cache: it was written."""
        return self

    def __getitem__(self, place: tuple[slice, int]) -> "StateHandle":
        """Of all rows, the state with this number: mixers with several heads index theirs so."""
        return replace(self, number=place[1])

    def windows(self, x_BCQ: Tensor, size: int) -> Tensor:
        """Inputs [B, C, Q, size] of a convolution: of each node and of those before it."""
        return self.states.windows(self.layer, self.number, x_BCQ, size)

    def convolve(
        self, x_BCQ: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        """What a convolution [B, C, Q] has of these inputs and those before them, compiled."""
        return self.states.convolve(self.layer, self.number, x_BCQ, weight_CK, bias_C, activation)

    def recur(self, recurrence: Recurrence, *inputs: Tensor) -> Tensor:
        """Outputs of a recurrence over the call's nodes."""
        return self.states.recur(self.layer, self.number, recurrence, *inputs)


class ConvolutionInputs(NamedTuple):
    """What a cache of ours returns for a convolution's inputs: they are written when it runs."""

    handle: StateHandle
    x_BCQ: Tensor


@dataclass(frozen=True)
class LayerHandles:
    """A layer's handles by a state's number: mixers of transformers before 5.21 ask layers."""

    get: Callable[[int, int], StateHandle]
    layer: int

    def __getitem__(self, number: int) -> StateHandle:
        return self.get(self.layer, number)


class _LastHandle(local):
    """What a thread's mixer has asked its cache for last: functions without an argument for it."""

    handle: StateHandle | None = None


_LAST = _LastHandle()


def ask(handle: StateHandle | None) -> None:
    """Note that a mixer of this thread has asked for a state; None: its call is over."""
    _LAST.handle = handle


def asked() -> StateHandle | None:
    """The state that was asked for; the next time, that of the layer's next head."""
    handle = _LAST.handle
    if handle is not None:
        _LAST.handle = replace(handle, number=handle.number + 1)
    return handle


def handle_of(cache: object, mixer: Any) -> StateHandle | None:
    """The handle of a mixer's state, if the cache that it is given is one of ours."""
    states = read(cache, "recurrent", RecurrentStates)
    if states is None:
        return None
    numbers = cache.numbers  # type: ignore[attr-defined]
    return StateHandle(states, numbers[mixer.layer_idx])


def wrap_handed(ours: Function, name: str, place: int | None = None) -> Function:
    """A wrapper of functions of transformers' that has `ours` called with all that was given where
    the argument of this name, or at this place, is what a cache of ours hands on."""

    def wrapper(theirs: Function) -> Function:
        @functools.wraps(theirs)
        def run(*given: Any, **named: Any) -> Any:
            by_place = given[place : place + 1] if place is not None else ()
            handed = by_place[0] if by_place else named.get(name)
            if isinstance(handed, (StateHandle, ConvolutionInputs)):
                return ours(*given, **named)
            return theirs(*given, **named)

        return run

    return wrapper


def wrap_update(ours: Function) -> Function:
    """A wrapper of transformers' for one token that has `ours` called where it is given a handle.

    `ours` takes the same, the state's handle first, with tables [B, 1, ...] of the token's own, and
    returns outputs [B, 1, ...]: one token goes the way of several.
    """

    def state_update(
        state: StateHandle,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **more: object,
    ) -> object:
        gate = None if z is None else z[:, None]
        tables = (t[:, None] for t in (hidden_states, dt, B, C))
        out: Tensor = ours(state, *tables, A, D, dt_bias, dt_softplus, gate)
        return out[:, 0].to(hidden_states.dtype)

    return wrap_handed(state_update, "state", 0)


def install(model: torch.nn.Module) -> frozenset[str]:
    """Let the functions of the model's files know handles; the names of those that are there."""
    found: set[str] = set()
    homes = {type(part).__module__ for part in model.modules()}
    with _LOCK:
        for home in sorted(home for home in homes if home.startswith("transformers.models.")):
            file = sys.modules[home]
            names = [name for name in MIXERS if callable(vars(file).get(name))]
            found |= set(names)
            done: set[str] = vars(file).setdefault(_DONE, set())
            for name in set(names) - done:
                kind = importlib.import_module(f"outrider.models.recurrent.{MIXERS[name]}")
                theirs = vars(file)[name]
                if isinstance(theirs, type):
                    vars_of: Any = theirs
                    vars_of.forward = kind.WRAPPERS[name](vars_of.forward)
                else:
                    setattr(file, name, kind.WRAPPERS[name](theirs))
                done.add(name)
        _number(model)
    return frozenset(found)


def _number(model: torch.nn.Module) -> None:
    """Tell mixers which do not know it the number of their layer, as others do: `layer_idx`."""
    for layers in model.modules():
        if isinstance(layers, torch.nn.ModuleList):
            for number, layer in enumerate(layers):
                for part in layer.modules():
                    if type(part).__name__ in MIXERS and "layer_idx" not in vars(part):
                        vars(part)["layer_idx"] = number
