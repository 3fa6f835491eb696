"""State space duality, the recurrence of Mamba-2 (Dao and Gu 2024): one decay a head and token.

    S <- exp(dt A) S + B (dt x)';    out = C S + D x

Mamba-2 itself, Falcon-H1, Granite 4, Bamba, Nemotron-H and Zamba2. B and C are shared by groups of
heads. Lightning attention (Qin et al. 2024) is the same with a decay of its own for each head, and
queries, keys and values in the places of C, B and dt x: MiniMax, whose mixer's forward is replaced,
as transformers' cache of its state is a class of its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from outrider.models.cpu_kernels.outer_product import Steps
from outrider.models.recurrent.call import NodeStates
from outrider.models.recurrent.hooks import (
    Function,
    StateHandle,
    handle_of,
    wrap_handed,
    wrap_update,
)
from outrider.models.recurrent.outer_product import (
    OuterProductState,
    along_paths,
    compiled_nodes,
    compiled_scan,
    per_head,
)
from outrider.models.recurrent.states import UNLIMITED


class StateSpaceDuality(OuterProductState):
    """C and B [B, Q, G, N], dt x [B, Q, H, P], log decay [B, Q, H]; outputs without D x."""

    fused = True

    def shapes(self, *inputs: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        _, b, delta, log = inputs
        state = (delta.shape[2], b.shape[3], delta.shape[3])
        return state, (tuple(log.shape[2:]), tuple(b.shape[2:]), tuple(delta.shape[2:]))

    def over_nodes(self, nodes: NodeStates, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Node by node: C S of the state ahead of the token, and what the token adds itself."""
        c, b, delta, log = inputs
        heads, decay = delta.shape[2], log.exp()
        if (done := compiled_nodes(nodes, c, b, delta, None, decay)) is not None:
            return done
        own = per_head((c * b).sum(-1), heads, 2)
        reads = per_head(c, heads, 2) * decay[..., None]
        outs = []
        for node in range(c.shape[1]):
            seen = (reads[:, node, :, None] @ nodes.of_parent(node))[:, :, 0]
            outs.append(seen + own[:, node, :, None] * delta[:, node])
            nodes.advance(node, (decay[:, node], b[:, node], delta[:, node]))
        return torch.stack(outs, 1), (decay, b, delta)

    def over_text(
        self, state: Tensor, ancestors_BQQ: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All tokens at once."""
        c, b, delta, log = inputs
        heads = delta.shape[2]
        path, between = along_paths(log, ancestors_BQQ)
        scores = per_head(c.transpose(1, 2) @ b.permute(0, 2, 3, 1), heads, 1)
        reads = per_head(c.transpose(1, 2), heads, 1) * path.exp()[..., None]
        out = reads @ state + (scores * between) @ delta.transpose(1, 2)
        return out.transpose(1, 2), (log.exp(), b, delta)


_RULE = StateSpaceDuality()


class MixerScan(OuterProductState):
    """The same by a mixer's own tables: x [B, Q, H, P], its dt [B, Q, H], B and C [B, Q, G, N] in
    the model's dtype; outputs with D x, in float32."""

    fused = True

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def shapes(self, *inputs: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        x, dt, b, _ = inputs
        state = (x.shape[2], b.shape[3], x.shape[3])
        return state, (tuple(dt.shape[2:]), tuple(b.shape[2:]), tuple(x.shape[2:]))

    def over_nodes(self, nodes: NodeStates, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All of it in one compiled call, where there is a kernel."""
        x, dt, b, c = inputs
        if nodes.due is not None:
            out = compiled_scan(nodes, (x, dt, b, c), self._steps)
            if out is not None:
                return out, ()
        out, entries = _RULE.over_nodes(nodes, *self._given(*inputs))
        return self._skipped(out, x), entries

    def over_text(
        self, state: Tensor, ancestors_BQQ: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All tokens at once."""
        out, entries = _RULE.over_text(state, ancestors_BQQ, *self._given(*inputs))
        return self._skipped(out, inputs[0]), entries

    def settle(
        self, state: Tensor, on_BQ: Tensor, entries: tuple[Tensor, ...], *inputs: Tensor
    ) -> Tensor:
        return _RULE.settle(state, on_BQ, entries, self._given(*inputs)[-1])

    def _given(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """C, B, dt x and the log of the decay."""
        a_H, _, bias_H, plus, limit = self._steps
        if bias_H is not None:
            dt = dt + bias_H.to(dt.dtype)
        dt = (softplus(dt) if plus else dt).clamp(*limit).float()
        return c.float(), b.float(), x.float() * dt[..., None], dt * a_H.float()

    def _skipped(self, out: Tensor, x: Tensor) -> Tensor:
        skip_H = self._steps.skip_H
        return out if skip_H is None else out + x.float() * skip_H.float()[:, None]


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    initial_states: StateHandle,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = UNLIMITED,
    **more: object,
) -> object:
    """`mamba2_chunk_scan` with a handle for its state."""
    rule = MixerScan(Steps(A, D, dt_bias, dt_softplus, dt_limit))
    out = initial_states.recur(rule, hidden_states, dt, B, C)
    return out.contiguous(), initial_states  # callers view it


def _one_token(
    handle: StateHandle,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor | None,
    bias: Tensor | None,
    plus: bool,
    gate: Tensor | None,
) -> Tensor:
    """transformers' own is not told `time_step_limit`, which the whole forward keeps to: the
    handle's owner says it."""
    bias, skip = (None if t is None else t[..., 0] for t in (bias, d))  # once a channel
    rule = MixerScan(Steps(a[:, 0, 0], skip, bias, plus, handle.states.limit))
    out = handle.recur(rule, x, dt[..., 0], b, c)
    return out if gate is None else out * silu(gate.float())


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


WRAPPERS: Mapping[str, Function] = {
    "MiniMaxLightningAttention": wrap_attention,
    "mamba2_chunk_scan": wrap_handed(_chunk_scan, "initial_states"),
    "mamba2_selective_state_update": wrap_update(_one_token),
}
