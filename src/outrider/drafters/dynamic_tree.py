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
are. The factor is measured (docs/log.md) and matters for speed alone.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider import arguments, noise, ops
from outrider.drafters import recipes
from outrider.drafters.laws import law_at
from outrider.drafters.levels import Grown, Growth, begin
from outrider.errors import ConfigurationError
from outrider.prefill import ROUND
from outrider.tree import numbers
from outrider.types import Context, Draft, Kind, LanguageModel, Laws, Scores, Shape, Tree, Verdict

SURENESS = 1.5  #: under shared noise target and draft agree more often than softmax tells


class _Pool(NamedTuple):
    """All candidates [B, M], level after level, siblings side by side and best first."""

    score_BM: Tensor  #: log of the cumulative probability, -inf: no such token
    token_BM: Tensor
    parent_BM: Tensor  #: number of the parent among the candidates, counted from 1; 0: the root
    slot_BM: Tensor  #: place among the nodes that were run, -1: it was not


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


@dataclass(frozen=True)
class DynamicTree(Grown):
    """The `total_tokens` most probable nodes of a beam of `top_k` nodes and `depth` levels.

    The names are EAGLE-2's; `total_tokens` leaves the pending token out. `coupled` draws with the
    target's noise.

    >>> DynamicTree(model, total_tokens=24, depth=6, top_k=6)                # doctest: +SKIP
    """

    model: LanguageModel
    total_tokens: int = 16
    depth: int = 5
    top_k: int = 4
    coupled: bool = False
    name: str = "dynamic_tree"
    kinds: frozenset[Kind] = field(init=False)
    is_chain: bool = False
    max_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("total_tokens", "depth", "top_k"):
            object.__setattr__(self, name, arguments.plain(getattr(self, name)))
        fits(self.total_tokens, self.depth, self.top_k, self.model.vocab_size)
        kinds = {Kind.FIXED, Kind.COUPLED} if self.coupled else {Kind.FIXED}
        object.__setattr__(self, "kinds", frozenset(kinds))
        object.__setattr__(self, "max_nodes", 1 + self.total_tokens)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape that it was made for."""
        return (Shape(self.max_nodes, self.max_nodes, self.depth, self.is_chain),)

    @property
    def _run(self) -> int:
        """Nodes that the draft model runs, the root included: the last level is not expanded."""
        return 1 + (self.depth - 1) * self.top_k

    def open(self, context: Context, capacity: int) -> Any:
        """The draft model's cache: it may run more nodes than it proposes."""
        more = -(-max(self._run - self.max_nodes, 0) // ROUND) * ROUND
        return super().open(context, capacity + more)

    def propose(self, memory: Any, context: Context, shape: Shape) -> Draft:
        """Expand level by level, one draft-model call each, and keep the best nodes."""
        sampling = context.sampling
        growth, logits = begin(self.model, memory, context, max(self._run, self.max_nodes))
        judge = _Judge(context, self.depth, logits.shape[-1], self.coupled)
        pool = self._candidates(growth, context, judge, logits)
        tokens, parent, depth, slot = self._best(pool)
        tokens = torch.cat([growth.pending_B1, tokens], 1)
        device, batch = tokens.device, tokens.shape[0]
        nodes, few = self.max_nodes, self.top_k

        there = parent >= 0
        eye = numbers(nodes, device)[:, None] == numbers(nodes, device)
        above = parent.clamp(min=0)[..., None].expand(-1, -1, nodes)
        ancestors = eye.expand(batch, -1, -1)
        for _ in range(self.depth):
            ancestors = eye | ancestors.gather(1, above)
        # siblings stand side by side, best first, and the first of them are the ones that were kept
        number = numbers(nodes, device).expand(batch, -1)
        same = (parent[:, :, None] == parent[:, None, :]) & there[:, :, None]
        rank = same.tril(-1).sum(-1)
        spare = nodes * few  # the cell that absent nodes are written to
        cell = torch.where(there, parent * few + rank, spare)
        draws = torch.full((batch, spare + 1), -1, device=device).scatter(1, cell, number)
        draws = draws[:, :spare].view(batch, nodes, few)
        kind, none = _tables(nodes, few, Kind.COUPLED if self.coupled else Kind.FIXED, device)
        kinds = frozenset({Kind.COUPLED if self.coupled else Kind.FIXED})
        if self.coupled and sampling.greedy != "none":
            hot = torch.isinf(sampling.inverse_temperature_B)[:, None, None]
            kind = torch.where(hot, int(Kind.FIXED), kind)
            kinds = self.kinds if sampling.greedy == "some" else frozenset({Kind.FIXED})
        parent = torch.where(there | (number == 0), parent, 0)
        return Draft(
            tokens,
            # rows differ in where a level ends: every node is a part of its own
            Tree(parent, depth, ancestors, self.depth, few, tuple(range(nodes + 1)), False),
            draws,
            kind,
            none,
            None,
            kinds,
            places_BN=slot,
        )

    def _candidates(
        self, growth: Growth, context: Context, judge: "_Judge", logits: Tensor
    ) -> _Pool:
        few, run, device = self.top_k, self._run, logits.device
        batch = logits.shape[0]
        slot = numbers(run, device)
        parent_BF = torch.full((batch, run), -1, device=device)  # of the nodes that are run
        seen_BFF = (slot[:, None] == slot).expand(batch, -1, -1)
        level_F, spans = _levels(self.depth, few, device)
        score = torch.zeros(batch, 1, device=device)  # of the nodes being expanded
        who = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # their candidate numbers
        tokens = [growth.pending_B1]
        scores, words, parents, slots = [], [], [], []
        start, base = 0, 1
        for depth in range(self.depth):
            if depth:
                seen = growth.sees(start, start + few, seen_BFF)
                logits = growth.feed(tokens[-1], depth, start, seen)
            alive = score > -torch.inf
            tree = Tree(parent_BF, level_F.expand(batch, -1), seen_BFF, depth, few, spans, False)
            law = law_at(logits, context, tokens, tree, start, alive if depth else None)
            best = judge.log_shares(law, depth).topk(few, -1)
            worth = torch.where(alive[..., None], score[..., None] + best.values, -torch.inf)
            worth, word = worth.flatten(1), best.indices.flatten(1)
            over = who[..., None].expand(-1, -1, few).flatten(1)
            place = torch.full_like(word, -1)
            if depth < self.depth - 1:
                order = worth.argsort(dim=-1, descending=True, stable=True)[:, :few]
                stop = start + logits.shape[1]
                ahead = slot[stop : stop + few].expand(batch, -1)
                place = place.scatter(1, order, ahead)
                score, token = worth.gather(1, order), word.gather(1, order)
                tokens.append(torch.where(score > -torch.inf, token, 0))
                who = base + order
                mine = start + order // few  # the slot of each one's parent
                parent_BF = torch.cat([parent_BF[:, :stop], mine, parent_BF[:, stop + few :]], 1)
                line = seen_BFF.gather(1, mine[..., None].expand(-1, -1, run))
                line = line | (slot[stop : stop + few, None] == slot)
                seen_BFF = torch.cat([seen_BFF[:, :stop], line, seen_BFF[:, stop + few :]], 1)
                start = stop
            scores.append(worth)
            words.append(word)
            parents.append(over)
            slots.append(place)
            base += worth.shape[1]
        return _Pool(*(torch.cat(parts, 1) for parts in (scores, words, parents, slots)))

    def _best(self, pool: _Pool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B, N - 1], and parents, depths and slots [B, N] of the nodes that are kept.

        Nodes stand in the order of the candidates: by depth, parents first. Absent ones stand last.
        """
        batch, many = pool.score_BM.shape
        device, total = pool.score_BM.device, self.total_tokens
        # a stable order, because a parent may be as probable as its child
        best = pool.score_BM.argsort(dim=-1, descending=True, stable=True)[:, :total]
        there = pool.score_BM.gather(1, best) > -torch.inf
        best = torch.where(there, best, many).sort(-1).values
        there = best < many
        best = best.clamp(max=many - 1)
        number = numbers(total + 1, device)[1:].expand(batch, -1)
        new = torch.zeros(batch, many + 2, dtype=torch.int64, device=device)
        new = new.scatter(1, torch.where(there, best + 1, many + 1), number)
        parent = torch.where(there, new.gather(1, pool.parent_BM.gather(1, best)), -1)
        depth = _depths(self.depth, self.top_k, device)[best]
        pad = torch.nn.functional.pad
        return (
            torch.where(there, pool.token_BM.gather(1, best), 0),
            pad(parent, (1, 0), value=-1),
            pad(torch.where(there, depth, 1), (1, 0)),
            pad(torch.where(there, pool.slot_BM.gather(1, best), -1), (1, 0)),
        )

    def commit(
        self, memory: Any, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Move the accepted path's entries next to the root, from where they were run."""
        path = verdict.path_BD
        assert draft.places_BN is not None
        slot = draft.places_BN.gather(1, path.clamp(min=0))
        self.model.keep(memory, context.length_B - 1, torch.where(path >= 0, slot, -1))


class _Judge:
    """How probable a token is to be the next one, as far as the draft can tell."""

    def __init__(self, context: Context, depth: int, vocab: int, coupled: bool) -> None:
        self.greedy = context.sampling.greedy
        self.hot = torch.isinf(context.sampling.inverse_temperature_B)[:, None, None]
        self.race: Tensor | None = None
        if coupled and self.greedy != "all":
            first = context.length_B - 1
            self.race = noise.target_race_at(context.seed_B, first, depth, vocab).log_()

    def log_shares(self, law: Laws, depth: int) -> Tensor:
        """[B, n, V], at most 0; -inf where a token is impossible."""
        merit = law.logits_BRV.float()
        if self.greedy != "all":
            soft = ops.scaled(law)
            if self.race is not None:
                soft = SURENESS * (soft - self.race[:, depth : depth + 1])
            merit = torch.where(self.hot, merit, soft) if self.greedy == "some" else soft
        # a node at which nothing is possible has no shares: NaN
        return merit.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0)


@lru_cache(maxsize=64)
def _depths(depth: int, few: int, device: torch.device) -> Tensor:
    """Depth of each candidate [M]."""
    each = [1] * few + [d for d in range(2, depth + 1) for _ in range(few**2)]
    return torch.tensor(each, device=device)


@lru_cache(maxsize=64)
def _levels(depth: int, few: int, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Depth of each node that is run [F], and the bounds of these levels."""
    levels = [0] + [d for d in range(1, depth) for _ in range(few)]
    spans = (0, 1, *(1 + few * d for d in range(1, depth)))
    return torch.tensor(levels, device=device), spans


@lru_cache(maxsize=64)
def _tables(nodes: int, few: int, kind: Kind, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kind and law row of each draw: no draw has a law."""
    none = torch.full((1, nodes, few), -1, device=device)
    return torch.full_like(none, int(kind)), none


def _made(
    model: LanguageModel,
    num_speculative_tokens: int = DynamicTree.depth,
    width: int = DynamicTree.top_k,
    total_tokens: int | None = None,
    coupled: bool = False,
) -> DynamicTree:
    depth = num_speculative_tokens
    if total_tokens is None:  # the usual number, if a tree of this depth and width can have it
        total_tokens = max(depth, min(DynamicTree.total_tokens, candidates(depth, width)))
    names = ("num_speculative_tokens", "width")
    fits(total_tokens, depth, width, model.vocab_size, names)
    return DynamicTree(model, total_tokens, depth, width, coupled)


RECIPE = recipes.Recipe(
    _made, ("model",), ("num_speculative_tokens", "width", "total_tokens", "coupled")
)
