"""Numerical operations behind one set of names; the PyTorch reference is the specification."""

from outrider.ops.backend import (
    NAMES,
    chosen,
    floors,
    fused,
    independent,
    nucleus,
    on_host,
    several,
    streams,
    use,
)
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
    "floors",
    "follow",
    "fused",
    "independent",
    "log_probs",
    "nucleus",
    "on_host",
    "probs",
    "residual",
    "sample",
    "scaled",
    "select",
    "several",
    "streams",
    "use",
]
