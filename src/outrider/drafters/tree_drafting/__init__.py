"""What drafters stand on: one growth loop, one tree builder, and the shapes that they declare."""

from outrider.drafters.tree_drafting.builder import (
    Children,
    TreeBuilder,
    bare,
    declare,
    pending,
    selected,
)
from outrider.drafters.tree_drafting.growth import (
    DrawKeys,
    OneModel,
    Policy,
    ProposalSource,
    TreeModel,
    expand,
    grow,
    inputs_for,
    keep_path,
    law_at,
    open_cache,
    read_on,
    unread_of,
)
from outrider.drafters.tree_drafting.shapes import Layout, TreeLevel

__all__ = [
    "Children",
    "DrawKeys",
    "Layout",
    "OneModel",
    "Policy",
    "ProposalSource",
    "TreeBuilder",
    "TreeLevel",
    "TreeModel",
    "bare",
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
    "unread_of",
]
