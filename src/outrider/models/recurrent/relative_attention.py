"""Attention of Inkling: biases by distance, which a tree's nodes have by their positions.

transformers counts a query's and a key's place by the slots of its cache. The keys and values are
of short convolutions, of which one kind has weights of each token's own.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.models.recurrent.hooks import Function, handle_of


class PositionedCache:
    """A cache whose offsets turn slots into positions, rows [B, Q] and [B, W] of their own."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.here_BQ, self.there_BW = cache.positions()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, Tensor]:
        """How many keys there are, and what their numbers are short of their positions."""
        return self.there_BW.shape[1], _short_of(self.there_BW)

    def get_query_offset(self, layer_idx: int) -> Tensor:
        """What the numbers of a call's nodes are short of their positions."""
        return _short_of(self.here_BQ)


def _short_of(positions_BQ: Tensor) -> Tensor:
    return positions_BQ - torch.arange(positions_BQ.shape[1], device=positions_BQ.device)


def wrap_logits(theirs: Function) -> Function:
    """`RelativeLogits.forward` that takes positions [B, Q] and [B, W] of each row's own."""

    def forward(
        self: Any, relative_states: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor:
        if query_positions.dim() == 1:
            return theirs(self, relative_states, query_positions, key_positions)  # type: ignore[no-any-return]
        by_distance_BHQE = (relative_states @ self.proj).transpose(1, 2)
        distance = (query_positions[:, :, None] - key_positions[:, None])[:, None]
        at = distance.clamp(0, self.rel_extent - 1)
        bias: Tensor = by_distance_BHQE.gather(-1, at.expand(-1, by_distance_BHQE.shape[1], -1, -1))
        return bias.masked_fill((distance < 0) | (distance >= self.rel_extent), 0.0)

    return forward


def wrap_attention(theirs: Function) -> Function:
    """`Inkling2...Attention.forward` that is given positions for the cache's slots."""

    def forward(self: Any, *given: object, past_key_values: Any = None, **more: object) -> object:
        if handle_of(past_key_values, self) is not None:
            past_key_values = PositionedCache(past_key_values)
        return theirs(self, *given, past_key_values=past_key_values, **more)

    return forward


def wrap_scaled_attention(theirs: Function) -> Function:
    """`InklingAttention.forward`, which scales what is far into a text by slots as well."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        conv_mask: Tensor | None = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> object:
        if handle_of(past_key_values, self) is None:
            more |= {"conv_mask": conv_mask, "past_key_values": past_key_values}
            return theirs(self, hidden_states, attention_mask, **more)
        here_BQ, there_BW = past_key_values.positions()
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        convolved = {"past_key_values": past_key_values, "conv_mask": conv_mask}
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_sconv(self.k_proj(hidden_states), **convolved)
        value = self.v_sconv(self.v_proj(hidden_states), **convolved)
        key = self.k_norm(key.view(shape)).transpose(1, 2)
        relative = self.r_proj(hidden_states).view(*shape[:2], self.num_heads, -1)
        entries = (key, value.view(shape).transpose(1, 2))
        key, value = past_key_values.update(*entries, self.layer_idx)
        bias = self.rel_logits_proj(relative, here_BQ, there_BW)
        floor = self.config.log_scaling_n_floor
        if not self.is_sliding and floor is not None:
            far = torch.log(((here_BQ + 1).float() / floor).clamp(min=1.0))
            scale = (1.0 + self.config.log_scaling_alpha * far)[:, None, :, None]
            query, bias = ((x.float() * scale).to(x.dtype) for x in (query, bias))
        own = vars(sys.modules[type(self).__module__])["eager_attention_forward"]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, own)
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            position_bias=bias,
            **more,
        )
        return self.o_proj(out.reshape(*shape[:2], -1).contiguous()), weights

    return forward


def wrap_convolution(theirs: Function) -> Function:
    """`Inkling2DynamicShortConvolution.forward` over windows: aux_layers of each token's own."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        dynamic_input: Tensor,
        past_key_values: object = None,
        conv_mask: object = None,
        **more: object,
    ) -> object:
        handle = handle_of(past_key_values, self)
        if handle is None:
            more |= {"past_key_values": past_key_values, "conv_mask": conv_mask}
            return theirs(self, hidden_states, dynamic_input, **more)
        size, x_BQC = self.conv_kernel_size, hidden_states.float()
        own = self.weight_proj(dynamic_input).float()
        own = own.view(*x_BQC.shape[:2], self.num_heads, 1, size)
        aux_layers = self.static_weight.float().T.view(self.num_heads, -1, size) + own
        windows = handle[:, self.conv_idx].windows(x_BQC.mT, size).flip(-1).transpose(1, 2)
        mixed = (windows.reshape(*aux_layers.shape) * aux_layers).sum(-1).reshape(x_BQC.shape)
        return ((mixed + x_BQC) / math.sqrt(2 * size + 1)).to(hidden_states.dtype)

    return forward


WRAPPERS: Mapping[str, Function] = {
    "Inkling2DynamicShortConvolution": wrap_convolution,
    "Inkling2FullAttention": wrap_attention,
    "Inkling2RelativeLogits": wrap_logits,
    "Inkling2SlidingAttention": wrap_attention,
    "InklingAttention": wrap_scaled_attention,
    "InklingRelativeLogits": wrap_logits,
}
