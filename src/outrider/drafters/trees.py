"""Drafters of trees of fixed shape, and the best such shape (Sequoia, Chen et al. 2024).

`acceptance[k]` is the chance that the k-th child of a node is the one that is kept, given that the
node was. A tree's expected tokens are the sum over its nodes of the product along their paths. For
non-increasing acceptances the best tree of n nodes has the n most valuable nodes, so a heap finds
the best trees of all sizes in one pass, depth cap included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

from outrider import ops
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.recipes import Recipe, one_depth
from outrider.drafters.tree_drafting import Children, DrawKeys, TreeLevel
from outrider.errors import ConfigurationError
from outrider.tree import within
from outrider.types import Drafter, DrawKind, LanguageModel, Laws

#: Children per level of a tree whose shape nobody asked for, at most as deep as was asked for.
USUAL = (3, 2, 2, 1)


def optimal(acceptance: Sequence[float], nodes: int, depth: int) -> tuple[int, ...]:
    """Parents, in BFS order, of the best tree with `nodes` nodes and at most `depth` levels.

    The pending token counts as a node. `StaticTree(model, parents=optimal(...))` uses it.

    >>> optimal([0.7, 0.2], 5, 3)
    (-1, 0, 0, 1, 3)
    """
    values = [float(a) for a in acceptance]
    if not values or any(not 0 <= a <= 1 for a in values) or values != sorted(values)[::-1]:
        raise ConfigurationError(
            f"acceptances must lie in [0, 1] and not increase; got {list(acceptance)!r}; "
            "sort them by child"
        )
    if nodes < 1 or depth < 1:
        raise ConfigurationError(f"need nodes >= 1 and depth >= 1; got {nodes} and {depth}")
    within(nodes, f"nodes={nodes}")
    picked: list[tuple[int, int, int]] = [(0, -1, 0)]  # depth, parent in picking order, rank
    waiting = [(-values[0], 1, 0, 0)]
    while waiting and len(picked) < nodes:
        value, level, parent, rank = heappop(waiting)
        node = len(picked)
        picked.append((level, parent, rank))
        if rank + 1 < len(values) and values[rank]:
            sibling = value / values[rank] * values[rank + 1]
            heappush(waiting, (sibling, level, parent, rank + 1))
        if level < depth:
            heappush(waiting, (value * values[0], level + 1, node, 0))
    return _breadth_first(picked)


def _breadth_first(picked: list[tuple[int, int, int]]) -> tuple[int, ...]:
    """Parents in BFS order from (depth, parent, rank) in any order with parents first."""
    kids: list[list[int]] = [[] for _ in picked]
    for node, (_, parent, _) in enumerate(picked):
        if parent >= 0:
            kids[parent].append(node)
    order, parents = [0], [-1]
    for place, node in enumerate(order):  # grows while it is read
        order += sorted(kids[node], key=lambda kid: picked[kid][2])
        parents += [place] * len(kids[node])
    return tuple(parents)


def recipe(tree: Callable[..., Drafter]) -> Recipe:
    """How a drafter of fixed shape is made by name: `tree(model, counts=...)` or `parents=...`.

    The shape is a branching vector, or the best one of `total_tokens` nodes for `tree_acceptance`;
    who asks for neither gets USUAL, as deep as was asked for.
    """

    def made(
        model: LanguageModel,
        num_speculative_tokens: int | None = None,
        branching: tuple[int, ...] | None = None,
        tree_acceptance: tuple[float, ...] | None = None,
        total_tokens: int | None = None,
    ) -> Drafter:
        depth = num_speculative_tokens
        one_depth(branching, depth)
        if tree_acceptance is None and total_tokens is None:
            usual = (USUAL + (1,) * (depth or 0))[: depth or len(USUAL)]
            return tree(model, counts=usual if branching is None else branching)
        if branching is not None or tree_acceptance is None or total_tokens is None:
            raise ConfigurationError(
                "the best shape follows from tree_acceptance and total_tokens, without "
                "branching; got "
                f"acceptance={tree_acceptance!r}, total_tokens={total_tokens!r}, branching="
                f"{branching!r}; give both, and num_speculative_tokens to limit the depth"
            )
        best = optimal(tree_acceptance, total_tokens + 1, depth or total_tokens)
        return tree(model, parents=best)

    takes = ("num_speculative_tokens", "branching", "tree_acceptance", "total_tokens")
    return Recipe(made, ("model",), takes)


# The draft's top tokens in a tree of fixed shape (Medusa's and EAGLE-1's layout).
#
# Nothing is drawn, so no draft law is kept and `match` is the best rule: it accepts p of the placed
# set. Strong at low temperature, weak at 1.


@dataclass(frozen=True)
class TopChildren:
    """Child j of a node is the draft's j-th best token there."""

    draw_kinds: ClassVar[tuple[DrawKind, ...]] = (DrawKind.FIXED,)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """The top tokens that the filters leave in."""
        tokens, there = ops.largest(ops.scaled(law), level.most)
        return Children(level.spread(tokens), level.spread(there), law)


def StaticTree(
    model: LanguageModel,
    counts: tuple[int, ...] = (3, 2, 2, 1),
    parents: tuple[int, ...] | None = None,
) -> DraftModel:
    """A tree of the draft's top tokens: `counts` children per level, or `parents` in BFS order."""
    return DraftModel(model, counts, parents=parents, name="static_tree", policy=TopChildren())


STATIC_TREE = recipe(StaticTree)


# Children drawn without replacement in a tree of fixed shape: Sequoia; RSD-C if it is even.


def SampledTree(
    model: LanguageModel,
    counts: tuple[int, ...] = (3, 2, 2, 1),
    parents: tuple[int, ...] | None = None,
) -> DraftModel:
    """`DraftModel` by another name, with the shapes of the other trees.

    >>> SampledTree(model, parents=optimal((0.6, 0.2), 8, 3))                # doctest: +SKIP
    """
    return DraftModel(model, counts, parents=parents, name="sampled_tree")


SAMPLED_TREE = recipe(SampledTree)


# Hub nodes (SpecHub, Sun, Zhou et al. 2024; Hu et al. 2025): one child is drawn, the rest placed.
#
# Of c children the draft's top c - 1 tokens are placed and one is drawn from the draft's law
# without them; the drawn one stands first. Verified by `hub` or `traversal` a node accepts the most
# any rule can for such a draft.


@dataclass(frozen=True)
class HubChildren:
    """A node with one child draws it from the whole law."""

    draw_kinds: ClassVar[tuple[DrawKind, ...]] = (DrawKind.WITHOUT, DrawKind.FIXED)

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """The drawn token, then the top tokens; the declared law leaves the latter out."""
        names = keys.own(level.start, level.stop)
        placed = [max(fan - 1, 0) for fan in level.fan]
        tokens, there, law = ops.several(law, names, 1, placed)
        return Children(level.spread(tokens), None if there is None else level.spread(there), law)


def HubTree(
    model: LanguageModel,
    counts: tuple[int, ...] = (3, 2, 2, 1),
    parents: tuple[int, ...] | None = None,
) -> DraftModel:
    """A tree of hub nodes: `counts` children per level, or `parents` in BFS order."""
    return DraftModel(model, counts, parents=parents, name="hub_tree", policy=HubChildren())


HUB_TREE = recipe(HubTree)
