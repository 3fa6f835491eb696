"""Attention of lean runners: heads that share keys are read together, rows padded where they round.

A group of heads over one key/value head is one block of rows, so that keys and values are read once
for all of them; torch's grouped attention copies them for every head. Rows are padded here alone:
the products of a layer run over the true ones.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models import batch_invariance
from outrider.models.batch_invariance import BatchInvariance, PaddingPolicy

#: (q [B, H, R, E], keys and values [B, H, W, E], mask [B, 1, R, W] or None) -> [B, H, R, E]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def fused(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k' / sqrt(E) + mask) v by torch's fused attention."""
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def products(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k' / sqrt(E) + mask) v as two products."""
    return unscaled(q * q.shape[-1] ** -0.5, keys, values, mask)


def unscaled(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k' + mask) v as two products."""
    scores = q @ keys.mT
    return torch.softmax(scores if mask is None else scores + mask, -1) @ values


class BatchInvariantAttention(NamedTuple):
    """Attention whose rows do not depend on how many there are.

    >>> BatchInvariantAttention(fused, PaddingPolicy((4, 8), 4), groups=3).mask(torch.zeros(1, 1, 2,
    ...     9)).shape
    torch.Size([1, 1, 8, 9])
    """

    attend: Attend
    rows: PaddingPolicy
    groups: int = 1  #: query heads to each of keys and values

    def mask(self, mask_B1QW: Tensor) -> Tensor:
        """The mask of a group's rows, once for all layers."""
        queries = mask_B1QW.shape[2]
        rows = self.groups * queries
        padded = self.rows.padded(rows)
        if queries == 1:
            return mask_B1QW.expand(-1, -1, padded, -1)
        mask = mask_B1QW if self.groups == 1 else mask_B1QW.repeat(1, 1, self.groups, 1)
        return F.pad(mask, (0, 0, 0, padded - rows)) if padded > rows else mask

    def __call__(
        self, q_BHQE: Tensor, keys: Tensor, values: Tensor, mask_B1RW: Tensor | None = None
    ) -> Tensor:
        """[B, H, Q, E] for keys and values [B, H / groups, W, E], behind a mask of `mask`."""
        batch, heads, queries, size = q_BHQE.shape
        rows = self.groups * queries
        padded = self.rows.padded(rows)
        q = q_BHQE
        if self.groups > 1:
            q = q.reshape(batch, heads // self.groups, rows, size)
        if padded > rows:
            q = F.pad(q, (0, 0, 0, padded - rows))
        pieces = self.rows.pieces(padded)
        if len(pieces) == 1:
            x = self.attend(q, keys, values, mask_B1RW)
        else:
            parts = [
                (q[:, :, some], None if mask_B1RW is None else mask_B1RW[:, :, some])
                for some in pieces
            ]
            x = torch.cat([self.attend(part, keys, values, mask) for part, mask in parts], 2)
        if padded > rows:
            x = x[:, :, :rows]
        return x if self.groups == 1 else x.reshape(batch, heads, queries, size)


def steady(
    attend: Attend, heads: int, groups: int, size: int, like: Tensor
) -> tuple[BatchInvariantAttention, BatchInvariance]:
    """Attention over `heads` key/value heads as `like`, and what is left for calls to look after.

    `attend` is `fused` or `unscaled`.
    """
    if not batch_invariance.applies_to(like.dtype, like.device):
        return BatchInvariantAttention(attend, PaddingPolicy(), groups), BatchInvariance()
    return tried(attend, heads, groups, size, like.dtype)


def tried(
    attend: Attend, heads: int, groups: int, size: int, dtype: torch.dtype
) -> tuple[BatchInvariantAttention, BatchInvariance]:
    """`steady` in whatever dtype: in float32 for products that round what they are given."""
    form = products if attend is unscaled else attend
    found = batch_invariance.of_attention(form, heads, size, dtype)
    rows = found.rows or PaddingPolicy()
    return BatchInvariantAttention(attend, rows, groups), found._replace(rows=None)
