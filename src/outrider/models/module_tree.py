"""The modules of a model that runs through its own forward, and what stands in for some in a call.

In half precision on a CPU a product may round a row otherwise in calls of more rows (`rounding`). A
batch, a prompt or an encoder brings any number of them, so such layers have other products for the
time of a call (`model_lock.evaluating`), and the model itself stays what it is. So do modules that
`torch.compile` has made code for: every number of nodes and every width of a cache would be
compiled anew, for minutes, so that their own forwards are called.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from outrider.models.config import read
from outrider.models.linear import BatchInvariantLinear, Product, steady


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
