"""The tree of a draft as it grows: nothing else writes parents, ancestors, ranks or law rows.

Of a fixed shape the tables are constant, and only which nodes are there differs between rows. Of a
ragged one (`Layout.tree` None) every row has parents of its own.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import ops
from outrider.drafters.tree_drafting.shapes import Layout, TreeLevel, fixed
from outrider.models.prefill import of_tree
from outrider.row_params import SamplingRows
from outrider.tree import numbers, visible
from outrider.types import Context, Draft, DrawKind, Laws, Nodes, Tree


class Children(NamedTuple):
    """The children of one level's nodes, one draw each, siblings in the order they were drawn."""

    tokens_Bm: Tensor
    there_Bm: Tensor | None  #: bool: a token that cannot be drawn never enters the tree; None: all
    law: Laws | None  #: what to declare for the nodes of the level
    parent_Bm: Tensor | None = None  #: counted from the level's first node; None: a fixed shape's
    node_Bm: Tensor | None = None  #: counted from the first child: where the draw leads, if draws
    #: may share a node; None: to its own
    row_Bm: Tensor | None = None  #: its row of `law`; None: its parent's


class TreeBuilder:
    """A draft under way: add the children of one level after another, then take the `draft`."""

    def __init__(self, layout: Layout, context: Context) -> None:
        self.layout, self.context = layout, context
        self.first_B = context.length_B - 1  #: slot and position of the pending token
        self._tokens = [pending(context)]
        self._there: list[Tensor | None] = []  # [B, m] of each level below the root; None: all
        self._whole = True  # whether all of them are there
        self._laws: list[Laws] = []
        self._links: list[_Links] = []  # of a ragged tree
        self._ancestors_BNN: Tensor | None = None
        self._nodes: tuple[int, Nodes] | None = None
        if layout.tree is None:
            eye = _eye(layout.nodes, context.length_B.device)
            self._ancestors_BNN = eye.repeat(context.length_B.shape[0], 1, 1)

    @property
    def tokens_BM(self) -> Tensor:
        """The tokens of all nodes so far."""
        return self._tokens[0] if len(self._tokens) == 1 else torch.cat(self._tokens, 1)

    @property
    def alive_Bn(self) -> Tensor | None:
        """Which nodes of the deepest level can be reached; None: all."""
        return self._there[-1] if self._there else None

    @property
    def tree(self) -> Tree:
        """The topology; of a ragged tree that of the levels so far."""
        layout = self.layout
        if layout.tree is not None:
            return layout.tree
        assert self._ancestors_BNN is not None
        rows, nodes = self._ancestors_BNN.shape[:2]
        parent = torch.full_like(self._tokens[0], -1)
        parent = torch.cat([parent, *(links.parent_Bm for links in self._links)], 1)
        if parent.shape[1] < nodes:  # what is not there yet
            parent = torch.nn.functional.pad(parent, (0, nodes - parent.shape[1]), value=-1)
        depth = layout.depth_N.expand(rows, -1)
        deepest = len(layout.spans) - 2
        return Tree(
            parent,
            depth,
            self._ancestors_BNN,
            deepest,
            layout.most,
            layout.spans,
            is_chain=False,
            nodes=layout.nodes,
        )

    def nodes(self, level: TreeLevel, wide: int) -> Nodes:
        """The model call of a level; what it sees is `wide` slots of the cache."""
        start, stop = level.start, level.stop
        if self.layout.tree is not None:
            if self._nodes is None or self._nodes[0] != wide:
                whole = of_tree(self._tokens[0], self.layout.tree, self.first_B, wide)
                self._nodes = wide, whole
            some, whole = slice(start, stop), self._nodes[1]
            return Nodes(
                self._tokens[-1],
                whole.positions_BQ[:, some],
                whole.slots_BQ[:, some],
                whole.visible_BQW[:, some],
                self.first_B,
            )
        assert self._ancestors_BNN is not None
        slots = self.first_B[:, None] + numbers(stop, self.first_B.device)[start:]
        at = (self.first_B[:, None] + level.depth).expand_as(slots)
        seen = visible(self._ancestors_BNN, self.first_B, start, stop, wide)
        return Nodes(self._tokens[-1], at, slots, seen, self.first_B)

    def add(self, level: TreeLevel, children: Children) -> None:
        """Hang the children of a level below its nodes.

        In a fixed shape a child of an absent node is absent; a policy that names the parents names
        present ones.
        """
        law = children.law
        if law is not None:
            if children.row_Bm is not None:
                rows = sum(above.logits_BRV.shape[1] for above in self._laws)
                children = children._replace(row_Bm=children.row_Bm + rows)
            self._laws.append(law)
        if level.end == level.stop:
            return
        above = self._there[-1] if self._there else None
        if children.parent_Bm is None:
            there = children.there_Bm
            if above is not None:
                over = above if level.fan == (1,) else above[:, level.parent_m]
                there = over if there is None else there & over
        else:
            there = self._hang(level, children, children.parent_Bm)
        self._tokens.append(children.tokens_Bm)
        self._there.append(there)
        self._whole = self._whole and there is None

    def fill(self, tokens_BM: Tensor, there_BM: Tensor) -> None:
        """All nodes below the root of a fixed shape at once."""
        self._tokens.append(tokens_BM)
        self._there.append(there_BM)
        self._whole = False

    def _hang(self, level: TreeLevel, children: Children, parent_Bm: Tensor) -> Tensor:
        """Children below parents of each row's own; which of their nodes are there."""
        assert self._ancestors_BNN is not None
        assert children.there_Bm is not None
        start, stop, end = level.start, level.stop, level.end
        device, there = parent_Bm.device, children.there_Bm
        parent = torch.where(there, start + parent_Bm, 0)
        above = self._ancestors_BNN.gather(
            1, parent[..., None].expand(-1, -1, self._ancestors_BNN.shape[2])
        )
        self._ancestors_BNN[:, stop:end] |= above
        own = numbers(end, device)[stop:]
        if children.node_Bm is None:
            self._links.append(_Links(parent, own.expand_as(parent), there, children.row_Bm))
            return there
        node = stop + children.node_Bm
        first = node == own
        hot = torch.isinf(self.context.sampling.inverse_temperature_B)[:, None]
        listed = there & (first | ~hot)  # a placed child is placed once
        self._links.append(_Links(parent, node, listed, children.row_Bm))
        return there & first

    def draft(self, kinds: tuple[DrawKind, ...]) -> Draft:
        """The whole tree. `kinds` are the kinds of a node's draws in sampled rows, by rank."""
        laws, sampling = None, self.context.sampling
        told = sampling.greedy != "all" and any(kind is not DrawKind.FIXED for kind in kinds)
        if told and self._laws:
            laws = self._laws[0] if len(self._laws) == 1 else ops.stack(self._laws)
        rows = None
        if self.layout.draws_1NK is None:
            draws, rows = _draws(self._links, self.layout.nodes, self.layout.most)
        elif self._whole:
            draws = self.layout.draws_1NK
        else:
            draws = self._present(self.layout.draws_1NK)
        return declare(self.tokens_BM, self.tree, draws, kinds, sampling, laws=laws, row_BNK=rows)

    def _present(self, draws_1NK: Tensor) -> Tensor:
        """The draws of a fixed shape whose nodes are there."""
        levels = [torch.ones_like(self._tokens[0], dtype=torch.bool)]
        for tokens, there in zip(self._tokens[1:], self._there, strict=True):
            levels.append(torch.ones_like(tokens, dtype=torch.bool) if there is None else there)
        there_BN = torch.cat(levels, 1)
        return torch.where(there_BN[:, draws_1NK[0].clamp(min=0)], draws_1NK, -1)


class _Links(NamedTuple):
    """Draws of one level of a ragged tree."""

    parent_Bm: Tensor
    node_Bm: Tensor  #: where the draw leads
    listed_Bm: Tensor  #: whether it is one
    row_Bm: Tensor | None  #: its law row; None: its parent's number


def _draws(links: list[_Links], nodes: int, most: int) -> tuple[Tensor, Tensor | None]:
    """The draw table [B, N, K] of a ragged tree, and the law rows if they are not the nodes."""
    parent, node, listed = (torch.cat(parts, 1) for parts in list(zip(*links, strict=True))[:3])
    cell = ranked(parent, listed, nodes, most)
    draws = table_of(cell, node, nodes, most)
    rows = [link.row_Bm for link in links if link.row_Bm is not None]
    return draws, table_of(cell, torch.cat(rows, 1), nodes, most) if rows else None


def ranked(parent_BM: Tensor, listed_BM: Tensor, nodes: int, most: int) -> Tensor:
    """The cell of a table [N, K] that each draw goes to: siblings stand in the order given.

    Draws that are not listed go to a cell behind the table.
    """
    siblings = (parent_BM[:, :, None] == parent_BM[:, None, :]) & listed_BM[:, None, :]
    rank = siblings.tril(-1).sum(-1)
    return torch.where(listed_BM, parent_BM * most + rank, nodes * most)


def table_of(cell_BM: Tensor, value_BM: Tensor, nodes: int, most: int) -> Tensor:
    """[B, N, K]: the values in their cells, -1 elsewhere."""
    rows = cell_BM.shape[0]
    table = torch.full((rows, nodes * most + 1), -1, dtype=torch.int64, device=cell_BM.device)
    return table.scatter_(1, cell_BM, value_BM)[:, :-1].view(rows, nodes, most)


def selected(parent_BN: Tensor, depth_BN: Tensor, max_depth: int, most: int) -> tuple[Tree, Tensor]:
    """The topology and the draws of nodes that were selected from a larger tree, row by row.

    Parents stand before their children and siblings in drawing order; -1 for the root and for
    nodes that are not there. Rows differ in where a level ends: every node is a part of its own.
    """
    rows, nodes = parent_BN.shape
    there = parent_BN >= 0
    number = numbers(nodes, parent_BN.device)
    eye = _eye(nodes, parent_BN.device)
    above = parent_BN.clamp(min=0)[..., None].expand(-1, -1, nodes)
    ancestors = eye.expand(rows, -1, -1)
    for _ in range(max_depth):
        ancestors = eye | ancestors.gather(1, above)
    draws = table_of(ranked(parent_BN, there, nodes, most), number.expand(rows, -1), nodes, most)
    parent = torch.where(there | (number == 0), parent_BN, 0)
    spans = tuple(range(nodes + 1))
    tree = Tree(parent, depth_BN, ancestors, max_depth, most, spans, is_chain=False, nodes=nodes)
    return tree, draws


def declare(
    tokens_BN: Tensor,
    tree: Tree,
    draws_BNK: Tensor,
    kinds: tuple[DrawKind, ...],
    sampling: SamplingRows,
    *,
    laws: Laws | None = None,
    row_BNK: Tensor | None = None,
    places_BN: Tensor | None = None,
) -> Draft:
    """The draft with the kind and the law row of every draw; greedy rows' children are placed.

    `kinds` are those of a node's draws in sampled rows, by rank, of which the last goes on.
    `row_BNK` are their law rows; None: their node's.
    """
    if sampling.greedy == "all":
        kinds, laws = (DrawKind.FIXED,) * bool(kinds), None
    kind, node, none = _kinds(*draws_BNK.shape[1:], kinds, draws_BNK.device)
    row = none
    if laws is not None:
        row = torch.where(draws_BNK >= 0, node if row_BNK is None else row_BNK, -1)
    if sampling.greedy == "some" and set(kinds) - {DrawKind.FIXED}:
        hot = torch.isinf(sampling.inverse_temperature_B)[:, None, None]
        kind, row = torch.where(hot, int(DrawKind.FIXED), kind), torch.where(hot, -1, row)
        kinds = (*kinds, DrawKind.FIXED)
    return Draft(tokens_BN, tree, draws_BNK, kind, row, laws, frozenset(kinds), places_BN=places_BN)


@lru_cache(maxsize=256)
def _kinds(
    nodes: int, most: int, kinds: tuple[DrawKind, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Constants [1, N, K]: each draw's kind, its node's number (-1: nothing is drawn), and -1."""
    kinds = kinds or (DrawKind.FIXED,)
    by_rank = (kinds + kinds[-1:] * most)[:most]
    kind = torch.tensor(by_rank, device=device, dtype=torch.int64).expand(1, nodes, -1)
    node = numbers(nodes, device)[None, :, None].expand(1, -1, most)
    none = torch.full_like(node, -1)
    return kind.contiguous(), torch.where(kind != DrawKind.FIXED, node, -1), none


@lru_cache(maxsize=64)
def _eye(nodes: int, device: torch.device) -> Tensor:
    return numbers(nodes, device)[:, None] == numbers(nodes, device)


def pending(context: Context) -> Tensor:
    """The last committed token of each row, [B, 1]."""
    return context.tokens_BL.gather(1, context.length_B[:, None] - 1)


def bare(context: Context) -> Draft:
    """The draft with only the pending token."""
    tree, draws, kind, none = _alone(context.length_B.device)
    return Draft(pending(context), tree, draws, kind, none, None, frozenset())


@lru_cache(maxsize=8)
def _alone(device: torch.device) -> tuple[Tree, Tensor, Tensor, Tensor]:
    """The pending token's topology, and constants [1, 1, K] of a node that draws nothing."""
    layout = fixed((-1,), device)
    assert layout.tree is not None
    assert layout.draws_1NK is not None
    kind, _, none = _kinds(*layout.draws_1NK.shape[1:], (), device)
    return layout.tree, layout.draws_1NK, kind, none
