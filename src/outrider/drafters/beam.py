"""Stochastic beam search (Kool et al. 2019) as a draft: RSD-S of Jeon et al. 2024.

`width` paths of `depth` tokens, drawn without replacement from the draft's law of whole paths, so
that the budget goes where the draft is sure. State per path: phi = log q, and psi = its perturbed
score, which may not exceed its parent's. Per level, with phi' = phi + log q(.|path), phi~ = phi' +
Gumbel and Z the largest phi~ of a row, the truncated score is

    psi' = -log( exp(-psi) - exp(-Z) + exp(-phi~) )
         = psi - max(0, v) - log1p(exp(-|v|)),   v = psi - phi~ + log(1 - exp(phi~ - Z))

in the second form, finite where the first is not. The `width` largest psi' over all (path, token)
go on; siblings stand in descending order, which is their draw order. A CPU reads exp(-psi) as
arrival times of exponential clocks and draws only the children that enter, the same law
(`outrider.ops.cpu.sample`). Rows at temperature 0 keep the paths of an ordinary beam search and
declare them placed.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from outrider import arguments, noise, ops
from outrider.drafters import recipes
from outrider.drafters.laws import law_at
from outrider.drafters.levels import Grown, begin, stack
from outrider.noise import Purpose
from outrider.ops.cpu.sample import Arrival, arrivals
from outrider.tree import numbers
from outrider.types import Context, Draft, Kind, LanguageModel, Shape, Tree


def truncated(parent_Bn: Tensor, perturbed_BnV: Tensor) -> Tensor:
    """psi' [B, n, V]: scores as if drawn under the condition that their maximum is the parent's.

    Of each row any part that holds the largest may be given.

    >>> truncated(torch.tensor([[0.0]]), torch.tensor([[[1.0, -900.0]]])).tolist()
    [[[0.0, -900.0]]]
    """
    top = perturbed_BnV.amax(-1, keepdim=True)
    gap = perturbed_BnV - top.clamp(min=-torch.finfo(top.dtype).max)
    log_rest = torch.where(gap > -math.log(2), (-torch.expm1(gap)).log(), torch.log1p(-gap.exp()))
    v = parent_Bn[..., None] - perturbed_BnV + log_rest
    score = parent_Bn[..., None] - v.clamp(min=0) - torch.log1p((-v.abs()).exp())
    score = torch.where(gap == 0, parent_Bn[..., None], score)
    alive = (perturbed_BnV > -torch.inf) & (parent_Bn[..., None] > -torch.inf)
    return torch.where(alive, score, -torch.inf)


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
        width = arguments.whole("width", self.width, recipes.CHAIN, least=2)
        depth = arguments.whole("depth", self.depth, recipes.PLAIN, least=1)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "max_nodes", 1 + self.width * self.depth)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape that it was made for."""
        return (Shape(self.max_nodes, self.max_nodes, self.depth, self.is_chain),)

    def _by_arrival(self, memory: Any, context: Context) -> Draft:
        """The same law on a CPU: children in the order in which exponential clocks ring."""
        width, nodes = self.width, self.max_nodes
        growth, logits = begin(self.model, memory, context, nodes)
        batch = logits.shape[0]
        keys = ops.streams(context.seed_B, growth.first_B, Purpose.DRAFT, nodes)
        token, parent = (torch.zeros(batch, nodes, dtype=torch.int64) for _ in range(2))
        token[:, :1] = growth.pending_B1
        parent[:, 0] = -1
        ancestors = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
        draws = torch.full((batch, nodes, width), -1)
        tokens_BN, parent_BN, ancestors_BNN = token.numpy(), parent.numpy(), ancestors.numpy()
        draws_BNK = draws.numpy()
        seen = torch.zeros(batch, nodes, growth.wide, dtype=torch.bool)
        seen_BNW, first = seen.numpy(), growth.first_B.tolist()
        for b in range(batch):
            seen_BNW[b, 0, : first[b] + 1] = True
        paths, laws = [[Arrival(0.0, 0, 0, 0.0)] for _ in range(batch)], []
        start, stop = 0, 1
        tree, kind = _topology(parent, ancestors, self.depth, width)  # filled while it grows
        alive: Tensor | None = None
        for depth in range(self.depth):
            if depth:
                logits = growth.feed(token[:, start:stop], depth, start, seen[:, start:stop])
            law = law_at(logits, context, [token[:, :stop]], tree, start, alive)
            laws.append(law)
            paths = arrivals(law, keys[:, start:stop], paths, width)
            for b, found in enumerate(paths):
                number = [0] * (stop - start)
                for slot, child in enumerate(found, start=stop):
                    above = start + child.parent
                    tokens_BN[b, slot] = child.token
                    parent_BN[b, slot] = above
                    ancestors_BNN[b, slot] |= ancestors_BNN[b, above]
                    seen_BNW[b, slot] = seen_BNW[b, above]
                    seen_BNW[b, slot, first[b] + slot] = True
                    draws_BNK[b, above, number[child.parent]] = slot
                    number[child.parent] += 1
                for slot in range(stop + len(found), stop + width):
                    ancestors_BNN[b, slot, 0] = True
                    seen_BNW[b, slot] = seen_BNW[b, 0]
            if context.sampling.shaping is not None:
                alive = torch.tensor([[k < len(found) for k in range(width)] for found in paths])
            start, stop = stop, stop + width
        row = torch.where(draws >= 0, numbers(nodes, draws.device)[None, :, None], -1)
        kinds = {Kind.WITHOUT}
        if context.sampling.greedy == "some":
            hot = torch.isinf(context.sampling.inverse_temperature_B)[:, None, None]
            kinds = {Kind.FIXED, Kind.WITHOUT}
            kind, row = torch.where(hot, int(Kind.FIXED), kind), torch.where(hot, -1, row)
        return Draft(token, tree, draws, kind, row, stack(laws), frozenset(kinds))

    def propose(self, memory: Any, context: Context, shape: Shape) -> Draft:
        """Grow the beam, one draft-model call per level; every row gets its own topology."""
        sampling, width = context.sampling, self.width
        greedy, nodes = sampling.greedy, self.max_nodes
        if greedy != "all" and ops.on_host(context.length_B.device):
            return self._by_arrival(memory, context)
        growth, logits = begin(self.model, memory, context, nodes)
        device, batch, vocab = logits.device, logits.shape[0], logits.shape[-1]
        keys = noise.stream(context.seed_B, growth.first_B, Purpose.DRAFT)
        keys = noise.split(keys, nodes)
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
            logits = law.logits_BRV
            scores = logits if greedy == "all" else ops.scaled(law)
            logs = scores.float().log_softmax(-1)
            # a path whose every token is forbidden has no law: nothing follows it
            logs = torch.where(logits.amax(-1, keepdim=True) > -torch.inf, logs, -torch.inf)
            plain = phi[..., None] + logs
            # psi' grows with phi~ below one parent, so each parent's best are enough
            few = min(width, vocab)
            if greedy == "all":
                merit, token = plain.topk(few, -1)
            else:
                race = noise.exponentials(keys[:, start:stop], vocab).log_()
                perturbed, token = (plain - race).topk(few, -1)
                merit = truncated(psi, perturbed)
                if greedy == "some":
                    best, place = plain.topk(few, -1)
                    merit = torch.where(hot, best, merit)
                    token = torch.where(hot, place, token)
            flat = merit.flatten(1)
            if flat.shape[1] < width:
                pad = (0, width - flat.shape[1])
                flat = torch.nn.functional.pad(flat, pad, value=-torch.inf)
            psi, best = flat.topk(width, -1)
            best = best.clamp(max=merit[0].numel() - 1)
            there = psi > -torch.inf
            above, token = best // few, token.flatten(1).gather(1, best)
            cell = above * vocab + token
            phi = torch.where(there, plain.flatten(1).gather(1, cell), -torch.inf)
            tokens.append(torch.where(there, token, 0))

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
            None if greedy == "all" else stack(laws),
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


def _made(
    model: LanguageModel, width: int = Beam.width, num_speculative_tokens: int = Beam.depth
) -> Beam:
    return Beam(model, width, num_speculative_tokens)


RECIPE = recipes.Recipe(_made, ("model",), ("num_speculative_tokens", "width"))
