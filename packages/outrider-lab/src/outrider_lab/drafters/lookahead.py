"""Lookahead decoding (Fu et al. 2024): Jacobi iterations beside the text, and what they find.

The target refines guesses of what is to come while it scores drafts. `window` columns of guesses go
ahead of the text; below each column's first token hang those that it has led to in the last steps,
and in every step the target says what follows. So a column brings an n-gram a step, which goes to
a pool; those n-grams of the pool that begin with the pending token are the draft, beside the window
itself. No model, no training, no earlier text: everything is placed, and `match` verifies it.

It buys tokens with arithmetic: with the defaults 17 nodes a step. That pays where a call over 17
nodes costs what one over a single node costs, on a GPU at batch 1. On a CPU it gains
next to nothing at best: `suffix` and `prompt_lookup` find more with less (docs/more-drafters.md).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider import arguments
from outrider.drafters import recipes, tree_drafting
from outrider.drafters.tree_drafting import TreeBuilder, shapes
from outrider.row_params import RowTable
from outrider.tree import numbers
from outrider.types import Context, Draft, DraftShape, DrawKind, Scores, Verdict


@dataclass(frozen=True)
class NgramPool(RowTable):
    """What each row has guessed. A `RowStore`; written in place."""

    window_BRW: Tensor  #: column w below row 0 is what its first token has led to, -1: nothing
    pool_BPn: Tensor  #: n-grams found, a ring; -1: none
    next_B: Tensor  #: where in the ring the next one goes


@dataclass(frozen=True)
class Lookahead:
    """`window` columns (W), n-grams of `order` tokens (N), `tried` of them a step (G).

    >>> Lookahead(window=5, order=3, tried=3).shapes[0].max_nodes
    17
    """

    window: int = 5
    order: int = 3
    tried: int = 3
    kept: int = 64  #: n-grams of the pool
    name: ClassVar[str] = "lookahead"
    aux_layers: ClassVar[tuple[int, ...]] = ()
    kinds: ClassVar[frozenset[DrawKind]] = frozenset({DrawKind.FIXED})

    def __post_init__(self) -> None:
        do = "see outrider_lab.drafters.lookahead"
        arguments.wholes(self, do, window=1, order=2, tried=1, kept=self.window)

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """One for each number of columns; all of them look up as many n-grams."""
        return _shapes(self.window, self.order, self.tried)

    def open(self, context: Context, capacity: int) -> NgramPool:
        """A window of the text's own last tokens, and an empty pool."""
        device, rows = context.length_B.device, context.length_B.shape[0]
        span = self.window + self.order - 2
        at = context.length_B[:, None] - 1 - numbers(span, device)
        text = context.tokens_BL.gather(1, at.clamp(min=0))
        window = torch.stack([text[:, row : row + self.window] for row in range(self.order - 1)], 1)
        pool = torch.full((rows, self.kept, self.order), -1, device=device)
        return NgramPool(window.clone(), pool, torch.zeros_like(context.length_B))

    def propose(self, memory: NgramPool, context: Context, shape: DraftShape) -> Draft:
        """The pool's n-grams behind the pending token, and the first columns of the window."""
        columns = shape.max_depth - self.order + 2
        plan = _plan(columns, self.order, self.tried, context.length_B.device)
        found, listed = self._known(memory, tree_drafting.pending(context))
        window = memory.window_BRW[..., :columns]
        first = window[:, 0]
        # a token stands once below a node: the n-gram goes before the window
        apart_B1 = ~((found[..., 0] == first[:, :1]) & listed).any(1, keepdim=True)
        ahead = torch.nn.functional.pad(first[:, 1:], (0, 1), value=-1)
        new = torch.ones_like(first, dtype=torch.bool)
        if self.order > 2:
            new = apart_B1 & (window[:, 1] != ahead)
        below = new[:, None].expand(-1, self.order - 2, -1)
        there = [listed[..., None].expand(found.shape).flatten(1), apart_B1.expand_as(first)]
        tokens = torch.cat([found.flatten(1), window.flatten(1)], 1)
        tree = TreeBuilder(shapes.fixed(plan.parents, tokens.device), context)
        order = plan.order
        tree.fill(tokens[:, order], torch.cat([*there, below.flatten(1)], 1)[:, order])
        return tree.draft((DrawKind.FIXED,))

    def _known(self, memory: NgramPool, pending_B1: Tensor) -> tuple[Tensor, Tensor]:
        """The latest n-grams that begin with the pending token, without it [B, G, N - 1].

        And which of them are there: their first tokens differ.
        """
        pool, ring = memory.pool_BPn, memory.pool_BPn.shape[1]
        age = (numbers(ring, pool.device) - memory.next_B[:, None]) % ring  # the latest is largest
        rank = torch.where(pool[..., 0] == pending_B1, age, -1)
        found, there = [], []
        for _ in range(self.tried):
            best, where = rank.max(1)
            one = pool.gather(1, where[:, None, None].expand(-1, -1, pool.shape[2]))[:, 0]
            found.append(one[:, 1:].clamp(min=0))
            there.append(best >= 0)
            rank = rank.masked_fill(pool[..., 1] == one[:, 1:2], -1)
        return torch.stack(found, 1), torch.stack(there, 1)

    def commit(
        self, memory: NgramPool, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """What the target says below each column joins it; new n-grams join the pool."""
        nodes, size = draft.tokens_BN.shape[1], self.order
        columns = (nodes - 1) // (size - 1) - self.tried
        if columns < 1:  # a plain step: the window stays, a token behind
            return
        window = memory.window_BRW
        leaves = _plan(columns, size, self.tried, window.device).leaves
        said = scores.laws.logits_BRV[:, leaves].argmax(-1)
        grams = torch.cat([window[..., :columns], said[:, None]], 1).transpose(1, 2)
        ring = memory.pool_BPn.shape[1]
        cell = (memory.next_B[:, None] + numbers(columns, window.device)) % ring
        memory.pool_BPn.scatter_(1, cell[..., None].expand(-1, -1, size), grams)
        memory.next_B.copy_((memory.next_B + columns) % ring)
        # the first row was a guess of the tokens that are there now
        said = torch.cat([said, window[:, -1, columns:]], 1)
        rows = torch.cat([window[:, 1:], said[:, None]], 1)
        at = verdict.count_B[:, None] + numbers(self.window, window.device)
        at = at.clamp(max=self.window - 1)[:, None].expand_as(rows)
        window.copy_(rows.gather(2, at))


class _LookaheadPlan(NamedTuple):
    """Where n-grams and columns stand in the tree."""

    parents: tuple[int, ...]  #: breadth first
    order: Tensor  #: of each node below the root: its number among n-grams, then rows of columns
    leaves: Tensor  #: the nodes below which each column goes on


@lru_cache(maxsize=64)
def _plan(columns: int, ngram: int, tried: int, device: torch.device) -> _LookaheadPlan:
    """Chains of n-grams below the root, a chain of the columns' first tokens, and their own below.

    >>> _plan(2, 3, 1, torch.device("cpu")).parents
    (-1, 0, 0, 1, 2, 2, 4)
    """
    deep = ngram - 1
    above = [-1]  # of each node in the order of the tokens, nodes counted from 1
    for chain in range(tried):
        above += [0 if step == 0 else chain * deep + step for step in range(deep)]
    base = 1 + tried * deep
    above += [0 if column == 0 else base + column - 1 for column in range(columns)]
    for row in range(1, deep):
        above += [base + (row - 1) * columns + column for column in range(columns)]
    depth = [0]
    for parent in above[1:]:
        depth.append(depth[parent] + 1)
    breadth = sorted(range(len(above)), key=lambda node: depth[node])
    place = {node: at for at, node in enumerate(breadth)}
    # siblings of one parent stand together in a level, as its children do
    breadth = sorted(breadth, key=lambda node: (depth[node], place[max(above[node], 0)]))
    place = {node: at for at, node in enumerate(breadth)}
    last = base + (deep - 1) * columns
    return _LookaheadPlan(
        tuple(place[above[node]] if node else -1 for node in breadth),
        torch.tensor([node - 1 for node in breadth[1:]], device=device),
        torch.tensor([place[last + column] for column in range(columns)], device=device),
    )


@lru_cache(maxsize=64)
def _shapes(window: int, ngram: int, tried: int) -> tuple[DraftShape, ...]:
    return tuple(
        DraftShape(depth, 1 + (columns + tried) * (ngram - 1), depth, is_chain=False)
        for columns in range(window, 0, -1)
        for depth in (columns + ngram - 2,)
    )


def _made(
    window: int = Lookahead.window, order: int = Lookahead.order, width: int = Lookahead.tried
) -> Lookahead:
    return Lookahead(window, order, width)


RECIPE = recipes.Recipe(_made, takes=("window", "order", "width"), depth=Lookahead.window)
