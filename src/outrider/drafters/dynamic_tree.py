"""Dynamic trees (EAGLE-2, Li et al. 2024): the draft's confidence decides which nodes there are.

Every row gets its own topology. On each of `depth` levels the `top_k` nodes with the largest
cumulative probability are expanded, `top_k` children each. Of all these candidates the
`total_tokens` best by cumulative probability become the draft. A child is never more probable than
its parent and stands behind it where they are equal, so the best nodes are a connected subtree.

Which nodes are kept depends on their tokens. No rule for *drawn* children allows that
(docs/rules.md, "What a draft must say about itself", 3); here it is exact, for one reason per kind:

* Placed (the default): the tokens are a function of the prefix and the draft's weights. Nothing is
  drawn, so nothing about a draw is told by what is kept. Children are declared as point masses.
* Coupled: the tokens and the selection are functions of the prefix and the shared noise. The
  emitted token is the target's own, argmax(z / T + noise), whatever was drafted (`match`): a draft
  decides how many tokens a step emits and never which.

Cumulative probabilities are the draft's under the row's temperature and filters (at temperature 0:
those of temperature 1). A coupled draft has seen the noise and knows more than that law: its
children are the best tokens under the noise, and softmax(1.5 (z / T + noise)) says how sure they
are. The factor is measured (docs/results/2026-11-21.md) and matters for speed alone.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider import arguments, ops
from outrider.drafters import recipes, tree_drafting
from outrider.drafters.tree_drafting import OneModel
from outrider.drafters.tree_drafting.builder import Children, declare, pending, selected
from outrider.drafters.tree_drafting.growth import DrawKeys, ProposalSource
from outrider.drafters.tree_drafting.shapes import TreeLevel, ragged
from outrider.errors import ConfigurationError
from outrider.tree import numbers
from outrider.types import Cache, Context, Draft, DraftShape, DrawKind, LanguageModel, Laws

SURENESS = 1.5  #: under shared noise target and draft agree more often than softmax tells


def candidates(depth: int, few: int) -> int:
    """How many nodes there are to choose from.

    >>> candidates(2, 3)
    12
    """
    return few + (depth - 1) * few**2


def fits(
    total: int, depth: int, few: int, vocab: int, names: tuple[str, str] = ("depth", "top_k")
) -> None:
    """Refuse sizes that no dynamic tree has; `names` are the caller's for depth and width."""
    deep, wide = names
    given = f"total_tokens={total}, {deep}={depth}, {wide}={few}"
    arguments.whole("total_tokens", total, recipes.PLAIN, least=1)
    arguments.whole(deep, depth, recipes.PLAIN, least=1)
    arguments.whole(wide, few, recipes.CHAIN, least=2)
    if few > vocab:
        raise ConfigurationError(
            f"no node has more children than the draft has tokens; got {given} for a "
            f"vocabulary of {vocab}; lower {wide}"
        )
    most = candidates(depth, few)
    if not depth <= total <= most:
        raise ConfigurationError(
            f"total_tokens must lie between {deep}, {depth}, and the {most} candidates that "
            f"{wide} and {deep} give; got {given}; change one of them"
        )


def sized(total: int | None, depth: int, few: int, vocab: int, usual: int) -> int:
    """`total_tokens` as it was asked for by name, or the usual number if the tree can have it.

    >>> sized(None, 1, 3, 100, usual=16)
    3
    """
    if total is None:
        total = max(depth, min(usual, candidates(depth, few)))
    fits(total, depth, few, vocab, ("num_speculative_tokens", "width"))
    return total


@lru_cache(maxsize=64)
def of_candidates(total: int, depth: int, few: int) -> tuple[DraftShape, ...]:
    """The shapes of the `total` best nodes, one for each depth.

    >>> [(shape.key, shape.max_nodes) for shape in of_candidates(9, 3, 2)]
    [(3, 10), (2, 7), (1, 3)]
    """
    sizes = ((d, 1 + min(total, candidates(d, few))) for d in range(depth, 0, -1))
    return tuple(DraftShape(d, nodes, d, is_chain=False) for d, nodes in sizes)


def grow(
    source: ProposalSource,
    context: Context,
    shape: DraftShape,
    few: int,
    shared_noise: bool = False,
) -> Draft:
    """The best nodes of a tree of this shape, `few` of them expanded on each level: one call each.

    `places_BN` says where the source's cache holds them.
    """
    layout = ragged(few, shape.max_depth, context.length_B.device, leaves=False)
    nodes = CandidatePool(few, context, shared_noise)
    tree_drafting.grow([source], context, layout, nodes)
    tokens, parent, depth, places = nodes.best(shape.max_nodes - 1)
    tree, draws = selected(parent, depth, shape.max_depth, few)
    tokens = torch.cat([pending(context), tokens], 1)
    kinds = draw_kinds(shared_noise)
    return declare(tokens, tree, draws, kinds, context.sampling, places_BN=places)


def draw_kinds(shared_noise: bool) -> tuple[DrawKind, ...]:
    """Every child is placed, or every child is coupled."""
    return (DrawKind.COUPLED if shared_noise else DrawKind.FIXED,)


class _Candidates(NamedTuple):
    """What one level adds to choose from: siblings side by side and best first."""

    score_Bm: Tensor  #: log of the cumulative probability, -inf: no such token
    token_Bm: Tensor
    parent_Bm: Tensor  #: number of the parent among all candidates, counted from 1; 0: the root
    place_Bm: Tensor  #: number among the nodes that were run, -1: it was not


class CandidatePool:
    """All candidates of one proposal, and the nodes that are expanded next: a `Policy`.

    Cumulative probabilities are the draft's under the row's temperature and filters (at temperature
    0: those of temperature 1). Children are placed, or by `shared_noise`: then they are the best
    tokens under the target's noise.
    """

    draw_kinds = (DrawKind.FIXED,)

    def __init__(self, few: int, context: Context, shared_noise: bool = False) -> None:
        self.few, self.shared_noise = few, shared_noise
        # of the nodes being expanded
        self.score_Bn = torch.zeros_like(context.length_B, dtype=torch.float32)[:, None]
        self.number_Bn = torch.zeros_like(self.score_Bn, dtype=torch.int64)
        self.levels: list[_Candidates] = []

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """The best tokens of every node are candidates, the best candidates are expanded."""
        few, base = self.few, 1 + sum(part.score_Bm.shape[1] for part in self.levels)
        best = self._log_shares(law, level, keys).topk(few, -1)
        worth = (self.score_Bn[..., None] + best.values).flatten(1)
        token = best.indices.flatten(1)
        above = self.number_Bn[..., None].expand(-1, -1, few).flatten(1)
        size = level.end - level.stop  # 0 at the last level
        order = worth.argsort(dim=-1, descending=True, stable=True)[:, :size]
        ahead = numbers(level.end, token.device)[level.stop :].expand_as(order)
        place = torch.full_like(token, -1).scatter(1, order, ahead)
        self.levels.append(_Candidates(worth, token, above, place))
        self.score_Bn, self.number_Bn = worth.gather(1, order), base + order
        there = self.score_Bn > -torch.inf
        tokens = torch.where(there, token.gather(1, order), 0)
        return Children(tokens, there, None, order // few)

    def _log_shares(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Tensor:
        """How probable each token is to be the next one, as far as the draft can tell: [B, n, V].

        At most 0; -inf where a token is impossible.
        """
        if self.shared_noise:
            inverse = law.inverse_temperature_B
            sure = torch.where(torch.isinf(inverse), 1.0, SURENESS)[:, None, None]
            merit = sure * ops.merit(law, keys.shared(level.depth)).float()
        else:
            merit = ops.scaled(law).float()
        # a node at which nothing is possible has no shares: NaN
        return merit.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0)

    def best(self, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B, total], and parents, depths and places [B, N] of the best candidates.

        Nodes stand in the order of the candidates: by depth, parents first. Absent ones stand last.
        """
        columns = zip(*self.levels, strict=True)
        score, token, above, place = (torch.cat(column, 1) for column in columns)
        (batch, many), device = score.shape, score.device
        # a stable order, because a parent may be as probable as its child
        best = score.argsort(dim=-1, descending=True, stable=True)[:, :total]
        there = score.gather(1, best) > -torch.inf
        best = torch.where(there, best, many).sort(-1).values
        there = best < many
        best = best.clamp(max=many - 1)
        number = numbers(total + 1, device)[1:].expand(batch, -1)
        new = torch.zeros(batch, many + 2, dtype=torch.int64, device=device)
        new = new.scatter(1, torch.where(there, best + 1, many + 1), number)
        parent = torch.where(there, new.gather(1, above.gather(1, best)), -1)
        depth = _depths(len(self.levels), self.few, device)[best]
        pad = torch.nn.functional.pad
        return (
            torch.where(there, token.gather(1, best), 0),
            pad(parent, (1, 0), value=-1),
            pad(torch.where(there, depth, 1), (1, 0)),
            pad(torch.where(there, place.gather(1, best), -1), (1, 0)),
        )


@lru_cache(maxsize=64)
def _depths(depth: int, few: int, device: torch.device) -> Tensor:
    """Depth of each candidate [M]."""
    each = [1] * few + [d for d in range(2, depth + 1) for _ in range(few**2)]
    return torch.tensor(each, device=device)


@dataclass(frozen=True)
class DynamicTree(OneModel):
    """The `total_tokens` most probable nodes of a beam of `top_k` nodes and `depth` levels.

    The names are EAGLE-2's; `total_tokens` leaves the pending token out. `shared_noise` draws with
    the target's noise.

    >>> DynamicTree(model, total_tokens=24, depth=6, top_k=6)                # doctest: +SKIP
    """

    model: LanguageModel
    total_tokens: int = 16
    depth: int = 5
    top_k: int = 4
    shared_noise: bool = False
    name: ClassVar[str] = "dynamic_tree"

    def __post_init__(self) -> None:
        for name in ("total_tokens", "depth", "top_k"):
            object.__setattr__(self, name, arguments.plain(vars(self)[name]))
        fits(self.total_tokens, self.depth, self.top_k, self.model.vocab_size)

    @property
    def draw_kinds(self) -> tuple[DrawKind, ...]:
        """Every child is placed, or every child is coupled."""
        return draw_kinds(self.shared_noise)

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Greedy rows place their children."""
        return frozenset({DrawKind.FIXED, *self.draw_kinds})

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """A tree of each depth, with as many nodes as it can have."""
        return of_candidates(self.total_tokens, self.depth, self.top_k)

    def open(self, context: Context, capacity: int) -> Cache:
        """The draft model's cache: it may run more nodes than it proposes."""
        run = 1 + (self.depth - 1) * self.top_k
        more = max(run - 1 - self.total_tokens, 0)
        room = self.model.width(capacity + more) if more else capacity
        return super().open(context, room)

    def propose(self, memory: Cache, context: Context, shape: DraftShape) -> Draft:
        """Expand level by level, one draft-model call each, and keep the best nodes."""
        source = tree_drafting.TreeModel(
            self.model, memory, tree_drafting.unread_of(self.model, self.depth)
        )
        return grow(source, context, shape, self.top_k, self.shared_noise)


def _made(
    model: LanguageModel,
    num_speculative_tokens: int = DynamicTree.depth,
    width: int = DynamicTree.top_k,
    total_tokens: int | None = None,
    shared_noise: bool = False,
) -> DynamicTree:
    total = sized(
        total_tokens, num_speculative_tokens, width, model.vocab_size, DynamicTree.total_tokens
    )
    return DynamicTree(model, total, num_speculative_tokens, width, shared_noise)


RECIPE = recipes.Recipe(
    _made, ("model",), ("num_speculative_tokens", "width", "total_tokens", "shared_noise")
)
