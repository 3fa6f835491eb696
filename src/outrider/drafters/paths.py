"""Independent paths of one or several draft models, merged where they agree (SpecTr; SpecInfer).

`count` chains of `depth` tokens are drawn independently. Paths with the same prefix share a node,
and the node keeps one draw for each of them, in path order, repeats included: rules for i.i.d.
drafts need their number. A CPU draws by inverse transform instead of a race, the same law. Rows at
temperature 0 place the top tokens below the root and follow each with its argmax.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import arguments, noise, ops
from outrider.drafters import asked
from outrider.drafters.laws import law_at
from outrider.drafters.levels import Grown, begin, stack
from outrider.drafters.memory import Several
from outrider.errors import ConfigurationError
from outrider.noise import Purpose
from outrider.prefill import ingest
from outrider.types import Context, Draft, Kind, LanguageModel, Laws, Scores, Shape, Tree, Verdict


@dataclass(frozen=True)
class Paths(Grown):
    """`count` independent chains; at most count * depth drafted tokens.

    With `more` draft models the paths are dealt out in equal blocks, the first block to `model`
    (SpecInfer's several small models). Every model runs the whole tree, so that each knows the
    prefix that is kept. Draws of one model at a node share a law row and stand together.
    """

    model: LanguageModel
    count: int = 3
    depth: int = 4
    more: tuple[LanguageModel, ...] = ()
    name: str = "paths"
    kinds: frozenset[Kind] = frozenset({Kind.FIXED, Kind.WITH})
    is_chain: bool = False
    max_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        count = arguments.whole("count", self.count, asked.CHAIN, least=2)
        depth = arguments.whole("depth", self.depth, asked.PLAIN, least=1)
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "depth", depth)
        if self.count < len(self.models):
            raise ConfigurationError(
                f"every draft model needs a path; got {self.count} paths for {len(self.models)} "
                "models; raise the number of paths"
            )
        object.__setattr__(self, "max_nodes", 1 + self.count * self.depth)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape that it was made for."""
        return (Shape(self.max_nodes, self.max_nodes, self.depth, self.is_chain),)

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        """All draft models."""
        return (self.model, *self.more)

    def open(self, context: Context, capacity: int) -> Several:
        """A cache for every model."""
        caches = []
        for model in self.models:
            cache = model.open(context.tokens_BL.shape[0], capacity)
            ingest(model, cache, context.tokens_BL, context.bound - 1)
            caches.append(cache)
        return Several(tuple(caches))

    def propose(self, memory: Several, context: Context, shape: Shape) -> Draft:
        """Draw all paths level by level, one call of each draft model per level."""
        sampling, count = context.sampling, self.count
        greedy, nodes = sampling.greedy, self.max_nodes
        begun = [
            begin(model, cache, context, nodes)
            for model, cache in zip(self.models, memory.stores, strict=True)
        ]
        growths, logits = [g for g, _ in begun], [z for _, z in begun]
        blocks = _blocks(count, len(growths))
        first_B, pending_B1 = growths[0].first_B, growths[0].pending_B1
        device, batch, vocab = logits[0].device, logits[0].shape[0], logits[0].shape[-1]
        keys = noise.stream(context.seed_B, first_B, Purpose.DRAFT)
        keys = noise.split(keys, nodes)
        hot = torch.isinf(sampling.inverse_temperature_B)[:, None]

        slot = torch.arange(nodes, device=device)
        parent = torch.full((batch, nodes), -1, dtype=torch.int64, device=device)
        ancestors = (slot[:, None] == slot).expand(batch, -1, -1)
        spare = nodes * count  # the cell that absent draws are written to
        draws = torch.full((batch, spare + 1), -1, dtype=torch.int64, device=device)
        rows = draws
        inner = 1 + count * (self.depth - 1)  # law rows of one model
        model_c = torch.tensor([m for m, (a, b) in enumerate(blocks) for _ in range(a, b)])
        offset_c = (model_c * inner).to(device)
        where = torch.zeros(batch, count, dtype=torch.int64, device=device)  # node of each path
        going = torch.ones(batch, count, dtype=torch.bool, device=device)
        level_BN, levels = _levels(self.depth, count, batch, device)
        tokens: list[Tensor] = [pending_B1]
        laws: list[list[Laws]] = [[] for _ in growths]
        start, stop = 0, 1
        for depth in range(self.depth):
            tree = Tree(parent, level_BN, ancestors, self.depth, count, levels, is_chain=False)
            # of merged paths only the first one's node is alive
            alive = going & (where - start == slot[:count]) if depth else None
            if depth:
                seen = growths[0].sees(start, stop, ancestors)
                logits = [growth.feed(tokens[-1], depth, start, seen) for growth in growths]
            found = []
            for model, (a, b) in enumerate(blocks):
                law = law_at(logits[model], context, tokens, tree, start, alive)
                laws[model].append(law)
                here = where[:, a:b] - start
                local = here[..., None].expand(-1, -1, vocab)
                if greedy != "all":
                    drawn = _drawn(law, here, keys[:, stop + a : stop + b])
                if greedy != "none":
                    best = _best(law.logits_BRV.gather(1, local))
                    if not depth:
                        best = _side_by_side(law.logits_BRV[:, 0], best)
                    drawn = best if greedy == "all" else _chosen(hot, best, drawn)
                found.append(drawn)
            token = torch.cat([f.indices for f in found], 1)
            # a path ends where no token is possible
            going = going & (torch.cat([f.values for f in found], 1) > -torch.inf)

            old, start, stop = where, stop, stop + count
            side = old[:, :, None] == old[:, None, :]
            same = side & (token[:, :, None] == token[:, None, :]) & going[:, None, :]
            # the first path of the same prefix; a path that has ended keeps a node of its own
            first = torch.where(going, same.to(torch.int8).argmax(-1), slot[:count])
            where = start + first
            tokens.append(token)
            over = torch.where(going, old, 0)
            parent = torch.cat([parent[:, :start], over, parent[:, stop:]], 1)
            seen = ancestors.gather(1, over[..., None].expand(-1, -1, nodes))
            seen = seen | (slot[start:stop, None] == slot)
            ancestors = torch.cat([ancestors[:, :start], seen, ancestors[:, stop:]], 1)
            listed = going & ~(hot & (first != slot[:count]))  # a placed child is placed once
            rank = (side & listed[:, None, :]).tril(-1).sum(-1)
            cell = torch.where(listed, old * count + rank, spare)
            draws = draws.scatter(1, cell, where)
            rows = rows.scatter(1, cell, offset_c + old)

        tree = Tree(parent, level_BN, ancestors, self.depth, count, levels, is_chain=False)
        draws, rows = (t[:, :spare].view(batch, nodes, count) for t in (draws, rows))
        given = None if greedy == "all" else stack([stack(levels) for levels in laws])
        return _declared(torch.cat(tokens, 1), tree, draws, rows, greedy, hot, given)

    def commit(
        self,
        memory: Several,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        scores: Scores,
    ) -> None:
        """Keep the accepted path's entries in every cache."""
        for model, cache in zip(self.models, memory.stores, strict=True):
            model.keep(cache, context.length_B - 1, verdict.path_BD)


def _blocks(count: int, models: int) -> list[tuple[int, int]]:
    """First and last path of each model, as even as can be.

    >>> _blocks(5, 2)
    [(0, 3), (3, 5)]
    """
    ends = [-(-count * m // models) for m in range(models + 1)]
    return list(pairwise(ends))


class _Best(NamedTuple):
    """The token of each path [B, count] and how good it was: -inf where there is none."""

    values: Tensor
    indices: Tensor


def _best(merit_BcV: Tensor) -> _Best:
    return _Best(*merit_BcV.max(-1))


def _drawn(law: Laws, here_Bc: Tensor, keys_Bc: Tensor) -> _Best:
    """A token from law row `here_Bc` for each path, as the CPU code draws it or by a race."""
    at_once = ops.independent(law, here_Bc, keys_Bc)
    if at_once is not None:
        index, some = at_once
        return _Best(torch.where(some, 0.0, -torch.inf), index)
    scaled = ops.scaled(law)
    vocab = scaled.shape[-1]
    local = here_Bc[..., None].expand(-1, -1, vocab)
    return _best(scaled.gather(1, local) - noise.exponentials(keys_Bc, vocab).log_())


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
    tokens: Tensor,
    tree: Tree,
    draws: Tensor,
    row: Tensor,
    greedy: str,
    hot_B1: Tensor,
    given: Laws | None,
) -> Draft:
    """Independent draws where the row is sampled, placed children where it is greedy."""
    kind = torch.full((1, 1, 1), int(Kind.WITH), device=draws.device).expand(1, *draws.shape[1:])
    kinds = {Kind.WITH}
    hot = hot_B1[..., None]
    if greedy == "all":
        kinds, kind, row = {Kind.FIXED}, torch.zeros_like(kind), torch.full_like(row, -1)
    elif greedy == "some":
        kinds = {Kind.FIXED, Kind.WITH}
        kind = torch.where(hot, int(Kind.FIXED), kind)
        row = torch.where(hot, -1, row)
    return Draft(tokens, tree, draws, kind, row, given, frozenset(kinds))
