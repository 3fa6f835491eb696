"""A draft model that draws a chain or a branching tree, level by level.

Children of a node are drawn without replacement by Gumbel-top-k (Vieira 2014; Kool et al. 2019): a
chain is branching (1, ..., 1), other branchings are RSD-C (Jeon et al. 2024). A CPU draws them one
by one instead, the same law. Rows at temperature 0 place the draft's top tokens. In coupled mode
the noise is the target's own, keyed by absolute position, and the children are the top tokens under
it.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.drafters import asked, on_host
from outrider.errors import ConfigurationError
from outrider.nodes import causal, of_tree
from outrider.noise import Purpose
from outrider.prefill import ingest, width
from outrider.sampling import warp
from outrider.shaping import shape as shaped
from outrider.tree import branching, children, numbers, parents_of
from outrider.types import (
    Context,
    Draft,
    Kind,
    LanguageModel,
    Laws,
    Nodes,
    Scores,
    Shape,
    Tree,
    Verdict,
)


class _Tables(NamedTuple):
    """Constant tables of one shape on one device."""

    tree: Tree
    draws_BNK: Tensor
    row_BNK: Tensor
    kind_BNK: Tensor


@lru_cache(maxsize=64)
def _tables(counts: tuple[int, ...], kind: Kind, device: torch.device) -> _Tables:
    tree, draws = branching(counts, device), children(counts, device)
    node = torch.arange(tree.nodes, device=device)[None, :, None]
    rows = torch.where((draws >= 0) & (kind is not Kind.FIXED), node, -1)
    return _Tables(tree, draws, rows, torch.full_like(draws, int(kind)))


@dataclass(frozen=True)
class DraftModel:
    """`counts[l]` children below every node of level l, drawn under the row's sampling.

    >>> DraftModel(model, (1,) * 5)      # a chain of five tokens           # doctest: +SKIP
    >>> DraftModel(model, (3, 2, 1))     # a tree of 15 drafted tokens      # doctest: +SKIP
    """

    model: LanguageModel
    counts: tuple[int, ...] = (1, 1, 1, 1, 1)
    coupled: bool = False
    hidden: ClassVar[bool] = False
    name: str = "draft_model"
    kinds: frozenset[Kind] = field(init=False)
    is_chain: bool = field(init=False)
    max_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", asked.counts("counts", self.counts))
        if not self.counts:
            raise ConfigurationError(
                "a draft model needs at least one drafted token; got branching (); "
                "use drafter='root' for plain decoding"
            )
        if max(self.counts) > self.model.vocab_size:
            raise ConfigurationError(
                f"no node has more children than the draft has tokens; got branching {self.counts} "
                f"for a vocabulary of {self.model.vocab_size}; use smaller factors"
            )
        drawn = Kind.COUPLED if self.coupled else Kind.WITHOUT
        tree = branching(self.counts)
        object.__setattr__(self, "kinds", frozenset({Kind.FIXED, drawn}))
        object.__setattr__(self, "is_chain", tree.is_chain)
        object.__setattr__(self, "max_nodes", tree.nodes)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape that it was made for."""
        return (Shape(self.max_nodes, self.max_nodes, len(self.counts), self.is_chain),)

    def open(self, context: Context, capacity: int) -> Any:
        """The draft model's cache, with all but the last two committed tokens ingested.

        The last two are fed again in every step: after a full acceptance the accepted leaf was
        never run, and feeding it needs neither a branch nor a host read.
        """
        cache = self.model.open(context.tokens_BL.shape[0], capacity)
        ingest(self.model, cache, context.tokens_BL, context.bound - 1)
        return cache

    def propose(self, memory: Any, context: Context, shape: Shape) -> Draft:
        """Draw the tree, one draft-model call per level."""
        if not self.coupled and on_host.fits(context):
            return on_host.grow(self.model, memory, context, parents_of(self.counts))
        sampling = context.sampling
        device = context.length_B.device
        greedy = sampling.greedy
        drawn = Kind.COUPLED if self.coupled else Kind.WITHOUT
        table = _tables(self.counts, Kind.FIXED if greedy == "all" else drawn, device)
        tree = table.tree
        rows = context.tokens_BL.shape[0]
        first = context.length_B - 1
        wide = width(context.bound, tree.nodes, memory.capacity)

        tail = (first[:, None] + (numbers(2, device) - 1)).clamp(min=0)
        ends = causal(context.tokens_BL.gather(1, tail), tail, wide)
        logits = self.model.forward(memory, ends, last=1).logits_BQV[:, -1:]
        _, at_BN, where_BN, seen_BNW = of_tree(tail, tree, first, wide)

        levels = tree.levels
        inner = levels[-2]  # nodes that have children are the first ones
        vocab = logits.shape[-1]
        noisy = None if greedy == "all" else _Noise(context, tree, inner, vocab, self.coupled)
        hot = torch.zeros(())
        if greedy == "some":
            hot = torch.isinf(sampling.inverse_temperature_B)[:, None, None]
        tokens = [context.tokens_BL.gather(1, first[:, None])]
        laws: list[Laws] = []
        present: list[Tensor] = []
        shaping, alive = sampling.shaping, None
        # a ban may leave nothing to draw, and a tree have more places than tokens
        gaps = not self.is_chain or (shaping is not None and shaping.masks)
        if shaping is not None and shaping.processed:
            alive = torch.ones(rows, 1, dtype=torch.bool, device=device)
        for depth, count in enumerate(self.counts):
            start, stop = levels[depth], levels[depth + 1]
            if depth:
                at, where = at_BN[:, start:stop], where_BN[:, start:stop]
                nodes = Nodes(tokens[-1], at, where, seen_BNW[:, start:stop])
                logits = self.model.forward(memory, nodes).logits_BQV
            if shaping is not None:  # each node's own prefix, as the target's side has it
                if depth and alive is not None:
                    alive = alive.repeat_interleave(self.counts[depth - 1], 1)
                    alive = alive & present[-1].view(rows, -1)
                so_far = torch.cat(tokens, 1)
                logits = shaped(logits, shaping, context, so_far, tree, start, alive)
            law = warp(logits, sampling)
            laws.append(law)
            if noisy is not None and noisy.single and count == 1:
                drawn_tokens, lse = ops.sample(law, noisy.keys[:, start:stop])
                laws[-1] = law._replace(lse_BR=lse)
                tokens.append(drawn_tokens)
                if gaps:
                    share = law.logits_BRV.gather(-1, drawn_tokens[..., None])
                    present.append(share > -torch.inf)
                continue
            several = None
            if noisy is not None and noisy.single and count <= vocab:
                several = ops.several(law, noisy.keys[:, start:stop], count)
            if several is not None:
                chosen, there = several
                if greedy == "some":
                    top = logits.topk(count, -1)
                    chosen = torch.where(hot, top.indices, chosen)
                    there = torch.where(hot, top.values > -torch.inf, there)
                tokens.append(chosen.view(rows, -1))
                present.append(there)
                continue
            merit = logits
            if noisy is not None:
                merit = ops.scaled(law) - noisy.race(start, stop)
                if greedy == "some":
                    merit = torch.where(hot, logits.to(merit.dtype), merit)
            if count == 1:
                best = merit.max(-1, keepdim=True)
                tokens.append(best.indices.view(rows, -1))
                present.append(best.values > -torch.inf)
            else:
                top = merit.topk(count, -1)
                tokens.append(top.indices.view(rows, -1))
                present.append(top.values > -torch.inf)

        draws, kind, row = table.draws_BNK, table.kind_BNK, table.row_BNK
        kinds = frozenset({Kind.FIXED if greedy == "all" else drawn})
        if gaps:  # a token of zero probability never enters the tree, nor what follows
            draws = torch.where(self._spread(tree, present, draws), draws, -1)
        if greedy == "some":
            kinds = frozenset({Kind.FIXED, drawn})
            kind = torch.where(hot, int(Kind.FIXED), kind)
            row = torch.where(hot, -1, row)
        return Draft(
            torch.cat(tokens, 1),
            tree,
            draws,
            kind,
            row,
            None if greedy == "all" else _stack(laws),
            kinds,
        )

    def _spread(self, tree: Tree, present: list[Tensor], draws: Tensor) -> Tensor:
        """Which entries of the draw table exist, [B, N, K], from per-level [B, n, k] flags."""
        rows, most = present[0].shape[0], draws.shape[2]
        for depth in range(1, len(present)):  # a child of an absent node is absent, too
            present[depth] = present[depth] & present[depth - 1].view(rows, -1, 1)
        wide = [
            torch.nn.functional.pad(flags, (0, most - flags.shape[2]), value=False)
            for flags in present
        ]
        leaves = draws.shape[1] - tree.levels[-2]
        wide.append(torch.zeros(rows, leaves, most, dtype=torch.bool, device=draws.device))
        return torch.cat(wide, 1)

    def commit(
        self, memory: Any, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Keep the accepted path's entries; a chain's lie where they belong."""
        if not draft.tree.is_chain:
            self.model.keep(memory, context.length_B - 1, verdict.path_BD)


class _Noise:
    """Noise of the inner nodes: one uniform for a single child, a race over V for several."""

    def __init__(self, context: Context, tree: Tree, inner: int, vocab: int, coupled: bool) -> None:
        first = context.length_B - 1
        self.vocab, self.tree = vocab, tree
        self.single = not coupled
        self.shared: Tensor | None = None
        if coupled:
            race = noise.target_race_at(context.seed_B, first, tree.max_depth, vocab).log_()
            self.shared = race if tree.is_chain else race[:, tree.depth_BN[0, :inner]]
        else:
            self.keys = ops.streams(context.seed_B, first, Purpose.DRAFT, inner)

    def race(self, start: int, stop: int) -> Tensor:
        """Log of the exponential noise of nodes start..stop, [B, n, V]."""
        if self.shared is not None:
            return self.shared[:, start:stop]
        return noise.exponentials(self.keys[:, start:stop], self.vocab).log_()


def _stack(laws: list[Laws]) -> Laws:
    floors = [law.floor_BR for law in laws if law.floor_BR is not None]
    sums = [law.lse_BR for law in laws if law.lse_BR is not None]
    return laws[0]._replace(
        logits_BRV=torch.cat([law.logits_BRV for law in laws], 1),
        floor_BR=torch.cat(floors, 1) if floors else None,
        lse_BR=torch.cat(sums, 1) if len(sums) == len(laws) else None,
    )
