"""Every draft of schemes that grow another tree each time: merged paths and stochastic beams.

Forests as those of `enumeration`, with one topology per row.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from enumeration import Forest, World, grower

from outrider.types import DrawKind, Tree


def _per_row(tree_nodes: int, parent: np.ndarray, levels: tuple[int, ...], most: int) -> Tree:
    """A tree with one topology per row; slots without a node hang below the root."""
    depth = np.zeros(tree_nodes, dtype=np.int64)
    for d, (start, end) in enumerate(pairwise(levels)):
        depth[start:end] = d
    rows = len(parent)
    ancestors = np.broadcast_to(np.eye(tree_nodes, dtype=bool), (rows, *2 * (tree_nodes,))).copy()
    for node in range(1, tree_nodes):
        ancestors[:, node] |= ancestors[np.arange(rows), parent[:, node].clip(0)]
    return Tree(
        torch.from_numpy(parent),
        torch.from_numpy(np.broadcast_to(depth, (rows, tree_nodes)).copy()),
        torch.from_numpy(ancestors),
        max_depth=len(levels) - 2,
        max_draws=most,
        levels=levels,
        is_chain=False,
        nodes=tree_nodes,
    )


def merged(world: World, paths: int, depth: int) -> Forest:
    """`paths` independent chains merged into a trie; a repeated draw keeps its multiplicity."""
    grow, _ = grower(world, (paths, *(1,) * (depth - 1)))  # one column per path, unmerged
    for level in range(depth):
        for path in range(paths):
            node = 0 if level == 0 else 1 + (level - 1) * paths + path
            grow.split(node, 1 + level * paths + path, grow.laws(node))
    rows, nodes = len(grow.case), grow.tree.nodes
    draws = np.full((rows, nodes, paths), -1, dtype=np.int64)
    parent = np.zeros((rows, nodes), dtype=np.int64)
    parent[:, 0] = -1
    code = np.full_like(grow.code, -1)
    code[:, 0] = 0
    leader = np.zeros((rows, paths), dtype=np.int64)  # the node that carries each path
    every = np.arange(rows)
    for level in range(depth):
        start = 1 + level * paths
        here = grow.code[:, start : start + paths]
        first = (here[:, :, None] == here[:, None, :]).argmax(-1)  # first path of the same prefix
        filled = np.zeros((rows, nodes), dtype=np.int64)
        for path in range(paths):
            node, kid = leader[:, path], start + first[:, path]
            draws[every, node, filled[every, node]] = kid
            filled[every, node] += 1
            parent[every, kid] = node
            code[every, kid] = here[:, path]
        leader = start + first
    levels = (0, 1, *(1 + (d + 1) * paths for d in range(depth)))
    tree = _per_row(nodes, parent, levels, paths)
    kind = np.full((1, 1, 1), int(DrawKind.WITH))
    return Forest(
        world,
        tree,
        frozenset({DrawKind.WITH}),
        grow.case,
        grow.weight,
        grow.token,
        code,
        draws,
        kind,
    )


def beam(world: World, width: int, depth: int) -> Forest:
    """RSD-S: the trees of stochastic beam search, by enumerating Plackett-Luce orders of leaves.

    Perturbed leaf scores come in Plackett-Luce order and a path's score is its best leaf's, so the
    beam of each level holds the first `width` prefixes to appear below the previous beam. Leaves
    that can add nothing are left out of the race, which changes no order among the others.
    """
    found: list[tuple[int, float, tuple[tuple[int, ...], ...]]] = []
    for case in range(len(world.cases)):
        shapes: dict[tuple[tuple[int, ...], ...], float] = {}
        for levels, weight in _orders(world, case, width, depth):
            shapes[levels] = shapes.get(levels, 0) + weight
        found += [(case, weight, levels) for levels, weight in shapes.items()]
    rows, nodes = len(found), 1 + width * depth
    token = np.zeros((rows, nodes), dtype=np.int64)
    code = np.full((rows, nodes), -1, dtype=np.int64)
    code[:, 0] = 0
    parent = np.zeros((rows, nodes), dtype=np.int64)
    parent[:, 0] = -1
    draws = np.full((rows, nodes, width), -1, dtype=np.int64)
    for row, (_, _, levels) in enumerate(found):
        where = {0: 0}
        for level, kept in enumerate(levels):
            for rank, prefix in enumerate(kept):
                node, above = 1 + level * width + rank, where[(prefix - 1) // world.vocab]
                where[prefix] = node
                token[row, node], code[row, node] = (prefix - 1) % world.vocab, prefix
                parent[row, node] = above
                draws[row, above, (draws[row, above] >= 0).sum()] = node
    spans = (0, 1, *(1 + (d + 1) * width for d in range(depth)))
    return Forest(
        world,
        _per_row(nodes, parent, spans, width),
        frozenset({DrawKind.WITHOUT}),
        np.array([case for case, _, _ in found]),
        np.array([weight for _, weight, _ in found]),
        token,
        code,
        draws,
        np.full((1, 1, 1), int(DrawKind.WITHOUT)),
    )


def _orders(
    world: World, case: int, width: int, depth: int
) -> Iterator[tuple[tuple[tuple[int, ...], ...], float]]:
    """Beams of all levels with the probability of one way to reach them."""
    vocab, law = world.vocab, world.draft[case]
    leaves = []
    for leaf in range(*world.level(depth).indices(1 << 62)):
        path = [leaf]
        while path[0]:
            path.insert(0, (path[0] - 1) // vocab)
        weight = float(np.prod([law[a, b - vocab * a - 1] for a, b in pairwise(path)]))
        if weight > 0:
            leaves.append((tuple(path[1:]), weight))

    def useful(path: tuple[int, ...], beams: tuple[tuple[int, ...], ...]) -> bool:
        for prefix, kept in zip(path, beams, strict=True):
            if prefix not in kept:
                return len(kept) < width
        return False

    def go(
        left: list[tuple[tuple[int, ...], float]], beams: tuple[tuple[int, ...], ...], chance: float
    ) -> Iterator[tuple[tuple[tuple[int, ...], ...], float]]:
        left = [leaf for leaf in left if useful(leaf[0], beams)]
        if not left:
            yield beams, chance
            return
        total = sum(weight for _, weight in left)
        for path, weight in left:
            new, open_ = [], True
            for prefix, kept in zip(path, beams, strict=True):
                if open_ and prefix not in kept:
                    open_ = len(kept) < width
                    kept = (*kept, prefix) if open_ else kept
                new.append(kept)
            yield from go(left, tuple(new), chance * weight / total)

    yield from go(leaves, ((),) * depth, 1.0)
