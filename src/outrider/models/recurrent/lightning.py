"""Lightning attention (Qin et al. 2024): linear attention with a decay of its own for each head.

    S <- exp(-s) S + k v';    out = q S

MiniMax. There is no convolution and nothing that depends on a token but its key and value.
transformers' cache of this state is a class of its own, so the mixer's forward is replaced.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.recurrent.hooks import Function, handle_of
from outrider.models.recurrent.ssd import StateSpaceDuality

_RULE = StateSpaceDuality()  # queries, keys and values are its C, B and dt x


def wrap_attention(theirs: Function) -> Function:
    """`MiniMaxLightningAttention.forward` over a call's nodes, if it is given a cache of ours."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: object = None,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        **more: object,
    ) -> object:
        handle = handle_of(past_key_values, self)
        if handle is None:
            return theirs(
                self,
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **more,
            )
        heads = self.num_attention_heads
        mixed = self.act_fn(self.qkv_proj(hidden_states))
        mixed = mixed.view(*mixed.shape[:2], heads, -1)
        q, k, v = mixed.float().chunk(3, -1)
        log = (-self.slope_rate.float()).view(1, 1, heads).expand(*mixed.shape[:2], heads)
        out = handle.recur(_RULE, q, k, v, log).to(hidden_states.dtype)
        gate = torch.sigmoid(self.output_gate(hidden_states))
        return self.out_proj(gate * self.norm(out.flatten(-2))), None

    return forward


WRAPPERS: Mapping[str, Function] = {"MiniMaxLightningAttention": wrap_attention}
