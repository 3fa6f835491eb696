"""The draft's law at nodes of a growing tree: what the target's side does to logits, done here too.

A draft that ignores a request's penalties, bans and processors is exact and refused more often: the
target's laws have them. So every drafter with a law shapes it, at each node with the node's own
prefix, before temperature and filters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling import warp
from outrider.shaping import shape
from outrider.types import Context, Laws, Tree


def law_at(
    logits_BnV: Tensor,
    context: Context,
    tokens: Sequence[Tensor],
    tree: Tree,
    start: int = 0,
    alive_Bn: Tensor | None = None,
) -> Laws:
    """Laws [B, n, V] of nodes start, start + 1, ... under the row's sampling parameters.

    `tokens` holds the tokens [B, m] of all nodes so far, level after level, the pending one first;
    of `tree` their parents, depths and ancestors are read. `alive_Bn` marks nodes whose path has
    positive probability (None: all): processors are spared the others. The `logits_BRV` of the
    result are the shaped logits, which greedy rows take their best tokens from.
    """
    shaping = context.sampling.shaping
    if shaping is not None:
        so_far = torch.cat(list(tokens), 1)
        logits_BnV = shape(logits_BnV, shaping, context, so_far, tree, start, alive_Bn)
    return warp(logits_BnV, context.sampling)
