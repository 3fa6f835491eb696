"""Drafts of placed tokens from Python lists, one entry per row: for drafters that work on a host.

A tensor of a few elements costs more to make than to fill, so constant tables are made once.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.tree import branching, children
from outrider.types import Draft, DrawKind, Tree, Verdict


class HostTree(NamedTuple):
    """A row's tree as it grew: node 0 is the pending token, parents stand before children."""

    tokens: list[int]
    parents: list[int]

    def first(self, nodes: int) -> "HostTree":
        """The first so many nodes below the pending token."""
        return HostTree(self.tokens[: nodes + 1], self.parents[: nodes + 1])


def chains(texts: Sequence[Sequence[int]], kind: DrawKind) -> Draft:
    """A chain for every row, its pending token in front; they may differ in length.

    >>> chains([[7, 8, 9], [7]], DrawKind.FIXED).draws_BNK[..., 0].tolist()
    [[1, 2, -1], [-1, -1, -1]]
    """
    longest = max(map(len, texts))
    constant = _chain(longest - 1, kind)
    draws = constant.draws
    if any(len(text) < longest for text in texts):
        draws = draws.repeat(len(texts), 1, 1)
        for row, text in enumerate(texts):
            draws[row, len(text) - 1 :] = -1
        texts = [[*text, *[0] * (longest - len(text))] for text in texts]
    tokens = torch.from_numpy(np.array(texts, dtype=np.int64))
    return Draft(tokens, constant.tree, draws, constant.kind, constant.none, None, constant.kinds)


def trees(grown: Sequence[HostTree], kind: DrawKind) -> Draft:
    """A tree of every row's own."""
    if all(row.parents == list(range(-1, len(row.parents) - 1)) for row in grown):
        return chains([row.tokens for row in grown], kind)
    rows, nodes = len(grown), max(len(row.tokens) for row in grown)
    tokens, parents = np.zeros((rows, nodes), np.int64), np.zeros((rows, nodes), np.int64)
    depths = np.ones((rows, nodes), np.int64)  # of nodes that are not there
    ancestors = np.empty((rows, nodes, nodes), bool)
    ancestors[:] = np.eye(nodes, dtype=bool)
    below: list[list[list[int]]] = []
    for b, row in enumerate(grown):
        depth = _depths(row.parents)
        order = sorted(range(len(depth)), key=depth.__getitem__)
        place = {node: at for at, node in enumerate(order)}
        parents[b, 0] = -1
        kids: list[list[int]] = [[] for _ in range(nodes)]
        for at, node in enumerate(order[1:], start=1):
            above = place[row.parents[node]]
            parents[b, at] = above
            ancestors[b, at] |= ancestors[b, above]
            kids[above].append(at)
        tokens[b, : len(order)] = [row.tokens[node] for node in order]
        depths[b, : len(order)] = [depth[node] for node in order]
        below.append(kids)
    most = max(len(kids) for row_kids in below for kids in row_kids)
    draws = np.array(
        [[kids + [-1] * (most - len(kids)) for kids in row_kids] for row_kids in below], np.int64
    )
    tree = Tree(
        torch.from_numpy(parents),
        torch.from_numpy(depths),
        torch.from_numpy(ancestors),
        int(depths.max()),
        most,
        tuple(range(nodes + 1)),  # rows differ in where a level ends: every node is its own
        is_chain=False,
        nodes=nodes,
    )
    constant = _kinds(nodes, most, kind)
    return Draft(
        torch.from_numpy(tokens), tree, torch.from_numpy(draws), *constant, None, frozenset({kind})
    )


def committed(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """What a verdict adds to every row: the drafted tokens that it keeps, and the one after."""
    following = verdict.next_B.tolist()
    if not verdict.path_BD.shape[1]:
        return [[token] for token in following]
    tokens = draft.tokens_BN.tolist()
    paths, counts = verdict.path_BD.tolist(), verdict.count_B.tolist()
    return [
        [*(drafted[node] for node in path[:count]), token]
        for drafted, path, count, token in zip(tokens, paths, counts, following, strict=True)
    ]


def bigrams(draft: Draft) -> list[list[tuple[int | None, int]]]:
    """For every node that a row has: the token above it (the pending one: None), and its own."""
    tokens, parents = draft.tokens_BN.tolist(), draft.tree.parent_BN.tolist()
    if draft.tree.nodes == 1:
        return [[(None, token)] for (token,) in tokens]
    counts = [int(np.count_nonzero(each)) for each in draft.draws_BNK.numpy() >= 0]
    parents *= len(tokens) // len(parents)  # a topology may be shared,
    counts *= len(tokens) // len(counts)  # and what is there of it
    found: list[list[tuple[int | None, int]]] = []
    for own, above, count in zip(tokens, parents, counts, strict=True):
        below = [(own[above[node]], own[node]) for node in range(1, count + 1)]
        found.append([(None, own[0]), *below])
    return found


def refused(draft: Draft, verdict: Verdict, sizes: Sequence[int]) -> list[int]:
    """Of every row the first node that was refused in the place of what followed, 0: none was.

    sizes  nodes that each row has
    """
    if not draft.tree.max_depth:
        return [0] * len(sizes)
    counts, paths = verdict.count_B.tolist(), verdict.path_BD.tolist()
    parents = draft.tree.parent_BN.tolist()
    parents *= len(sizes) // len(parents)  # a topology may be shared
    found = []
    for path, above, count, size in zip(paths, parents, counts, sizes, strict=True):
        last = path[count - 1] if count else 0
        later = (node for node in range(last + 1, size) if above[node] == last)
        found.append(next(later, 0))
    return found


def _depths(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


class _Constant(NamedTuple):
    tree: Tree
    draws: Tensor
    kind: Tensor
    none: Tensor
    kinds: frozenset[DrawKind]


@lru_cache(maxsize=256)
def _chain(length: int, kind: DrawKind) -> _Constant:
    counts = (1,) * length
    kinds = frozenset({kind}) if length else frozenset[DrawKind]()
    return _Constant(branching(counts), children(counts), *_kinds(length + 1, 1, kind), kinds)


@lru_cache(maxsize=1024)
def _kinds(nodes: int, most: int, kind: DrawKind) -> tuple[Tensor, Tensor]:
    """Constants [1, N, K]: the kind of every draw, and -1 for its law row."""
    table = torch.full((1, nodes, most), int(kind), device="cpu")
    return table, torch.full_like(table, -1)
