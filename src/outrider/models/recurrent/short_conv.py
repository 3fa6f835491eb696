"""Short causal convolutions over time: a window of three or four tokens, and no other state.

The inputs of nodes lie in a ring by slot; a node's window is gathered through its ancestors. Alone
in LFM2, ahead of the recurrence in nearly all other kinds of mixers.

Compressed convolutional attention (Figliolia et al. 2025), ZAYA's, is windows alone as well:
queries and keys go through two short convolutions, one by channel and one by head, and half of a
value is of the token before. transformers keeps them in the cache itself, so the forward of the
projection is replaced.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from outrider.models.cpu_kernels.mixers import unsupported_reason
from outrider.models.recurrent.hooks import (
    ConvolutionInputs,
    Function,
    StateHandle,
    handle_of,
    wrap_handed,
)


def over_windows(
    x_BCQK: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: str | None
) -> Tensor:
    """The convolution [B, C, Q] of windows, added tap by tap: one order whatever the call.

    >>> import torch
    >>> over_windows(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[3.0, 4.0]]), None, None)
    tensor([[[11.]]])
    """
    taps_KC1 = weight_CK.float().t().contiguous()[..., None]
    out = x_BCQK[..., 0] * taps_KC1[0]
    for tap in range(1, len(taps_KC1)):
        out = out + x_BCQK[..., tap] * taps_KC1[tap]
    if bias_C is not None:
        out = out + bias_C.float()[:, None]
    out = out.to(x_BCQK.dtype)  # as transformers' own: rounded ahead of the activation
    return out if activation is None else ACT2FN[activation](out)


def convolved(
    handle: StateHandle,
    x_BCQ: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
) -> Tensor:
    """The convolution [B, C, Q] of a call's nodes over their paths, compiled where it can be."""
    if unsupported_reason(x_BCQ, weight_CK, bias_C, activation) is None:
        return handle.convolve(x_BCQ, weight_CK, bias_C, activation)
    return over_windows(handle.windows(x_BCQ, weight_CK.shape[1]), weight_CK, bias_C, activation)


def _over_text(
    x: ConvolutionInputs,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **more: object,
) -> Tensor:
    """`causal_conv1d_fn` of what a cache of ours returns for its inputs."""
    return convolved(*x, weight, bias, activation)


def _one_token(
    x: Tensor,
    conv_state: StateHandle,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """`causal_conv1d_update` with a handle: one token goes the way of several."""
    return convolved(conv_state, x, weight, bias, activation)


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


WRAPPERS: Mapping[str, Function] = {
    "ZayaCCAProjection": wrap_projection,
    "causal_conv1d_fn": wrap_handed(_over_text, "x", 0),
    "causal_conv1d_update": wrap_handed(_one_token, "conv_state", 1),
}
