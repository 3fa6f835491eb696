"""Handles in place of states, and the functions of modelling files that are made to know them.

A function is replaced once, for good, by one that looks for a handle and calls transformers' own
where there is none: the user's own calls of the model, and `plain`, are what they were.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from outrider.models.recurrent import MIXERS
from outrider.models.recurrent.states import Recurrence, RecurrentStates

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

    def windows(self, x_BCQ: Tensor, size: int) -> Tensor:
        """Inputs [B, C, Q, size] of a convolution: of each node and of those before it."""
        return self.states.windows(self.layer, self.number, x_BCQ, size)

    def recur(self, recurrence: Recurrence, *inputs: Tensor) -> Tensor:
        """Outputs of a recurrence over the call's nodes."""
        return self.states.recur(self.layer, recurrence, *inputs)


def modelling_files(model: torch.nn.Module) -> list[ModuleType]:
    """The files of transformers that the model's parts are written in."""
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def install(model: torch.nn.Module) -> frozenset[str]:
    """Let the functions of the model's files know handles; the names of those that are there."""
    found: set[str] = set()
    with _LOCK:
        for file in modelling_files(model):
            names = [name for name in MIXERS if callable(vars(file).get(name))]
            found |= set(names)
            done: set[str] = vars(file).setdefault(_DONE, set())
            for name in set(names) - done:
                kind = importlib.import_module(f"outrider.models.recurrent.{MIXERS[name]}")
                setattr(file, name, kind.WRAPPERS[name](vars(file)[name]))
                done.add(name)
    return frozenset(found)
