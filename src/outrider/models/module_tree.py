"""The modules of a model that runs through its own forward, and how its linear layers round alike.

In half precision on a CPU a product may round a row otherwise in calls of more rows (`rounding`). A
batch, a prompt or an encoder brings any number of them, so such layers have other products for the
time of a call (`model_lock.evaluating`), and the model itself stays what it is.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from outrider.models.config import read
from outrider.models.linear import BatchInvariantLinear, Product, steady


class ModuleTree(NamedTuple):
    """All modules, and a product of its own for each that needs one."""

    modules: tuple[torch.nn.Module, ...]
    products: tuple[tuple[torch.nn.Module, Product], ...] = ()


def parts_of(model: torch.nn.Module) -> ModuleTree:
    """Those of this model; where it needs to be, numbers of rows are tried once for each shape.

    Not of layers whose weight is sharded or whose forward somebody has replaced.
    """
    modules = tuple(model.modules())
    return ModuleTree(modules, tuple(_steady(modules)))


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
