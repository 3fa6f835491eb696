"""States that decay and gain an outer product for each token: S <- decay S + key delta'.

Gated delta rules, SSD and lightning attention differ in how a token's `delta` comes about and in
what is read of the state; what they log, and how a log is applied, is the same. Names follow
hybrid models' own papers; tables are [B, Q, H, ...] float32, states [B, H, K, V].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.models.cpu_kernels import outer_product as compiled
from outrider.models.recurrent.call import NodeStates, Recurrence


class OuterProductState(Recurrence):
    """How a state is advanced by its log.

    `fused`: its pass over nodes is `compiled_nodes`, where there is a kernel.

    An entry is a decay [B, H] or [B, H, K], a key [B, G, K], which groups of heads may share, and a
    delta [B, H, V]. The last of a recurrence's inputs is the log of the decay.
    """

    fused = False

    def takes_due(self, state: Tensor) -> bool:
        """Whether its pass over nodes first applies what is due, and writes the nodes' entries."""
        return self.fused and compiled.unsupported_reason(state) is None

    def advance(self, state: Tensor, entries: Sequence[Tensor], into: Tensor | None) -> Tensor:
        decay, key, delta = entries
        if compiled.unsupported_reason(state) is None:
            made = torch.empty_like(state) if into is None else into
            log = decay[:, None], key[:, None], delta[:, None]
            one_B = state.new_ones(len(state), dtype=torch.int64)
            compiled.advance(state, made, log, one_B, one_B)
            return made
        key = per_head(key, delta.shape[1], 1)
        factor = decay[..., None] if decay.dim() == 3 else decay[..., None, None]
        # one operation whoever calls: a fused multiply-add rounds otherwise than two steps
        made = torch.mul(state, factor, out=into)
        return made.addcmul_(key[..., None], delta[..., None, :])

    def apply(
        self, state: Tensor, log: tuple[Tensor, ...], first_B: Tensor, count_B: Tensor
    ) -> None:
        if compiled.unsupported_reason(state) is None:
            decay, key, delta = log
            compiled.advance(state, state, (decay, key, delta), first_B, count_B)
        else:
            super().apply(state, log, first_B, count_B)

    def idle(self, entries: Sequence[Tensor], on_B: Tensor) -> list[Tensor]:
        """Entries that leave the states of other rows as they are: times one, plus zero."""
        decay, key, delta = entries
        off_B = ~on_B
        off = off_B.view(-1, *[1] * (decay.dim() - 1))
        return [decay.masked_fill(off, 1.0), key, delta.masked_fill(off_B[:, None, None], 0.0)]

    def settle(
        self, state: Tensor, on_BQ: Tensor, entries: tuple[Tensor, ...], *inputs: Tensor
    ) -> Tensor:
        _, key, delta = entries
        log = inputs[-1]
        on = on_BQ.view(*on_BQ.shape, *[1] * (log.dim() - 2))
        gone = torch.where(on, log, 0.0).cumsum(1)
        left = torch.where(on, (gone[:, -1:] - gone).exp(), 0.0)
        whole = gone[:, -1].exp()
        key = per_head(key, delta.shape[2], 2)
        if log.dim() == 3:
            left, whole = left[..., None], whole[..., None]
        added = (key * left).permute(0, 2, 3, 1) @ delta.transpose(1, 2)
        return torch.addcmul(added, state, whole[..., None])


def compiled_nodes(
    nodes: NodeStates, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Outputs of a call's nodes by one kernel, which writes their entries; None where it has to be
    torch's way.

    `beta` is as in `outrider.models.cpu_kernels.outer_product.over_nodes`.
    """
    if nodes.due is None:
        return None
    origins_BQ, (decays, keys, deltas) = nodes.origins_BQ, nodes.log
    assert origins_BQ is not None
    log = decays, keys, deltas
    return compiled.over_nodes(
        nodes.base, origins_BQ, q, k, v, beta, decay, log, nodes.lines_BQ, nodes.due
    ), ()


def compiled_scan(
    nodes: NodeStates, inputs: tuple[Tensor, Tensor, Tensor, Tensor], steps: compiled.Steps
) -> Tensor | None:
    """The same by a mixer's own tables, as `outrider.models.cpu_kernels.outer_product.over_scan`
    takes them."""
    origins_BQ, (decays, keys, deltas) = nodes.origins_BQ, nodes.log
    assert origins_BQ is not None
    assert nodes.due is not None
    log = decays, keys, deltas
    return compiled.over_scan(nodes.base, origins_BQ, inputs, steps, log, nodes.lines_BQ, nodes.due)


def per_head(key: Tensor, heads: int, dim: int) -> Tensor:
    """Keys of groups, once for each head of the group."""
    groups = key.shape[dim]
    return key if groups == heads else key.repeat_interleave(heads // groups, dim)


def along_paths(log_BQH: Tensor, ancestors_BQQ: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay along each node's path [B, H, Q], and decay from each ancestor on [B, H, Q, Q].

    The decay is 0 from nodes that are no ancestors.

    >>> one = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    >>> along_paths(torch.tensor([[[-1.0], [-2.0]]]), one)[0].tolist()
    [[[-1.0, -3.0]]]
    """
    path = torch.einsum("bij,bjh->bhi", ancestors_BQQ.to(log_BQH.dtype), log_BQH)
    between = path[..., :, None] - path[..., None, :]
    return path, between.masked_fill(~ancestors_BQQ[:, None], -torch.inf).exp()
