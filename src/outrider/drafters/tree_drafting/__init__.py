"""What drafters stand on: one growth loop, one tree builder, and the shapes that they declare."""

from outrider.drafters.tree_drafting.builder import (
    Children as Children,
    TreeBuilder as TreeBuilder,
    bare as bare,
    declare as declare,
    pending as pending,
    selected as selected,
)
from outrider.drafters.tree_drafting.growth import (
    DrawKeys as DrawKeys,
    OneModel as OneModel,
    Policy as Policy,
    ProposalSource as ProposalSource,
    TreeModel as TreeModel,
    grow as grow,
    inputs_for as inputs_for,
    law_at as law_at,
    read_on as read_on,
    unread_of as unread_of,
)
from outrider.drafters.tree_drafting.shapes import Layout as Layout, TreeLevel as TreeLevel
