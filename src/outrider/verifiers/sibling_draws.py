"""The draws below some nodes of a draft, each with the law it was drawn from.

    SiblingDraws(draft, law).at(nodes)   the draws of those nodes
    level.guess(k)                       the law of draw k, given that draws 0..k-1 were refused

A node set is a slice of the node axis (one level of the tree) or an index tensor [B, n].
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from outrider import ops
from outrider.types import Draft, DrawKind, Tree


def rows(table_BRX: Tensor, index_Bn: Tensor) -> Tensor:
    """Whole rows `table[b, index[b, i]]`: [B, n, ...]. Copies rows, not elements.

    >>> rows(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[1, 0]])).tolist()
    [[[3, 4], [1, 2]]]
    """
    batch, count = table_BRX.shape[:2]
    base = torch.arange(0, batch * count, count, device=index_Bn.device)[:, None]
    tail = table_BRX.shape[2:]
    flat = table_BRX.reshape(batch * count, *tail)
    found = flat.index_select(0, (index_Bn + base).flatten())
    return found.view(batch, index_Bn.shape[1], *tail)


def inner(tree: Tree) -> list[tuple[int, int]]:
    """Start and end of each level whose nodes may have children, from the root down."""
    return list(pairwise(tree.levels[:-1]))


def pick(law_BnV: Tensor, token_Bn: Tensor) -> Tensor:
    """The probability of one token under each law: [B, n]."""
    return law_BnV.gather(-1, token_Bn[..., None])[..., 0]


def drawn_first(draft: Draft) -> Draft:
    """The same draft with its placed children behind the drawn ones at every node.

    Allowed because a placed child depends on no draw; drawn ones keep their order.
    """
    if DrawKind.FIXED not in draft.kinds or len(draft.kinds) == 1:
        return draft
    batch = max(draft.draws_BNK.shape[0], draft.kind_BNK.shape[0], draft.row_BNK.shape[0])
    last = (draft.kind_BNK == DrawKind.FIXED).to(torch.int8).expand(batch, -1, -1)
    order = last.argsort(dim=-1, stable=True)
    return draft._replace(
        draws_BNK=draft.draws_BNK.expand(batch, -1, -1).gather(-1, order),
        kind_BNK=draft.kind_BNK.expand(batch, -1, -1).gather(-1, order),
        row_BNK=draft.row_BNK.expand(batch, -1, -1).gather(-1, order),
    )


class SiblingDraws:
    """All draws of a draft. `law_BNV` gives batch, dtype and vocabulary."""

    def __init__(self, draft: Draft, law_BNV: Tensor) -> None:
        batch = law_BNV.shape[0]
        self.kinds = draft.kinds
        self.most = draft.draws_BNK.shape[2]
        self.kid_BNK = draft.draws_BNK.expand(batch, -1, -1)
        self.kind_BNK = draft.kind_BNK.expand(batch, -1, -1)
        self.row_BNK = draft.row_BNK.expand(batch, -1, -1)
        tokens = draft.tokens_BN.expand(batch, -1)
        flat = self.kid_BNK.clamp(min=0).flatten(1)
        self.token_BNK = tokens.gather(1, flat).view(self.kid_BNK.shape)
        drawn = bool(self.kinds & {DrawKind.WITHOUT, DrawKind.WITH})
        self.laws_BRV: Tensor | None = None
        if drawn and draft.laws is not None:
            self.laws_BRV = ops.probs(draft.laws).to(law_BNV.dtype)

    def at(self, nodes: slice | Tensor) -> "SiblingLevel":
        """The draws of these nodes: a slice of the node axis, or indices [B, n]."""
        take: Callable[[Tensor], Tensor]
        if isinstance(nodes, slice):
            take = lambda table: table[:, nodes]  # noqa: E731
        else:
            take = lambda table: rows(table, nodes)  # noqa: E731
        return SiblingLevel(
            self.kinds,
            self.laws_BRV,
            take(self.kid_BNK),
            take(self.kind_BNK),
            take(self.row_BNK),
            take(self.token_BNK),
        )


class SiblingLevel:
    """The draws of n nodes in each row: draw k has child, token, kind and law."""

    def __init__(
        self,
        kinds: frozenset[DrawKind],
        laws_BRV: Tensor | None,
        kid_BnK: Tensor,
        kind_BnK: Tensor,
        row_BnK: Tensor,
        token_BnK: Tensor,
    ) -> None:
        self.kinds, self.laws_BRV = kinds, laws_BRV
        self.kid_BnK, self.kind_BnK, self.row_BnK = kid_BnK, kind_BnK, row_BnK
        self.token_BnK = token_BnK
        self.there_BnK = kid_BnK >= 0
        self.most = kid_BnK.shape[2]
        self._first: Tensor | None = None

    def guess(self, k: int, like_BnV: Tensor) -> Tensor:
        """[B, n, V]: the law of draw k after draws 0..k-1 were refused; zero where there is none.

        A placed child has a one-hot law. A draw without replacement has its row's law without the
        tokens of its earlier siblings of that kind, summing to one again.
        """
        if k == 0 and self._first is not None:
            return self._first
        there = self.there_BnK[..., k, None].to(like_BnV.dtype)
        if self.laws_BRV is None:
            guess = self._one_hot(k, there, like_BnV)
        else:
            guess = rows(self.laws_BRV, self.row_BnK[..., k].clamp(min=0))
            if k and DrawKind.WITHOUT in self.kinds:
                guess = self._without_earlier(guess, k)
            guess = guess * there
            if DrawKind.FIXED in self.kinds:
                placed = (self.kind_BnK[..., k] == DrawKind.FIXED)[..., None]
                guess = torch.where(placed, self._one_hot(k, there, like_BnV), guess)
        if k == 0:
            self._first = guess
        return guess

    def _one_hot(self, k: int, there: Tensor, like_BnV: Tensor) -> Tensor:
        return torch.zeros_like(like_BnV).scatter(-1, self.token_BnK[..., k, None], there)

    def _without_earlier(self, guess: Tensor, k: int) -> Tensor:
        earlier = (self.kind_BnK[..., :k] == DrawKind.WITHOUT) & self.there_BnK[..., :k]
        this = (self.kind_BnK[..., k] == DrawKind.WITHOUT)[..., None]
        gone = earlier & this
        kept = guess.gather(-1, self.token_BnK[..., :k]).masked_fill(gone, 0.0)
        left = guess.scatter_reduce(-1, self.token_BnK[..., :k], kept, "amin")
        total = left.sum(-1, keepdim=True)
        scale = torch.where(total > 0, total, 1.0)
        if self.kinds != {DrawKind.WITHOUT}:
            scale = torch.where(this, scale, 1.0)
        return left / scale
