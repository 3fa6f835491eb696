"""Constant tables of a tree shape, by level: what drafters of a fixed shape fill."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.tree import from_parents
from outrider.types import Tree


class Level(NamedTuple):
    """The inner nodes of one depth: `fan[i]` children of node i, all of them next-level nodes."""

    start: int
    stop: int
    fan: tuple[int, ...]  #: children of each node
    fan_n: Tensor
    most: int  #: most children of a node here
    even: bool  #: every node has that many
    parent_m: Tensor  #: for each next-level node: its parent, counted from `start`
    rank_m: Tensor  #: and its place among its siblings

    def spread(self, table_BnK: Tensor) -> Tensor:
        """[B, m]: the entry of each next-level node."""
        return table_BnK.flatten(1) if self.even else table_BnK[:, self.parent_m, self.rank_m]


class Tables(NamedTuple):
    """Constant tables of one shape on one device."""

    tree: Tree
    draws_BNK: Tensor
    levels: tuple[Level, ...]


@lru_cache(maxsize=64)
def tables(parents: tuple[int, ...], device: torch.device | str = "cpu") -> Tables:
    """Tables of a shape from the parent of each node."""
    tree = from_parents(parents, device)
    kids = [[k for k, parent in enumerate(parents) if parent == n] for n in range(len(parents))]
    draws = torch.full((1, len(parents), max(tree.max_draws, 1)), -1)
    for node, below in enumerate(kids):
        draws[0, node, : len(below)] = torch.tensor(below, dtype=torch.int64)
    levels = []
    for depth in range(tree.max_depth):
        start, stop = tree.levels[depth], tree.levels[depth + 1]
        after = range(stop, tree.levels[depth + 2])
        fan = [len(kids[node]) for node in range(start, stop)]
        levels.append(
            Level(
                start,
                stop,
                tuple(fan),
                torch.tensor(fan, device=device),
                max(fan),
                min(fan) == max(fan),
                torch.tensor([parents[k] - start for k in after], device=device),
                torch.tensor([kids[parents[k]].index(k) for k in after], device=device),
            )
        )
    return Tables(tree, draws.to(device), tuple(levels))
