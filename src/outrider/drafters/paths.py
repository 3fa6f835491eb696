"""Independent paths from one draft model, merged where they agree (SpecTr; SpecInfer's trees).

`count` chains of `depth` tokens are drawn independently. Paths with the same prefix share a node,
and the node keeps one draw for each of them, in path order, repeats included: rules for i.i.d.
drafts need their number. Rows at temperature 0 place the top tokens below the root and follow each
with its argmax.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.drafters.levels import Grown, begin, stack
from outrider.errors import ConfigurationError
from outrider.noise import Purpose
from outrider.sampling import warp
from outrider.types import Context, Draft, Kind, LanguageModel, Tree


@dataclass(frozen=True)
class Paths(Grown):
    """`count` independent chains; at most count * depth drafted tokens."""

    model: LanguageModel
    count: int = 3
    depth: int = 4
    name: str = "paths"
    kinds: frozenset[Kind] = frozenset({Kind.FIXED, Kind.WITH})
    is_chain: bool = False
    max_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.count < 2 or self.depth < 1:
            raise ConfigurationError(
                f"independent paths need count >= 2 and depth >= 1; got {self.count} and "
                f"{self.depth}; use drafter='draft_model' for a chain"
            )
        object.__setattr__(self, "max_nodes", 1 + self.count * self.depth)

    def propose(self, memory: Any, context: Context) -> Draft:
        """Draw all paths level by level, one draft-model call each."""
        sampling, count = context.sampling, self.count
        greedy, nodes = sampling.greedy, self.max_nodes
        growth, logits = begin(self.model, memory, context, nodes)
        device, batch, vocab = logits.device, logits.shape[0], logits.shape[-1]
        keys = noise.stream(context.seed_B, growth.first_B, Purpose.DRAFT)
        keys = noise.split(keys, nodes)
        hot = torch.isinf(sampling.inverse_temperature_B)[:, None]

        slot = torch.arange(nodes, device=device)
        parent = torch.full((batch, nodes), -1, dtype=torch.int64, device=device)
        ancestors = (slot[:, None] == slot).expand(batch, -1, -1)
        draws = torch.full((batch, nodes, count), -1, dtype=torch.int64, device=device)
        where = torch.zeros(batch, count, dtype=torch.int64, device=device)  # node of each path
        tokens, laws = [growth.pending_B1], []
        start, stop = 0, 1
        for depth in range(self.depth):
            if depth:
                logits = growth.feed(tokens[-1], depth, start, growth.sees(start, stop, ancestors))
            law = warp(logits, sampling)
            laws.append(law)
            local = (where - start)[..., None].expand(-1, -1, vocab)
            if greedy != "all":
                race = noise.exponentials(keys[:, stop : stop + count], vocab).log_()
                token = (ops.scaled(law).gather(1, local) - race).argmax(-1)
            if greedy != "none":
                best = logits.gather(1, local).argmax(-1)
                if not depth:
                    top = logits[:, 0].topk(min(count, vocab), -1).indices
                    best = torch.cat([top, best], 1)[:, :count]
                token = best if greedy == "all" else torch.where(hot, best, token)

            old, start, stop = where, stop, stop + count
            same = (old[:, :, None] == old[:, None, :]) & (token[:, :, None] == token[:, None, :])
            where = start + same.to(torch.int8).argmax(-1)  # the first path of the same prefix
            tokens.append(token)
            parent = torch.cat([parent[:, :start], old, parent[:, stop:]], 1)
            seen = ancestors.gather(1, old[..., None].expand(-1, -1, nodes))
            seen = seen | (slot[start:stop, None] == slot)
            ancestors = torch.cat([ancestors[:, :start], seen, ancestors[:, stop:]], 1)
            rank = (old[:, :, None] == old[:, None, :]).tril(-1).sum(-1)
            draws = draws.flatten(1).scatter(1, old * count + rank, where).view_as(draws)

        levels = (0, 1, *(1 + count * (d + 1) for d in range(self.depth)))
        level = torch.cat(
            [torch.full((1 if d == 0 else count,), d, device=device) for d in range(self.depth + 1)]
        )
        tree = Tree(
            parent, level.expand(batch, -1), ancestors, self.depth, count, levels, is_chain=False
        )
        return _declared(torch.cat(tokens, 1), tree, draws, greedy, hot, laws)


def _declared(
    tokens: Tensor, tree: Tree, draws: Tensor, greedy: str, hot: Tensor, laws: list[Any]
) -> Draft:
    """Independent draws where the row is sampled, placed children where it is greedy."""
    nodes = draws.shape[1]
    kind = torch.full((1, 1, 1), int(Kind.WITH), device=draws.device).expand(1, *draws.shape[1:])
    node = torch.arange(nodes, device=draws.device)[None, :, None]
    row = torch.where(draws >= 0, node, -1)
    kinds = {Kind.WITH}
    if greedy == "all":
        kinds, kind, row = {Kind.FIXED}, torch.zeros_like(kind), torch.full_like(row, -1)
    elif greedy == "some":
        kinds = {Kind.FIXED, Kind.WITH}
        kind = torch.where(hot[..., None], int(Kind.FIXED), kind)
        row = torch.where(hot[..., None], -1, row)
    given = None if greedy == "all" else stack(laws)
    return Draft(tokens, tree, draws, kind, row, given, frozenset(kinds))
