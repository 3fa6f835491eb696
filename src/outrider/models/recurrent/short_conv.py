"""Short causal convolutions over time: a window of three or four tokens, and no other state.

The inputs of nodes lie in a ring by slot; a node's window is gathered through its ancestors. Alone
in LFM2, ahead of the recurrence in nearly all other kinds of mixers.
"""

from collections.abc import Mapping

from torch import Tensor
from transformers.activations import ACT2FN

from outrider.models.cpu_kernels.mixers import unsupported_reason
from outrider.models.recurrent.hooks import (
    ConvolutionInputs,
    Function,
    StateHandle,
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


WRAPPERS: Mapping[str, Function] = {
    "causal_conv1d_fn": wrap_handed(_over_text, "x", 0),
    "causal_conv1d_update": wrap_handed(_one_token, "conv_state", 1),
}
