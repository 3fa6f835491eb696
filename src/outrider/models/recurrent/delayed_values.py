"""Compressed convolutional attention (Figliolia et al. 2025): keys of windows, values a token late.

Queries and keys of ZAYA go through two short convolutions, one by channel and one by head; half of
a value is of the token before. All of it is windows of inputs, and no other state. transformers
keeps them in the cache itself, so the forward of the projection is replaced.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.recurrent.hooks import Function, handle_of
from outrider.models.recurrent.short_conv import over_windows


def _mixed(projection: Any, x_BCQK: Tensor) -> Tensor:
    """Both convolutions [B, Q, C] of windows as long as they are together."""
    by_channel, by_head = projection.conv_qk_depthwise, projection.conv_qk_grouped
    width, groups = by_channel.weight.shape[-1], by_head.groups
    out: Tensor | None = None
    for tap in range(by_head.weight.shape[-1]):
        some = x_BCQK[..., tap : tap + width]
        once = over_windows(some, by_channel.weight[:, 0], by_channel.bias, None).mT
        heads = once.reshape(*once.shape[:2], groups, -1)
        weight_GOI = by_head.weight[..., tap].view(groups, -1, heads.shape[-1])
        part = torch.einsum("bqgi,goi->bqgo", heads, weight_GOI).flatten(2)
        out = part if out is None else out + part
    assert out is not None
    return out if by_head.bias is None else out + by_head.bias


def wrap_projection(theirs: Function) -> Function:
    """`ZayaCCAProjection.forward` over a call's nodes, if it is given a cache of ours."""

    def forward(
        self: Any, hidden_states: Tensor, past_key_values: object, conv_mask: object = None
    ) -> object:
        handle = handle_of(past_key_values, self)
        if handle is None:
            return theirs(self, hidden_states, past_key_values, conv_mask)
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
        beside = k.view(shape).repeat_interleave(self.num_key_value_groups, 2)
        beside_q = (q.view(shape) + beside) * 0.5
        each = beside_q.view(*shape[:2], -1, self.num_key_value_groups, self.head_dim)
        windows = handle.windows(torch.cat([q, k], -1).mT, self.conv_kernel_size + 1)
        mixed = _mixed(self, windows)
        query = mixed[..., : q.shape[-1]].reshape(shape) + beside_q
        key = mixed[..., q.shape[-1] :].reshape(shape) + each.mean(-2)
        before = handle[:, 1].windows(hidden_states.mT, 2)[..., 0].mT
        now, late = self.v_proj_current(hidden_states), self.v_proj_delayed(before.contiguous())
        return query, key, torch.cat([now, late], -1).view(shape)

    return forward


WRAPPERS: Mapping[str, Function] = {"ZayaCCAProjection": wrap_projection}
