"""Every operation in plain PyTorch, on any device: the specification of all backends."""

from outrider.ops.reference.beam import Survivors, survivors, truncated
from outrider.ops.reference.draws import (
    greedily,
    independent,
    lacking,
    largest,
    likely,
    merit,
    perturbed,
    sample,
    several,
    streams,
)
from outrider.ops.reference.filters import floors, least, partial, unscaled
from outrider.ops.reference.laws import (
    EMPTY,
    draw,
    hot,
    probs,
    residual,
    scaled,
    select,
    stack,
)
from outrider.ops.reference.settling import settle
from outrider.ops.reference.walking import assisted, follow

__all__ = [
    "EMPTY",
    "Survivors",
    "assisted",
    "draw",
    "floors",
    "follow",
    "greedily",
    "hot",
    "independent",
    "lacking",
    "largest",
    "least",
    "likely",
    "merit",
    "partial",
    "perturbed",
    "probs",
    "residual",
    "sample",
    "scaled",
    "select",
    "settle",
    "several",
    "stack",
    "streams",
    "survivors",
    "truncated",
    "unscaled",
]
