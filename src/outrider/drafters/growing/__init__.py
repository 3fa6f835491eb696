"""What drafters stand on: one growth loop, one tree builder, and the shapes that they declare."""

from outrider.drafters.growing.builder import (
    Children,
    TreeBuilder,
    declare,
    pending,
    selected,
)
from outrider.drafters.growing.loop import (
    Keys,
    Model,
    Policy,
    Source,
    expand,
    grow,
    inputs_for,
    keep_path,
    law_at,
    open_cache,
    read_on,
)
from outrider.drafters.growing.shapes import Layout, Level

__all__ = [
    "Children",
    "Keys",
    "Layout",
    "Level",
    "Model",
    "Policy",
    "Source",
    "TreeBuilder",
    "declare",
    "expand",
    "grow",
    "inputs_for",
    "keep_path",
    "law_at",
    "open_cache",
    "pending",
    "read_on",
    "selected",
]
