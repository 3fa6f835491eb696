"""Down a tree along tokens that are known, and along a chain as transformers calls it."""

import torch
from torch import Tensor

from outrider.ops.reference.laws import residual
from outrider.tree import numbers
from outrider.types import Draft


def follow(draft: Draft, chosen_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root to the child that carries each node's chosen token, while there is one.

    Returns the path [B, D] (-1 padded), its length [B] and the node where the walk stands [B].
    """
    batch = draft.tokens_BN.shape[0]
    depth = draft.tree.max_depth
    device = draft.tokens_BN.device
    if depth == 0:
        none = torch.zeros(batch, dtype=torch.int64, device=device)
        return none.new_zeros(batch, 0), none, none
    draws = draft.draws_BNK.expand(batch, -1, -1)
    if draft.tree.is_chain:
        kid = draws[:, :depth, 0]
        hit = (kid >= 0) & (draft.tokens_BN[:, 1 : depth + 1] == chosen_BN[:, :depth])
        going = hit.long().cumprod(1)
        count = going.sum(1)
        return torch.where(going > 0, kid, -1), count, count
    rows = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    path = []
    for _ in range(depth):
        kids = draws[rows, node]
        same = draft.tokens_BN.gather(1, kids.clamp(min=0)) == chosen_BN[rows, node][:, None]
        hit = (same & (kids >= 0)).to(torch.int64)
        alive = alive & (hit.amax(1) > 0)
        there = kids.gather(1, hit.argmax(1, keepdim=True))[:, 0]
        path.append(torch.where(alive, there, -1))
        node = torch.where(alive, there, node)
    path_BD = torch.stack(path, 1)
    return path_BD, (path_BD >= 0).sum(1), node


def assisted(
    ids_n: Tensor, drafted_1nV: Tensor, target_1mV: Tensor, uniforms: Tensor, weight: float | None
) -> tuple[Tensor, Tensor]:
    """Chain verification of one sequence as transformers' assisted generation calls it.

    Accepts token i iff u_i q_i < w p_i + (1 - w) q_i (w = 1 without a weight), n of them; one more
    token by inverse transform from the last two uniforms. Tokens [1, n + 1], and n.
    """
    count = drafted_1nV.shape[1]
    p, q = (logits[0].double().softmax(-1) for logits in (target_1mV, drafted_1nV))
    q = torch.nn.functional.pad(q, (0, p.shape[-1] - q.shape[-1], 0, 1))
    u = uniforms.double()
    owed, drawn = (law[:count].gather(1, ids_n[:count, None])[:, 0] for law in (p, q))
    owed = owed if weight is None else (1.0 - weight) * drawn + weight * owed
    n = (u[:count] * drawn < owed).long().cumprod(0).sum()
    left = residual(p[n], q[n]).cumsum(0)
    token = torch.searchsorted(left, (u[count] + u[count + 1] * 2.0**-24) * left[-1], right=True)
    token = token.clamp(max=p.shape[-1] - 1)
    return torch.cat([ids_n[:count][numbers(count, n.device) < n], token[None]])[None], n
