"""Trees of a shape chosen beforehand, the same for every row; a subclass fills each level.

The shape is a branching vector, or any parents in BFS order (`shapes.optimal`). Because it is fixed
before a token is drawn, no draw can influence which draws are judged.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider import ops
from outrider.drafters import on_host, recipes
from outrider.drafters.laws import law_at
from outrider.drafters.levels import Grown, begin, stack
from outrider.drafters.shape_tables import Level, Tables, tables
from outrider.errors import ConfigurationError
from outrider.noise import Purpose
from outrider.tree import branching, from_parents
from outrider.types import Context, Draft, Kind, LanguageModel, Laws, Shape


@dataclass(frozen=True)
class Shaped(Grown):
    """A tree of `counts[l]` children per node of level l, or of the shape given by `parents`."""

    model: LanguageModel
    counts: tuple[int, ...] = (3, 2, 2, 1)
    parents: tuple[int, ...] | None = None
    kinds: frozenset[Kind] = field(init=False)
    is_chain: bool = field(init=False)
    max_nodes: int = field(init=False)

    drawn: ClassVar[frozenset[Kind]] = frozenset({Kind.FIXED})  #: kinds at a temperature above 0
    name: ClassVar[str]

    def __post_init__(self) -> None:
        if self.parents is None:
            object.__setattr__(self, "counts", recipes.counts("counts", self.counts))
            parents = tuple(branching(self.counts).parent_BN[0].tolist())
            object.__setattr__(self, "parents", parents)
        assert self.parents is not None
        tree = from_parents(self.parents)
        if tree.max_depth == 0:
            raise ConfigurationError(
                f"drafter {self.name!r} needs at least one drafted token; got no branching; "
                "use drafter='root' for plain decoding"
            )
        object.__setattr__(self, "kinds", self.drawn | {Kind.FIXED})
        object.__setattr__(self, "is_chain", tree.is_chain)
        object.__setattr__(self, "max_nodes", tree.nodes)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape that it was made for."""
        return (
            Shape(
                self.max_nodes,
                self.max_nodes,
                from_parents(self.parents or (-1,)).max_depth,
                self.is_chain,
            ),
        )

    def fill(self, law: Laws, level: Level, keys_Bn: Tensor) -> tuple[Tensor, Tensor, Laws]:
        """Tokens and presence [B, n, most] of the children, and the law declared for drawn ones."""
        raise NotImplementedError

    def kind_of(self, table: Tables) -> Tensor:
        """Kind of each draw [1, N, K] at a temperature above 0."""
        return torch.full_like(table.draws_BNK, int(next(iter(self.drawn))))

    def propose(self, memory: Any, context: Context, shape: Shape) -> Draft:
        """Fill the shape level by level, one draft-model call each."""
        sampling, device = context.sampling, context.length_B.device
        assert self.parents is not None
        if on_host.fits(context) and self.drawn != {Kind.FIXED}:
            hub = Kind.FIXED in self.drawn
            return on_host.grow(self.model, memory, context, self.parents, hub)
        table = tables(self.parents, device)
        tree, greedy = table.tree, sampling.greedy
        growth, logits = begin(self.model, memory, context, tree.nodes)
        keys = ops.streams(context.seed_B, growth.first_B, Purpose.DRAFT, tree.levels[-2])
        hot = torch.zeros(())
        if greedy == "some":
            hot = torch.isinf(sampling.inverse_temperature_B)[:, None, None]
        seen_BNW = growth.sees(0, tree.nodes, None if tree.is_chain else tree.ancestors_BNN)
        tokens, laws, present = [growth.pending_B1], [], []
        alive: Tensor | None = None
        for depth, level in enumerate(table.levels):
            if depth:
                seen = seen_BNW[:, level.start : level.stop]
                logits = growth.feed(tokens[-1], depth, level.start, seen)
            law = law_at(logits, context, tokens, tree, level.start, alive)
            best = None
            if greedy != "none":
                best = law.logits_BRV.topk(min(level.most, logits.shape[-1]), -1)
            if greedy == "all":
                assert best is not None
                chosen, there = best.indices, best.values > -torch.inf
            else:
                chosen, there, law = self.fill(law, level, keys[:, level.start : level.stop])
            chosen, there = _wide(chosen, level.most), _wide(there, level.most)
            if greedy == "some":
                assert best is not None
                chosen = torch.where(hot, _wide(best.indices, level.most), chosen)
                there = torch.where(hot, _wide(best.values > -torch.inf, level.most), there)
            if alive is not None:  # a child of an absent node is absent, too
                there = there & alive[..., None]
            laws.append(law)
            present.append(_wide(there, tree.max_draws))
            tokens.append(level.spread(chosen))
            alive = level.spread(there)
        leaves = tree.nodes - tree.levels[-2]
        there_BNK = torch.cat(
            [*present, torch.zeros_like(present[0][:, :1]).expand(-1, leaves, -1)], 1
        )
        draws = torch.where(there_BNK, table.draws_BNK, -1)
        kind = self.kind_of(table)
        placed = greedy == "all" or self.drawn == {Kind.FIXED}
        if placed:
            kind = torch.full_like(kind, int(Kind.FIXED))
        elif greedy == "some":
            kind = torch.where(hot, int(Kind.FIXED), kind)
        node = torch.arange(tree.nodes, device=device)[None, :, None]
        row = torch.where((draws >= 0) & (kind != Kind.FIXED), node, -1)
        return Draft(
            torch.cat(tokens, 1),
            tree,
            draws,
            kind,
            row,
            None if placed else stack(laws),
            frozenset({Kind.FIXED})
            if placed
            else self.drawn | ({Kind.FIXED} if greedy == "some" else set()),
        )


def _wide(there: Tensor, most: int) -> Tensor:
    lacking = most - there.shape[2]
    return torch.nn.functional.pad(there, (0, lacking), value=0) if lacking else there
