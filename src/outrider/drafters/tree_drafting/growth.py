"""The loop in which every drafter with a law grows its tree: feed, shape and warp, choose, extend.

A drafter is a `Policy`: it chooses the children of each level from the laws of its nodes. The loop
does the rest. It feeds the committed tail and every level, shapes the laws by each node's own
prefix (a draft that ignores a request's penalties and bans is exact, and refused more often), and
leaves topology and declarations to the `TreeBuilder`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.drafters.tree_drafting.builder import Children, TreeBuilder
from outrider.drafters.tree_drafting.shapes import Layout, TreeLevel
from outrider.models.model_wrapper import capturable, rereads
from outrider.models.prefill import CHUNK, causal, ingest, width
from outrider.noise import Purpose
from outrider.row_params import Greedy, SamplingRows
from outrider.sampling.logits_processors import among, apply
from outrider.tree import numbers
from outrider.types import (
    Cache,
    Context,
    Draft,
    DrawKind,
    Inputs,
    LanguageModel,
    Laws,
    Output,
    Scores,
    TargetStates,
    Verdict,
)

RESTS = 8  #: committed tokens that a draft model has not read when they are read as text


@dataclass
class DrawKeys:
    """The names of the noise that a proposal may draw with."""

    context: Context
    nodes: int
    _own_BN: Tensor | None = None
    _shared_BN: Tensor | None = None

    def own(self, start: int, stop: int, greedy: Greedy = "some") -> Tensor:
        """[B, n]: streams of nodes start..stop, fresh in every step.

        For draws from laws of which all rows are `greedy`, which look at none: anything.
        """
        seed_B = self.context.sampling.seed_B
        if greedy == "all":
            return seed_B[:, None].expand(-1, stop - start)
        if self._own_BN is None:
            first_B = self.context.length_B - 1
            self._own_BN = ops.streams(seed_B, first_B, Purpose.DRAFT, self.nodes)
        return self._own_BN[:, start:stop]

    def shared(self, depth: int) -> Tensor:
        """[B, 1]: the stream that the target draws the token below nodes of that depth with."""
        if self._shared_BN is None:  # no tree is deeper than it has nodes
            context = self.context
            at = context.length_B[:, None] + numbers(self.nodes, context.length_B.device)
            self._shared_BN = noise.stream(context.sampling.seed_B[:, None], at, Purpose.TARGET)
        return self._shared_BN[:, depth : depth + 1]


class Policy(Protocol):
    """Chooses the children of one proposal. One that remembers is made anew for each."""

    @property
    def draw_kinds(self) -> tuple[DrawKind, ...]:
        """How a node's children come to be in sampled rows, by rank; the last kind goes on."""

    def children(self, law: Laws, level: TreeLevel, keys: DrawKeys) -> Children:
        """The children of a level's nodes, from their laws [B, n, V].

        Of greedy rows they are the most probable tokens, as operations of `ops` have it. Of several
        sources the laws stand one source after another.
        """


class ProposalSource(Protocol):
    """What the laws come from: a model, or a table."""

    def output(self, tree: TreeBuilder, level: TreeLevel) -> Output:
        """Logits [B, n, V] after the nodes of the deepest level of a tree."""


class TreeModel(NamedTuple):
    """A draft model and its cache as a source."""

    model: LanguageModel
    cache: Cache
    #: tokens of the last draft that are to be read (`unread_of`)
    unread: int = 1
    #: whether the cache is the target's, which lacks the pending token alone. One of the model's
    #: own may lack the leaf of a draft that was accepted whole, and what plain steps have emitted
    shared: bool = False

    def output(self, tree: TreeBuilder, level: TreeLevel) -> Output:
        """One call. The first feeds the committed tail, which needs neither a branch nor a read."""
        context = tree.context
        wide = width(self.model, context.bound, tree.layout.nodes, self.cache.capacity)
        if level.depth:
            return self.model.forward(self.cache, tree.nodes(level, wide))
        count = 1 if self.shared else 1 + self.unread + context.unread
        return read_on(self.model, self.cache, context, count, wide)


def unread_of(model: LanguageModel, deepest: int) -> int:
    """How many tokens of a draft, at most `deepest` deep, a model has not read when it is accepted.

    All of them where drafts leave nothing behind, else the leaf of one that is accepted whole.
    """
    return deepest if rereads(model) else 1


def read_on(
    model: LanguageModel,
    cache: Cache,
    context: Context,
    count: int,
    wide: int,
    ahead_Bm: Tensor | None = None,
) -> Output:
    """Logits [B, 1 + m, V] at each row's pending token and at m tokens that may follow it.

    The last `count` committed tokens are fed, `wide` slots of the cache are seen.
    """
    device, more = context.length_B.device, 0 if ahead_Bm is None else ahead_Bm.shape[1]
    last_B1 = context.length_B[:, None] - 1
    at = (last_B1 + (numbers(count + more, device) - count + 1)).clamp(min=0)
    tokens = context.tokens_BL.gather(1, at[:, :count])
    if ahead_Bm is not None:
        tokens = torch.cat([tokens, ahead_Bm], 1)
    # a few tokens may be read again with the next draft, and cost little to be kept apart
    settled_B = last_B1[:, 0] if count > RESTS else at[:, 0]
    early = 0 if count + more <= CHUNK else count - 1  # a long tail is read before, by chunks
    for first in range(0, early, CHUNK):
        some = slice(first, min(first + CHUNK, early))
        model.forward(cache, causal(tokens[:, some], at[:, some], wide, settled_B), last=1)
    nodes = causal(tokens[:, early:], at[:, early:], wide, settled_B)
    return model.forward(cache, nodes, last=1 + more)


def grow(
    sources: Sequence[ProposalSource],
    context: Context,
    layout: Layout,
    policy: Policy,
    *,
    trim: bool = False,
) -> TreeBuilder:
    """A tree below each row's pending token, one call of every source for each level.

    It is a draft once it is declared: `TreeBuilder.draft(policy.draw_kinds)`.

    `trim`: the policy takes tokens for numbers of a law and keeps none. Where every row is
    greedy, nothing but the best tokens is asked for, and those of a trimmed output layer are found
    among the tokens that it knows.
    """
    tree, keys = TreeBuilder(layout, context), DrawKeys(context, layout.nodes)
    few: SamplingRows | None = None
    for level in layout.levels:
        laws, known_K = [], None
        for source in sources:
            output = source.output(tree, level)
            if trim and not level.depth and output.ids_K is not None:
                few = _among(context, output.ids_K)
            if few is None or output.ids_K is None:
                laws.append(law_at(output.logits_BQV, tree, level, context.sampling))
            else:
                known_K = output.ids_K
                laws.append(law_at(output.known_BQK, tree, level, few))
        found = policy.children(laws[0] if len(laws) == 1 else ops.stack(laws), level, keys)
        if known_K is not None:
            found = found._replace(tokens_Bm=known_K[found.tokens_Bm], law=None)
        tree.add(level, found)
    return tree


def _among(context: Context, ids_K: Tensor) -> SamplingRows | None:
    """Sampling parameters over the tokens that a law is of; None: they must be over all."""
    sampling = context.sampling
    if sampling.greedy != "all":
        return None
    if sampling.shaping is None:
        return sampling
    shaping = among(sampling.shaping, ids_K, context.least)
    return None if shaping is None else sampling._replace(shaping=shaping)


def law_at(logits_BnV: Tensor, tree: TreeBuilder, level: TreeLevel, sampling: SamplingRows) -> Laws:
    """Laws [B, n, V] of a level's nodes under each row's sampling parameters.

    Its `logits_BRV` are the shaped logits, which greedy rows take their best tokens from.
    """
    if sampling.shaping is not None:
        logits_BnV = apply(
            logits_BnV,
            sampling.shaping,
            tree.context,
            tree.tokens_BM,
            tree.tree,
            level.start,
            tree.alive_Bn,
        )
    return ops.warp(logits_BnV, sampling)


def inputs_for(model: LanguageModel, inputs: Inputs | None) -> Inputs | None:
    """What a draft model reads of the rows' inputs; they hold the target's encoder states."""
    if inputs is None or model.reads == "text":
        return None
    if model.reads == "states":
        return inputs
    return inputs._replace(encoded=None) if inputs.draft is None else inputs.draft


@dataclass(frozen=True)
class OneModel:
    """What a drafter that grows drafts from one draft model keeps: the cache of that model."""

    model: LanguageModel

    @cached_property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's states that the draft model reads."""
        return self.model.aux_layers

    @property
    def capturable(self) -> bool:
        return capturable(self.model)

    def open(self, context: Context, capacity: int) -> Cache:
        """The model's cache, with all ingested but what may wait and the last committed token."""
        model, rows = self.model, context.tokens_BL.shape[0]
        cache: Cache = model.open(rows, capacity, inputs_for(model, context.inputs))
        if model.aux_layers:
            most = context.bound - 1
            at = numbers(most, context.length_B.device).expand(rows, -1)
            wide = width(model, most, 0, cache.capacity)
            model.learn(cache, TargetStates(at, at, wide, context.hidden, context.length_B - 1))
        if not model.aux_layers or model.follows:
            start = 0 if context.known is None else context.known.begin(model, cache)
            stop = context.bound - 1 - context.unread
            settled_B = context.length_B - 1
            known = None if context.unread else context.known
            tokens = context.tokens_BL
            ingest(model, cache, tokens, stop, settled_B=settled_B, start=start, known=known)
            if known is not None:
                known.keep(model, cache)
        return cache

    def commit(
        self, memory: Cache, context: Context, draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Move the accepted path's entries next to the root; a chain's lie where they belong.

        A head is told the target's states of the draft and keeps those of the path.
        """
        model, first_B, path = self.model, context.length_B - 1, verdict.path_BD
        if model.aux_layers:
            nodes = draft.tree.nodes
            slots = first_B[:, None] + numbers(nodes, first_B.device)
            at = first_B[:, None] + draft.tree.depth_BN
            wide = width(model, context.bound, nodes, memory.capacity)
            known_B = context.length_B + verdict.count_B
            model.learn(memory, TargetStates(slots, at, wide, scores.hidden, known_B))
        elif draft.places_BN is not None:
            slot = draft.places_BN.gather(1, path.clamp(min=0))
            path = torch.where(path >= 0, slot, -1)
        if not draft.tree.is_chain:
            model.keep(memory, first_B, path)
