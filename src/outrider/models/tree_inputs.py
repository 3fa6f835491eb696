"""Which nodes one model call reads: their tokens, positions, cache slots and what each may see.

A row's text lies in its cache slots in order, so the slot of a committed token is its position.
Below the pending token a draft's nodes stand in slots of their own: siblings share a position,
never a slot.
"""

from torch import Tensor

from outrider.tree import numbers, visible
from outrider.types import Nodes, Tree


def causal(tokens_BQ: Tensor, at_BQ: Tensor, wide: int, settled_B: Tensor | None = None) -> Nodes:
    """Tokens at positions `at_BQ`, each of which sees everything before it. `wide` slots are seen.

    `settled_B`: how far a row's text is known for good; None: up to the first of these tokens.

    >>> import torch
    >>> at = torch.arange(2)[None]
    >>> causal(at, at, 3).visible_BQW.tolist()
    [[[True, False, False], [True, True, False]]]
    """
    seen = numbers(wide, at_BQ.device) <= at_BQ[..., None]
    return Nodes(tokens_BQ, at_BQ, at_BQ, seen, at_BQ[:, 0] if settled_B is None else settled_B)


def of_tree(tokens_BN: Tensor, tree: Tree, first_B: Tensor, wide: int) -> Nodes:
    """The nodes of a whole draft whose pending token is at position and slot `first_B`."""
    slots_BN = first_B[:, None] + numbers(tree.nodes, first_B.device)
    if tree.is_chain:  # depth is the node's number, and a node sees all that stands before it
        return causal(tokens_BN, slots_BN, wide)
    positions_BN = first_B[:, None] + tree.depth_BN
    seen = visible(tree.ancestors_BNN, first_B, 0, tree.nodes, wide)
    return Nodes(tokens_BN, positions_BN, slots_BN, seen, first_B)
