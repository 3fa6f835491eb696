# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Sample-and-match over any tree: the target's own token at every node, then a walk over ids.

    y = argmax(z / T - log E),  E the Exp(1) race of (seed, absolute position)
    y = argmax z when greedy

One pass over the logits and no normaliser. The race is the reference's, so the text is the text
that plain sampling with that seed gives. The second kernel walks: at each node it takes the best of
the slices and follows the child that carries it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.ops.triton import noise
from outrider.ops.triton.launch import LOOPS, block_size, next_power, programs, race_size
from outrider.ops.triton.law_slices import scaled, side_of
from outrider.ops.triton.tables import keys_of, tables_of, token_of
from outrider.types import Draft, Draws, Scores, Verdict


class Winners(NamedTuple):
    """Best token of each slice of each node."""

    value: Tensor
    token: Tensor


@triton.jit
def match_race(
    target, keys, depths, depth_b, winners, vocab, nodes, NPROG,
    BLOCK: tl.constexpr, HAS_FLOOR: tl.constexpr, INJECTED: tl.constexpr,
):  # fmt: skip
    """The best token of one slice of one node. Grid (slices, nodes, batch)."""
    pid = tl.program_id(0)
    node = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    z = scaled(target, b, node, offs, HAS_FLOOR)
    if tl.load(target.inverse + b) != float("inf"):
        ahead = tl.load(depths + b * depth_b + node)
        if INJECTED:
            race = keys.race + b * keys.race_b + ahead * vocab
            noise_E = tl.load(race + offs, mask=offs < vocab, other=1.0)
        else:
            start = tl.load(keys.start + b) + ahead + 1
            noise_E = noise.exponential(
                noise.stream(tl.load(keys.seed + b), start, noise.TARGET), offs
            )
        z -= tl.log(noise_E)
    value, at = tl.max(z, axis=0, return_indices=True)
    row = (b * nodes + node) * NPROG + pid
    tl.store(winners.value + row, value)
    tl.store(winners.token + row, pid * BLOCK + at)


@triton.jit(do_not_specialize=LOOPS)
def match_walk(
    tables, winners, path, count, next_token, nodes, depth, NPROG, NPROG_P2: tl.constexpr,
    MOST_P2: tl.constexpr, DEPTH_P2: tl.constexpr,
):  # fmt: skip
    """Follow the child that carries each node's token. Grid (batch,)."""
    b = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, NPROG_P2)
    k = tl.arange(0, MOST_P2)
    node = b * 0
    n = tl.program_id(0) * 0
    going = n == 0
    while going:
        row = (b * nodes + node) * NPROG
        values = tl.load(winners.value + row + lanes, mask=lanes < NPROG, other=float("-inf"))
        _, first = tl.max(values, axis=0, return_indices=True)
        token = tl.load(winners.token + row + first).to(tl.int64)
        tl.store(next_token + b, token)
        kids = tl.load(
            tables.draws + b * tables.draw_b + node * tables.most + k,
            mask=k < tl.where(n < depth, tables.most, 0),
            other=-1,
        )
        hit = (kids >= 0) & (token_of(tables, b, kids) == token)
        at = tl.min(tl.where(hit, k, MOST_P2), axis=0)
        kid = tl.max(tl.where(k == at, kids, -1), axis=0)
        going = kid >= 0
        if going:
            tl.store(path + b * depth + n, kid)
            node = kid
            n += 1
    tl.store(count + b, n.to(tl.int64))
    d = tl.arange(0, DEPTH_P2)
    none = tl.full([DEPTH_P2], -1, tl.int64)
    tl.store(path + b * depth + d, none, mask=(d >= n) & (d < depth))


def verify(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    """Path, count and next token, equal to the reference's for the same keys; two launches."""
    laws = scores.laws
    batch, nodes, vocab = laws.logits_BRV.shape
    device = laws.logits_BRV.device
    depth = draft.tree.max_depth
    target, floor = side_of(laws)
    tables = tables_of(draft)
    keys, _, injected = keys_of(draws._replace(uniform_BNK=None), draws.target_race_BDV)
    block, warps = block_size(vocab, laws.logits_BRV.dtype, batch * nodes)
    block = race_size(block)
    count_p = programs(vocab, block)
    depths = draft.tree.depth_BN
    winners = Winners(
        torch.empty(batch * nodes * count_p, dtype=torch.float32, device=device),
        torch.empty(batch * nodes * count_p, dtype=torch.int32, device=device),
    )
    match_race[count_p, nodes, batch](
        target, keys, depths, depths.stride(0) if depths.shape[0] > 1 else 0, winners, vocab,
        nodes, count_p, BLOCK=block, HAS_FLOOR=floor, INJECTED=injected, num_warps=warps,
    )  # fmt: skip
    path = torch.empty(batch, depth, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    next_token = torch.empty(batch, dtype=torch.int64, device=device)
    match_walk[batch,](
        tables, winners, path, count, next_token, nodes, depth, count_p,
        NPROG_P2=next_power(count_p), MOST_P2=next_power(max(draft.draws_BNK.shape[2], 1)),
        DEPTH_P2=next_power(max(depth, 1)), num_warps=1,
    )  # fmt: skip
    return Verdict(path, count, next_token)
