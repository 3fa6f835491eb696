"""The gated delta rule: a state is corrected by what it says of a key (Yang et al. 2024).

Qwen3-Next, Qwen3.5 and OLMo-Hybrid decay it by one number a head, Kimi Linear by one for each
channel of a key:

    S <- decay S;    delta = beta (v - k S);    S <- S + k delta';    out = q S
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.models.recurrent.call import NodeStates
from outrider.models.recurrent.hooks import Function, StateHandle, wrap_handed
from outrider.models.recurrent.outer_product import (
    OuterProductState,
    along_paths,
    compiled_nodes,
    per_head,
)

_EPSILON = 1e-6  #: of transformers' own normalisation of keys and queries


class GatedDeltaRule(OuterProductState):
    """Queries and keys [B, Q, G, K], values [B, Q, H, V], beta [B, Q, H], log decay [B, Q, H] or
    [B, Q, H, K]."""

    fused = True

    def shapes(self, *inputs: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        _, k, v, _, log = inputs
        state = (v.shape[2], k.shape[3], v.shape[3])
        return state, (tuple(log.shape[2:]), tuple(k.shape[2:]), tuple(v.shape[2:]))

    def over_nodes(self, nodes: NodeStates, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Node by node: one product with the parent's state serves both reads.

        With the state's decay taken into key and query, k S and q S are of the state ahead of the
        token; what the token itself adds to its output is (q k) delta.
        """
        q, k, v, beta, log = inputs
        decay = log.exp()
        if (done := compiled_nodes(nodes, q, k, v, beta, decay)) is not None:
            return done
        factor = decay if decay.dim() == 4 else decay[..., None]
        queries, keys = (per_head(x, v.shape[2], 2) for x in (q, k))
        both = torch.stack([keys * factor, queries * factor], 3)  # [B, Q, H, 2, K]
        own = (queries * keys).sum(-1)
        outs, deltas = [], []
        for node in range(q.shape[1]):
            known, seen = (both[:, node] @ nodes.of_parent(node)).unbind(2)
            delta = (v[:, node] - known) * beta[:, node, :, None]
            outs.append(seen + own[:, node, :, None] * delta)
            deltas.append(delta)
            nodes.advance(node, (decay[:, node], k[:, node], delta))
        return torch.stack(outs, 1), (decay, k, torch.stack(deltas, 1))

    def over_text(
        self, state: Tensor, ancestors_BQQ: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All tokens at once: the deltas solve a triangular system."""
        q, k, v, beta, log = inputs
        queries, keys = (per_head(x, v.shape[2], 2).transpose(1, 2) for x in (q, k))
        values, share = v.transpose(1, 2), beta.transpose(1, 2)[..., None]
        if log.dim() == 3:
            path, between = along_paths(log, ancestors_BQQ)
            grown = path.exp()[..., None]
            system = keys @ keys.mT * between
            scores = queries @ keys.mT * between
        else:
            system, scores, grown = _by_channel(queries, keys, log, ancestors_BQQ)
        eye = torch.eye(q.shape[1], dtype=torch.bool, device=q.device)
        system = (system * share).masked_fill(eye, 0.0)
        known, seen = (torch.cat([keys * grown, queries * grown], 2) @ state).chunk(2, 2)
        delta = torch.linalg.solve_triangular(
            system, (values - known) * share, upper=False, unitriangular=True
        )
        out = seen + scores @ delta
        return out.transpose(1, 2), (log.exp(), k, delta.transpose(1, 2))


def _by_channel(
    queries: Tensor, keys: Tensor, log: Tensor, ancestors_BQQ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Products [B, H, Q, Q] of keys with keys and with queries, each channel decayed in between.

    And the decay along each path [B, H, Q, K].
    """
    path = torch.einsum("bij,bjhk->bhik", ancestors_BQQ.to(log.dtype), log)
    between = path[..., :, None, :] - path[..., None, :, :]
    between = between.masked_fill(~ancestors_BQQ[:, None, :, :, None], -torch.inf).exp_()
    after = between.mul_(keys[..., None, :, :])  # [B, H, Q, Q, K]
    system = (after @ keys[..., None])[..., 0]
    scores = (after @ queries[..., None])[..., 0]
    return system, scores, path.exp()


_RULE = GatedDeltaRule()


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: StateHandle,
    use_qk_l2norm_in_kernel: bool = False,
    **more: object,
) -> tuple[Tensor, object]:
    """A rule of transformers', chunked or for one token, with a handle for its state."""
    q, k, v, share, log = (x.float() for x in (query, key, value, beta, g))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (q, k))
    out = initial_state.recur(_RULE, q * q.shape[-1] ** -0.5, k, v, share, log)
    return out.to(query.dtype), initial_state


WRAPPERS: Mapping[str, Function] = dict.fromkeys(
    (
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
    ),
    wrap_handed(_gated_delta_rule, "initial_state"),
)
