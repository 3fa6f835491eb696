"""Numerical operations behind one set of names; the PyTorch reference is the specification."""

from outrider.ops.backend import NAMES, chosen, fused, nucleus, use
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
    "nucleus",
    "probs",
    "residual",
    "sample",
    "scaled",
    "select",
    "use",
]
