"""Independent paths from one draft model, merged where they agree (SpecTr; SpecInfer's trees).

`count` chains of `depth` tokens are drawn independently. Paths with the same prefix share a node,
and the node keeps one draw for each of them, in path order, repeats included: rules for i.i.d.
drafts need their number. Rows at temperature 0 place the top tokens below the root and follow each
with its argmax.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.drafters.laws import law_at
from outrider.drafters.levels import Grown, begin, stack
from outrider.errors import ConfigurationError
from outrider.noise import Purpose
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
        spare = nodes * count  # the cell that absent draws are written to
        draws = torch.full((batch, spare + 1), -1, dtype=torch.int64, device=device)
        where = torch.zeros(batch, count, dtype=torch.int64, device=device)  # node of each path
        going = torch.ones(batch, count, dtype=torch.bool, device=device)
        level_BN, levels = _levels(self.depth, count, batch, device)
        tokens, laws = [growth.pending_B1], []
        start, stop = 0, 1
        for depth in range(self.depth):
            if depth:
                logits = growth.feed(tokens[-1], depth, start, growth.sees(start, stop, ancestors))
            tree = Tree(parent, level_BN, ancestors, self.depth, count, levels, is_chain=False)
            # of merged paths only the first one's node is alive
            alive = going & (where - start == slot[:count]) if depth else None
            law = law_at(logits, context, tokens, tree, start, alive)
            laws.append(law)
            local = (where - start)[..., None].expand(-1, -1, vocab)
            if greedy != "all":
                race = noise.exponentials(keys[:, stop : stop + count], vocab).log_()
                found = _best(ops.scaled(law).gather(1, local) - race)
            if greedy != "none":
                best = _best(law.logits_BRV.gather(1, local))
                if not depth:
                    best = _side_by_side(law.logits_BRV[:, 0], best)
                if greedy == "all":
                    found = best
                else:
                    found = _chosen(hot, best, found)
            token = found.indices
            going = going & (found.values > -torch.inf)  # a path ends where no token is possible

            old, start, stop = where, stop, stop + count
            same = (old[:, :, None] == old[:, None, :]) & (token[:, :, None] == token[:, None, :])
            same = same & going[:, None, :]
            # the first path of the same prefix; a path that has ended keeps a node of its own
            first = torch.where(going, same.to(torch.int8).argmax(-1), slot[:count])
            where = start + first
            tokens.append(token)
            over = torch.where(going, old, 0)
            parent = torch.cat([parent[:, :start], over, parent[:, stop:]], 1)
            seen = ancestors.gather(1, over[..., None].expand(-1, -1, nodes))
            seen = seen | (slot[start:stop, None] == slot)
            ancestors = torch.cat([ancestors[:, :start], seen, ancestors[:, stop:]], 1)
            rank = ((old[:, :, None] == old[:, None, :]) & going[:, None, :]).tril(-1).sum(-1)
            cell = torch.where(going, old * count + rank, spare)
            draws = draws.scatter(1, cell, where)

        tree = Tree(parent, level_BN, ancestors, self.depth, count, levels, is_chain=False)
        table = draws[:, :spare].view(batch, nodes, count)
        return _declared(torch.cat(tokens, 1), tree, table, greedy, hot, laws)


class _Best(NamedTuple):
    """The token of each path [B, count] and how good it was: -inf where there is none."""

    values: Tensor
    indices: Tensor


def _best(merit_BcV: Tensor) -> _Best:
    return _Best(*merit_BcV.max(-1))


def _side_by_side(logits_BV: Tensor, best: _Best) -> _Best:
    """Greedy paths part at the root: path i starts with the i-th best token, if there is one."""
    count = best.indices.shape[1]
    top = logits_BV.topk(min(count, logits_BV.shape[1]), -1)
    return _Best(
        torch.cat([top.values, best.values], 1)[:, :count],
        torch.cat([top.indices, best.indices], 1)[:, :count],
    )


def _chosen(hot_B1: Tensor, best: _Best, drawn: _Best) -> _Best:
    """The best token in greedy rows, the drawn one in others."""
    return _Best(
        torch.where(hot_B1, best.values, drawn.values),
        torch.where(hot_B1, best.indices, drawn.indices),
    )


@lru_cache(maxsize=64)
def _levels(
    depth: int, count: int, batch: int, device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """Depth of each node [B, N] and the bounds of the levels."""
    levels = (0, 1, *(1 + count * (d + 1) for d in range(depth)))
    level = [d for d, (a, b) in enumerate(pairwise(levels)) for _ in range(a, b)]
    return torch.tensor(level, device=device).expand(batch, -1), levels


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
