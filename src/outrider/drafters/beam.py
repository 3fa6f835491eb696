"""Stochastic beam search (Kool et al. 2019) as a draft: RSD-S of Jeon et al. 2024.

`width` paths of `depth` tokens, drawn without replacement from the draft's law of whole paths, so
that the budget goes where the draft is sure. State per path: phi = log q, and psi = its perturbed
score, which may not exceed its parent's. Per level, with phi' = phi + log q(.|path), phi~ = phi' +
Gumbel and Z the largest phi~ of a row, the truncated score is

    psi' = -log( exp(-psi) - exp(-Z) + exp(-phi~) )

The `width` largest psi' over all (path, token) go on (`ops.survivors`); siblings stand in
descending order, which is their draw order. Rows at temperature 0 keep the paths of an ordinary
beam search and declare them placed.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from outrider import arguments, ops
from outrider.drafters import asked
from outrider.drafters.laws import law_at
from outrider.drafters.levels import Grown, begin
from outrider.noise import Purpose
from outrider.types import Context, Draft, Kind, LanguageModel, Tree


@dataclass(frozen=True)
class Beam(Grown):
    """`width` paths of `depth` tokens; width * depth drafted tokens in all."""

    model: LanguageModel
    width: int = 3
    depth: int = 4
    name: str = "beam"
    kinds: frozenset[Kind] = frozenset({Kind.FIXED, Kind.WITHOUT})
    is_chain: bool = False
    max_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        width = arguments.whole("width", self.width, asked.CHAIN, least=2)
        depth = arguments.whole("depth", self.depth, asked.PLAIN, least=1)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "max_nodes", 1 + self.width * self.depth)

    def propose(self, memory: Any, context: Context) -> Draft:
        """Grow the beam, one draft-model call per level; every row gets its own topology."""
        sampling, width = context.sampling, self.width
        greedy, nodes = sampling.greedy, self.max_nodes
        growth, logits = begin(self.model, memory, context, nodes)
        device, batch = logits.device, logits.shape[0]
        keys = ops.streams(context.seed_B, growth.first_B, Purpose.DRAFT, nodes)
        hot = torch.isinf(sampling.inverse_temperature_B)[:, None, None]

        slot = torch.arange(nodes, device=device)
        parent = torch.full((batch, nodes), -1, dtype=torch.int64, device=device)
        ancestors = (slot[:, None] == slot).expand(batch, -1, -1)
        draws = torch.full((batch, nodes, width), -1, dtype=torch.int64, device=device)
        phi = torch.zeros(batch, 1, dtype=torch.float32, device=device)
        psi, tokens, laws = phi, [growth.pending_B1], []
        start, stop = 0, 1
        tree, kind = _topology(parent, ancestors, self.depth, width)
        alive: Tensor | None = None
        for depth in range(self.depth):
            if depth:
                logits = growth.feed(tokens[-1], depth, start, growth.sees(start, stop, ancestors))
            law = law_at(logits, context, tokens, tree, start, alive)
            laws.append(law)
            above, token, phi, psi = ops.survivors(law, keys[:, start:stop], phi, psi, width)
            there = psi > -torch.inf
            tokens.append(token)

            start, stop, old = stop, stop + width, start
            over = torch.where(there, old + above, 0)
            parent = torch.cat([parent[:, :start], over, parent[:, stop:]], 1)
            seen = ancestors.gather(1, over[..., None].expand(-1, -1, nodes))
            seen = seen | (slot[start:stop, None] == slot)
            ancestors = torch.cat([ancestors[:, :start], seen, ancestors[:, stop:]], 1)
            same = (over[:, :, None] == over[:, None, :]) & there[:, None, :]
            rank = torch.where(there, same.tril(-1).sum(-1), width - 1)
            cell = over * width + rank
            kid = torch.where(there, slot[start:stop], -1)
            # an absent child writes -1 over -1, or nothing over a present one
            draws = draws.flatten(1).scatter_reduce(1, cell, kid, "amax").view_as(draws)
            tree, kind = _topology(parent, ancestors, self.depth, width)
            if sampling.shaping is not None:
                alive = there

        row = torch.where(draws >= 0, slot[None, :, None], -1)
        kinds = {Kind.WITHOUT}
        if greedy == "all":
            kinds, kind, row = {Kind.FIXED}, torch.zeros_like(kind), torch.full_like(row, -1)
        elif greedy == "some":
            kinds = {Kind.FIXED, Kind.WITHOUT}
            kind, row = torch.where(hot, int(Kind.FIXED), kind), torch.where(hot, -1, row)
        return Draft(
            torch.cat(tokens, 1),
            tree,
            draws,
            kind,
            row,
            None if greedy == "all" else ops.stack(laws),
            frozenset(kinds),
        )


def _topology(
    parent_BN: Tensor, ancestors_BNN: Tensor, depth: int, width: int
) -> tuple[Tree, Tensor]:
    """The tree of a beam, and the kinds of its draws."""
    level, kind, spans = _constants(depth, width, parent_BN.device)
    level = level.expand(parent_BN.shape[0], -1)
    return Tree(parent_BN, level, ancestors_BNN, depth, width, spans, is_chain=False), kind


@lru_cache(maxsize=64)
def _constants(
    depth: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Depth of each node, kind of each draw and the bounds of the levels."""
    spans = (0, 1, *(1 + width * (d + 1) for d in range(depth)))
    levels = [d for d, (a, b) in enumerate(pairwise(spans)) for _ in range(a, b)]
    kind = torch.full((1, len(levels), width), int(Kind.WITHOUT), device=device)
    return torch.tensor(levels, device=device), kind, spans
