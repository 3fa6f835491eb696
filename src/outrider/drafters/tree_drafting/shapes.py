"""Shapes that drafters declare, and the constant tables of the trees that have them.

A drafter declares one shape for each depth that it can draft to, the deepest first; a shape's key
is its depth. Trees of a fixed shape are cut at that depth, beams and paths end there.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.drafters import recipes
from outrider.errors import ConfigurationError
from outrider.tree import from_parents, parents_of
from outrider.types import DraftShape, Tree


class TreeLevel(NamedTuple):
    """The nodes start..stop of one depth; nodes stop..end are their children."""

    depth: int
    start: int
    stop: int
    end: int
    most: int  #: most children of a node here
    fan: tuple[int, ...] = ()  #: of a fixed shape: children of each node
    parent_m: Tensor | None = None  #: and for each child: its parent, counted from `start`
    rank_m: Tensor | None = None  #: and its place among its siblings; None: all have `most`

    def spread(self, table_BnK: Tensor) -> Tensor:
        """[B, m]: of a table by node and rank, the entry of each child of a fixed shape."""
        if self.rank_m is None:
            return table_BnK.flatten(1)
        return table_BnK[:, self.parent_m, self.rank_m]


class Layout(NamedTuple):
    """Where the nodes of a growing tree stand: level after level."""

    levels: tuple[TreeLevel, ...]  #: every depth whose nodes are fed
    spans: tuple[int, ...]  #: spans[d]:spans[d + 1] are the nodes of depth d
    depth_N: Tensor
    nodes: int  #: N, the pending token included
    most: int  #: most draws at one node
    tree: Tree | None = None  #: the topology, if the shape is fixed and all rows share it
    draws_1NK: Tensor | None = None  #: and the child that each draw leads to, -1 padded


@lru_cache(maxsize=256)
def fixed(parents: tuple[int, ...], device: torch.device) -> Layout:
    """The tree in which node n hangs below node `parents[n]`, for all rows and steps.

    >>> fixed((-1, 0, 0, 1), torch.device("cpu")).draws_1NK.tolist()
    [[[1, 2], [3, -1], [-1, -1], [-1, -1]]]
    """
    tree = from_parents(parents, device)
    children: list[list[int]] = [[]]
    ranks = [0]  # of each node among its siblings
    for node, parent in enumerate(parents[1:], start=1):
        ranks.append(len(children[parent]))
        children[parent].append(node)
        children.append([])
    most, draws, levels = max(tree.max_draws, 1), [], []
    for below in children:
        draws.append(below + [-1] * (most - len(below)))
    for depth in range(tree.max_depth):
        start, stop, end = tree.levels[depth : depth + 3]
        fan = tuple(map(len, children[start:stop]))
        parent_m = torch.tensor(parents[stop:end], device=device) - start
        rank_m = None if len(set(fan)) == 1 else torch.tensor(ranks[stop:end], device=device)
        levels.append(TreeLevel(depth, start, stop, end, max(fan), fan, parent_m, rank_m))
    return Layout(
        tuple(levels),
        tree.levels,
        tree.depth_BN[0],
        len(parents),
        most,
        tree,
        torch.tensor([draws], device=device),
    )


@lru_cache(maxsize=256)
def ragged(width: int, depth: int, device: torch.device, *, leaves: bool = True) -> Layout:
    """`width` nodes at each of `depth` levels, each row's below parents of its own.

    Without `leaves` the last level has no children: they are chosen otherwise.

    >>> ragged(2, 2, torch.device("cpu")).spans
    (0, 1, 3, 5)
    """
    spans = (0, *(1 + width * d for d in range(depth + leaves)))
    ends = (*spans[1:], spans[-1])
    levels = tuple(
        TreeLevel(d, start, stop, end, width)
        for d, (start, stop, end) in enumerate(zip(spans[:depth], ends, ends[1:], strict=False))
    )
    at = [d for d in range(len(spans) - 1) for _ in range(spans[d], spans[d + 1])]
    return Layout(levels, spans, torch.tensor(at, device=device), spans[-1], width)


@lru_cache(maxsize=256)
def of_tree(parents: tuple[int, ...]) -> tuple[DraftShape, ...]:
    """The shapes of a fixed tree: the whole, then cut one level earlier each.

    >>> [(shape.key, shape.max_nodes, shape.is_chain) for shape in of_tree((-1, 0, 1, 1))]
    [(2, 4, False), (1, 2, True)]
    """
    spans = from_parents(parents).levels
    shapes = []
    for depth in range(len(spans) - 2, 0, -1):
        nodes = spans[depth + 1]
        shapes.append(DraftShape(depth, nodes, depth, is_chain=nodes == depth + 1))
    return tuple(shapes)


@lru_cache(maxsize=256)
def of_levels(width: int, depth: int) -> tuple[DraftShape, ...]:
    """The shapes of a tree with `width` nodes at each of at most `depth` levels.

    >>> [(shape.key, shape.max_nodes) for shape in of_levels(3, 2)]
    [(2, 7), (1, 4)]
    """
    return tuple(DraftShape(d, 1 + width * d, d, is_chain=width == 1) for d in range(depth, 0, -1))


class Chains:
    """What a drafter of chains declares: one of each length up to `num_speculative_tokens`."""

    num_speculative_tokens: int

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        return of_levels(1, self.num_speculative_tokens)


def parents_for(
    name: str, counts: tuple[int, ...], parents: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Children per level and parents of a drafter's tree, checked; parents go before counts."""
    if parents:
        counts, parents = (), tuple(parents)
    else:
        counts = recipes.counts("counts", counts)
        parents = parents_of(counts)
    if from_parents(parents).max_depth == 0:
        raise ConfigurationError(
            f"drafter {name!r} needs at least one drafted token; got no branching; "
            "use drafter='none' for plain decoding"
        )
    return counts, parents
