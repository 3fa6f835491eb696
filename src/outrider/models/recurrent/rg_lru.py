"""RG-LRU, the gated linear recurrence of Griffin (De et al. 2024): RecurrentGemma.

    a = exp(-8 r softplus(L));    h <- a h + sqrt(1 - a^2) (i x)

with gates r and i of the token's own input x, behind a short convolution. transformers keeps the
state in the module and takes more than one token for a prompt, so its block's forward is replaced.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from outrider.models.recurrent.elementwise import ElementwiseState
from outrider.models.recurrent.hooks import Function, handle_of
from outrider.models.recurrent.short_conv import convolved

_RATE = 8.0  #: how much faster the recurrence decays than its gate says


class GatedLinearRecurrence(ElementwiseState):
    """Decay and input [B, Q, W]; the outputs are the states."""

    def shapes(self, *inputs: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        wide = (inputs[0].shape[2],)
        return wide, (wide, wide)

    def entries(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Decay and input."""
        return inputs

    def advance(self, state: Tensor, entries: Sequence[Tensor], into: Tensor | None) -> Tensor:
        decay, added = entries
        return torch.mul(state, decay, out=into).add_(added)

    def idle(self, entries: Sequence[Tensor], on_B: Tensor) -> list[Tensor]:
        """Times one, plus zero."""
        decay, added = entries
        off = ~on_B[:, None]
        return [decay.masked_fill(off, 1.0), added.masked_fill(off, 0.0)]

    def output(self, before: Tensor, behind: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The state itself."""
        return behind


_RULE = GatedLinearRecurrence()


def _gate(unit: Any, x_BQW: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A gate [B, Q, W]: each head's channels look at those of their own head."""
    heads = x_BQW.view(*x_BQW.shape[:2], unit.num_attention_heads, unit.block_width)
    made = torch.einsum("bqhi,hij->bqhj", heads, weight) + bias
    return torch.sigmoid(made).flatten(-2)


def wrap_block(theirs: Function) -> Function:
    """`RecurrentGemmaRecurrentBlock.forward` over nodes, if it is given a cache of ours."""

    def forward(
        self: Any,
        input_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        past_key_values: object = None,
        **more: object,
    ) -> object:
        handle = handle_of(past_key_values, self)
        if handle is None:
            more["past_key_values"] = past_key_values
            return theirs(self, input_states, position_ids, attention_mask, use_cache, **more)
        convolution, unit = self.conv_1d, self.rg_lru
        given = self.linear_x(input_states).mT
        x = convolved(handle, given, convolution.weight[:, 0], convolution.bias, None)
        x = x.mT.contiguous()
        given = _gate(unit, x, unit.input_gate_weight, unit.input_gate_bias)
        rate = _gate(unit, x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        log = -_RATE * rate * softplus(unit.recurrent_param)
        scale = torch.sqrt(1 - torch.exp(2 * log))
        scale = scale.masked_fill((position_ids == 0)[..., None], 1.0).to(x.dtype)
        out = handle.recur(_RULE, log.exp().float(), (x * given * scale).float())
        mixed = out.to(x.dtype) * self.act_fn(self.linear_y(input_states))
        return self.linear_out(mixed), None

    return forward


WRAPPERS: Mapping[str, Function] = {"RecurrentGemmaRecurrentBlock": wrap_block}
