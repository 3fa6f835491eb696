"""State space duality, the recurrence of Mamba-2 (Dao and Gu 2024): one decay a head and token.

    S <- exp(dt A) S + B (dt x)';    out = C S + D x

Mamba-2 itself, Falcon-H1, Granite 4, Bamba, Nemotron-H and Zamba2. B and C are shared by groups of
heads.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from outrider.models.recurrent.call import NodeStates
from outrider.models.recurrent.hooks import Function, StateHandle, wrap_update
from outrider.models.recurrent.outer_product import (
    OuterProductState,
    along_paths,
    compiled_nodes,
    per_head,
)

_UNLIMITED = (0.0, float("inf"))


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


def _over(
    handle: StateHandle,
    x: Tensor,
    dt: Tensor,
    a_H: Tensor,
    b: Tensor,
    c: Tensor,
    d_H: Tensor | None,
) -> Tensor:
    """Outputs float32 [B, Q, H, P]; dt [B, Q, H] is what transformers has made of its input."""
    x, dt = x.float(), dt.float()
    out = handle.recur(_RULE, c.float(), b.float(), x * dt[..., None], dt * a_H.float())
    if d_H is not None:
        out = out + x * d_H.float()[:, None]
    return out.contiguous()  # callers view it


def _steps(dt: Tensor, bias: Tensor | None, plus: bool, limit: tuple[float, float]) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return (softplus(dt) if plus else dt).clamp(*limit)


def wrap_chunked(theirs: Function) -> Function:
    """`mamba2_chunk_scan` that takes a handle for its state."""

    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | StateHandle | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = _UNLIMITED,
        **more: object,
    ) -> object:
        if not isinstance(initial_states, StateHandle):
            return theirs(
                hidden_states,
                dt,
                A,
                B,
                C,
                chunk_size,
                D=D,
                dt_bias=dt_bias,
                initial_states=initial_states,
                dt_softplus=dt_softplus,
                dt_limit=dt_limit,
                **more,
            )
        dt = _steps(dt, dt_bias, dt_softplus, dt_limit)
        return _over(initial_states, hidden_states, dt, A, B, C, D), initial_states

    return mamba2_chunk_scan


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
    dt = _steps(dt[..., 0], bias, plus, handle.states.limit)
    out = _over(handle, x, dt, a[:, 0, 0], b, c, skip)
    return out if gate is None else out * silu(gate.float())


WRAPPERS: Mapping[str, Function] = {
    "mamba2_chunk_scan": wrap_chunked,
    "mamba2_selective_state_update": lambda theirs: wrap_update(theirs, _one_token),
}
