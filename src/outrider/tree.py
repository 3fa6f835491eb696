"""Tree shapes: from a branching vector or parents to the tables that models and rules read."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.errors import ConfigurationError
from outrider.types import Draft, DrawKind, Tree

MOST_NODES = 4096  #: a target would read more for minutes, and tables of nodes by nodes are built


def within(nodes: int, given: str) -> None:
    """Refuse a tree of more nodes than are served; `given` says where it comes from.

    >>> within(16, "a beam")
    """
    if nodes > MOST_NODES:
        raise ConfigurationError(
            f"a tree has at most {MOST_NODES} nodes; got {nodes} by {given}; lower width, depth, "
            "branching or the number of drafted tokens"
        )


def from_parents(parents: Sequence[int], device: torch.device | str = "cpu") -> Tree:
    """A topology shared by all rows, from the parent of each node (-1 for node 0).

    Nodes must be in BFS order: parents before children and depths non-decreasing.

    >>> from_parents([-1, 0, 0, 1]).levels
    (0, 1, 3, 4)
    """
    if not parents or parents[0] != -1:
        raise ConfigurationError(
            f"a tree starts with node 0 whose parent is -1; got parents {list(parents)!r}; "
            "list the pending token first"
        )
    within(len(parents), "a list of parents")  # before tables of nodes by nodes are built
    depth = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node or depth[parent] + 1 < depth[-1]:
            raise ConfigurationError(
                f"parents must be in BFS order; node {node} has parent {parent} "
                f"in {list(parents)!r}; sort the nodes by depth"
            )
        depth.append(depth[parent] + 1)
    most = max(Counter(parents[1:]).values(), default=0)
    ancestors = torch.eye(len(parents), dtype=torch.bool, device="cpu")
    for node, parent in enumerate(parents[1:], start=1):
        ancestors[node] |= ancestors[parent]
    levels = *map(depth.index, range(depth[-1] + 1)), len(parents)  # nodes stand by depth
    return Tree(
        torch.tensor([parents], device=device),
        torch.tensor([depth], device=device),
        ancestors[None].to(device),
        max_depth=depth[-1],
        max_draws=most,
        levels=levels,
        is_chain=most <= 1,
        nodes=len(parents),
    )


@lru_cache(maxsize=256)
def branching(counts: tuple[int, ...], device: torch.device | str = "cpu") -> Tree:
    """Every node of level l has `counts[l]` children. `()` is the root alone, `(1, 1, 1)` a chain.

    >>> branching((3, 2)).nodes
    10
    """
    return from_parents(parents_of(counts), device)


def parents_of(counts: tuple[int, ...]) -> tuple[int, ...]:
    """The parent of each node where every node of level l has `counts[l]` children."""
    if any(c < 1 for c in counts):
        raise ConfigurationError(
            f"branching factors must be at least 1; got {counts}; shorten the tuple instead"
        )
    parents, level = [-1], [0]
    for count in counts:
        if len(parents) + len(level) * count > MOST_NODES:
            raise ConfigurationError(
                f"a tree has at most {MOST_NODES} nodes; got more by children per level of "
                f"{counts[:8]}{'...' if len(counts) > 8 else ''}; ask for fewer"
            )
        start = len(parents)
        for node in level:
            parents += [node] * count
        level = list(range(start, len(parents)))
    return tuple(parents)


def chain(length: int, device: torch.device | str = "cpu") -> Tree:
    """A chain of `length` drafted tokens below the pending one."""
    return branching((1,) * length, device)


@lru_cache(maxsize=256)
def _children(counts: tuple[int, ...], device: torch.device | str) -> Tensor:
    tree = branching(counts)  # on the host: nothing is read from the device
    table = torch.full((1, tree.nodes, max(tree.max_draws, 1)), -1, dtype=torch.int64, device="cpu")
    filled = [0] * tree.nodes
    for node, parent in enumerate(tree.parent_BN[0].tolist()):
        if parent >= 0:
            table[0, parent, filled[parent]] = node
            filled[parent] += 1
    return table.to(device)


def children(tree_counts: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Draw table [1, N, K] of a branching tree: the k-th child of each node, -1 padded."""
    return _children(tree_counts, device)


def offered(draws_BNK: Tensor) -> Tensor:
    """Node 0 and the nodes that some draw points to, bool [B, N]: others cannot be reached.

    >>> offered(torch.tensor([[[2], [-1], [-1]]]))
    tensor([[ True, False,  True]])
    """
    rows, nodes = draws_BNK.shape[:2]
    found = torch.zeros(rows, nodes + 1, dtype=torch.bool, device=draws_BNK.device)
    found.scatter_(1, torch.where(draws_BNK < 0, nodes, draws_BNK).flatten(1), True)
    found[:, 0] = True
    return found[:, :nodes]


def shallower(draft: Draft, most_B: Tensor) -> Draft:
    """The same draft without the draws that lie deeper than `most_B` below the pending token.

    How deep a row drafts must be decided before its tokens are drawn (docs/rules.md).
    """
    deep = draft.tree.depth_BN[..., None] >= most_B[:, None, None]
    draws = draft.draws_BNK.masked_fill(deep, -1)
    rows = draft.row_BNK.masked_fill(deep, -1)
    return draft._replace(draws_BNK=draws, row_BNK=rows)


def alike(draft: Draft, most: int) -> Draft:
    """The draft as a tree with `most` draws at a node, whatever is in it; nothing stays nothing.

    Which uniform a draw is tested with follows from their number, and by which algorithm from
    whether it is a chain: so a row would write otherwise beside a neighbour with another tree.
    """
    if not draft.tree.max_depth:
        return draft
    more = (0, most - draft.draws_BNK.shape[2])
    tables = (draft.draws_BNK, draft.kind_BNK, draft.row_BNK)
    draws, kind, row = (
        pad(table, more, value=fill)
        for table, fill in zip(tables, (-1, int(DrawKind.FIXED), -1), strict=True)
    )
    tree = draft.tree._replace(is_chain=False, max_draws=most)
    return draft._replace(tree=tree, draws_BNK=draws, kind_BNK=kind, row_BNK=row)


@lru_cache(maxsize=512)
def numbers(count: int, device: torch.device | str = "cpu") -> Tensor:
    """0, 1, ..., count - 1, made once: creating small tensors is what host time goes to."""
    return torch.arange(count, device=device)


def visible(ancestors: Tensor, first_B: Tensor, start: int, stop: int, width: int) -> Tensor:
    """Which cache slots the nodes start..stop of a tree rooted at slot `first_B` may see.

    Committed slots (below `first_B`) are visible to all; inside the tree a node sees itself and
    its ancestors. `ancestors` is [B or 1, N, N]; the result is bool [B, stop - start, width].
    """
    offset = numbers(width, first_B.device) - first_B[:, None]  # [B, W]
    inside = (offset >= 0) & (offset < stop)
    rows = ancestors[:, start:stop, :stop]
    index = offset.clamp(0, stop - 1)[:, None, :].expand(-1, stop - start, -1)
    seen = rows.expand(first_B.shape[0], -1, -1).gather(2, index)
    return (offset < 0)[:, None, :] | (seen & inside[:, None, :])
