"""Devices: whether torch can use one, and where a model runs that accelerate placed (`device_map`).

Weights that are offloaded to the host's memory or to a disk stand on the meta device; hooks of
accelerate fetch them for a layer's call and drop them behind it. So such a model runs by its own
forward alone, on one device: nothing can be packed, lent or read by hand.
"""

from typing import Any

import torch

from outrider.errors import ConfigurationError, UnsupportedModel, first_line
from outrider.models.config import read

_STORES = frozenset({"cpu", "disk", "meta"})  #: places that may hold weights of another device


def offloaded(model: object) -> bool:
    """Whether some of a model's weights are fetched for each call.

    >>> offloaded(torch.nn.Linear(2, 2)), offloaded("a path")
    (False, False)
    """
    if not isinstance(model, torch.nn.Module) or not read(model, "hf_device_map", dict):
        return False
    return any(weight.device.type == "meta" for weight in model.parameters())


def device_of(model: Any) -> torch.device:
    """The device that a model computes on, wherever its weights are.

    Raises UnsupportedModel where there are several, ConfigurationError for weights that nobody
    would fetch.
    """
    places = read(model, "hf_device_map", dict) or {}
    spots = {str(place) for place in places.values()}
    runs = sorted(spots - _STORES)
    name = type(model).__name__
    if len(runs) > 1:
        raise UnsupportedModel(
            "a model spread over several devices is not supported: cache and masks live on one "
            f"device; got {name} on {', '.join(runs)}; load it on one of them, device_map="
            "{'': 0}, and what does not fit there on 'cpu' or 'disk'"
        )
    if places:
        place = runs[0] if runs else "cpu"
        return torch.device(f"cuda:{place}" if place.isdigit() else place)
    device = torch.device(model.device)
    if device.type == "meta":
        raise ConfigurationError(
            "the model's weights are on the meta device, which keeps none, and it has no "
            f"device_map by which they would be fetched; got {name}; load it by its path"
        )
    return device


def usable(given: str | torch.device) -> torch.device:
    """The device of that name, if torch can use it here; ConfigurationError if not."""
    try:
        place = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"unknown device; got {given!r}; use 'cpu', 'cuda' or 'cuda:1'"
        ) from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"torch sees {torch.cuda.device_count()} CUDA devices; got device={str(given)!r}; use "
            "device='cpu', or a build of torch for your GPU"
        )
    try:
        torch.empty(1, dtype=torch.float32, device=place)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"torch cannot use this device here; got device={str(given)!r} ({first_line(error)}); "
            "use device='cpu' or 'cuda'"
        ) from error
    return place
