"""Numerical operations behind one set of names; the PyTorch reference is the specification."""

from outrider.ops.backend import NAMES, chosen, fused, use
from outrider.ops.reference import (
    draw,
    follow,
    log_probs,
    probs,
    residual,
    sample,
    scaled,
    select,
)

__all__ = [
    "NAMES",
    "chosen",
    "draw",
    "follow",
    "fused",
    "log_probs",
    "probs",
    "residual",
    "sample",
    "scaled",
    "select",
    "use",
]
