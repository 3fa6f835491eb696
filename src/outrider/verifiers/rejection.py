"""Rejection, from the root down: speculative sampling on chains, recursive rejection on trees.

Chain, token level (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2): accept x_i
iff u_i q_i(x_i) < p_i(x_i); at the first rejection emit y ~ norm((p_i - q_i)+), after the last
acceptance y ~ p. Tree (Jeon et al. 2024, Algorithm 6, with its slips mended): the same test for each
child in draw order, against the residual p left by its earlier siblings and against q without their
tokens. Children drawn with replacement make it multi-round rejection (SpecInfer); a placed child is
judged with a one-hot q.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.types import Draft, Draws, Kind, Outcome, Scores, Verdict


@dataclass(frozen=True)
class Rejection:
    """Exact for placed, with- and without-replacement children in any mixture."""

    name: str = "rejection"
    exact: bool = True
    kinds: frozenset[Kind] = frozenset({Kind.FIXED, Kind.WITHOUT, Kind.WITH})
    chain_only: bool = False

    def __call__(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """Path, count, next token and the overlap sum min(p, q) at each depth that was examined."""
        if draft.tree.max_depth == 0:
            law = ops.probs(scores.laws)[:, 0]
            race = noise.residual_race(draws, law.shape[-1])
            count = torch.zeros(law.shape[0], dtype=torch.int64, device=law.device)
            return Verdict(count.new_zeros(law.shape[0], 0), count, ops.draw(law, race))
        if draft.tree.is_chain:
            return _judge_chain(draft, scores, draws)
        return _judge_tree(draft, scores, draws)

    def outcome(self, draft: Draft, scores: Scores) -> Outcome:
        """The walk with every accept test replaced by its probability."""
        law = ops.probs(scores.laws)
        batch, nodes, vocab = law.shape
        reach = law.new_zeros(batch, nodes)
        reach[:, 0] = 1
        stop, following = torch.zeros_like(reach), law.clone()
        guesses = Guesses(draft, law)
        for node in range(nodes):
            at = torch.full((batch,), node, device=law.device)
            left, here, state = reach[:, node].clone(), law[:, node], guesses.enter(at)
            for k in range(draft.draws_BNK.shape[2]):
                kid, token, guess = guesses.draw(state, k)
                open_ = kid >= 0
                target, drafted = _at(here, token), _at(guess, token)
                ratio = target / torch.where(drafted > 0, drafted, torch.ones_like(drafted))
                take = torch.where(
                    open_ & (drafted > 0), ratio.clamp(max=1), torch.zeros_like(ratio)
                )
                take = torch.where(
                    open_ & (drafted == 0) & (target > 0), torch.ones_like(take), take
                )
                reach.scatter_add_(1, kid.clamp(min=0)[:, None], (left * take)[:, None])
                left = left * (1 - take)
                here = torch.where(open_[:, None], ops.residual(here, guess), here)
                state = guesses.refuse(state, k)
            stop[:, node], following[:, node] = left, here
        return Outcome(stop, following)


def _at(law_BV: Tensor, token_B: Tensor) -> Tensor:
    return law_BV.gather(1, token_B[:, None])[:, 0]


def _judge_chain(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    depth = draft.tree.max_depth
    law = ops.probs(scores.laws)
    batch, _, vocab = law.shape
    kid = draft.draws_BNK[:, :depth, 0]
    tokens = draft.tokens_BN[:, 1 : depth + 1, None]
    placed = draft.kinds == {Kind.FIXED}
    if draft.laws is None or placed:
        guess = torch.zeros_like(law[:, :depth]).scatter_(2, tokens, 1.0)
    else:
        guess = ops.probs(ops.select(draft.laws, draft.row_BNK[:, :depth, 0].clamp(min=0)))
        if Kind.FIXED in draft.kinds:
            fixed = (draft.kind_BNK[:, :depth, 0] == Kind.FIXED)[..., None]
            guess = torch.where(fixed, torch.zeros_like(guess).scatter_(2, tokens, 1.0), guess)
    uniform = noise.accept_uniforms(draws, draft.tree.nodes, 1)[:, :depth, 0]
    target = law[:, :depth].gather(2, tokens)[..., 0]
    accept = (uniform * guess.gather(2, tokens)[..., 0] < target) & (kid >= 0)
    going = accept.long().cumprod(1)
    count = going.sum(1)
    path = torch.where(going > 0, kid, -1)

    at = count[:, None, None].expand(-1, 1, vocab)
    here = law.gather(1, at)[:, 0]
    refused_at = guess.gather(1, at.clamp(max=depth - 1))[:, 0]
    drawn = kid.expand(batch, -1).gather(1, count[:, None].clamp(max=depth - 1))[:, 0] >= 0
    refused = ((count < depth) & drawn)[:, None]
    here = torch.where(refused, ops.residual(here, refused_at), here)
    following = ops.draw(here, noise.residual_race(draws, vocab))

    overlap = None
    if draft.laws is not None and not placed:
        examined = torch.cat([torch.ones_like(going[:, :1]), going[:, :-1]], 1) * (kid >= 0)
        overlap = torch.minimum(law[:, :depth], guess).sum(-1)
        overlap = torch.where(examined > 0, overlap, torch.nan)
    return Verdict(path, count, following, overlap)


def _judge_tree(draft: Draft, scores: Scores, draws: Draws) -> Verdict:
    law = ops.probs(scores.laws)
    batch, nodes, vocab = law.shape
    rows = torch.arange(batch, device=law.device)
    most = draft.draws_BNK.shape[2]
    uniform = noise.accept_uniforms(draws, nodes, most)
    guesses = Guesses(draft, law)

    node = torch.zeros(batch, dtype=torch.int64, device=law.device)
    alive = torch.ones(batch, dtype=torch.bool, device=law.device)
    here, path, overlap = law[:, 0], [], []
    for _ in range(draft.tree.max_depth):
        state = guesses.enter(node)
        taken, there = torch.zeros_like(alive), node
        for k in range(most):
            kid, token, guess = guesses.draw(state, k)
            open_ = alive & ~taken & (kid >= 0)
            if k == 0 and draft.laws is not None:
                shared = torch.minimum(here, guess).sum(-1)
                overlap.append(torch.where(open_, shared, torch.nan))
            keep = open_ & (uniform[rows, node, k] * _at(guess, token) < _at(here, token))
            refuse = open_ & ~keep
            here = torch.where(refuse[:, None], ops.residual(here, guess), here)
            state = guesses.refuse(state, k)
            there, taken = torch.where(keep, kid, there), taken | keep
        path.append(torch.where(taken, there, -1))
        node, alive = there, taken
        here = torch.where(taken[:, None], law[rows, node], here)
    path_BD = torch.stack(path, 1)
    following = ops.draw(here, noise.residual_race(draws, vocab))
    return Verdict(
        path_BD, (path_BD >= 0).sum(1), following, torch.stack(overlap, 1) if overlap else None
    )


class Guesses:
    """The draft's law of each child in turn, given its refused earlier siblings at one node.

    The state is the current node's draw table and its law without the tokens refused so far.
    """

    def __init__(self, draft: Draft, law: Tensor) -> None:
        self.draft = draft
        batch = law.shape[0]
        self.rows = torch.arange(batch, device=law.device)
        self.laws = None if draft.laws is None else ops.probs(draft.laws).to(law.dtype)
        self.draws = draft.draws_BNK.expand(batch, -1, -1)
        self.kind = draft.kind_BNK.expand(batch, -1, -1)
        self.row = draft.row_BNK.expand(batch, -1, -1)
        self.blank = law.new_zeros(batch, law.shape[-1])

    def enter(self, node_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """Stand at a node with no child refused yet."""
        return node_B, None

    def draw(self, state: tuple[Tensor, Tensor | None], k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Child [B] (-1: none), its token [B] and the law [B, V] it was drawn from."""
        node, refused = state
        kid = self.draws[self.rows, node, k]
        token = self.draft.tokens_BN.gather(1, kid.clamp(min=0)[:, None])[:, 0]
        kinds = self.draft.kinds
        if self.laws is None or kinds == {Kind.FIXED}:
            return kid, token, self.blank.scatter(1, token[:, None], 1.0)
        guess = self.laws[self.rows, self.row[self.rows, node, k].clamp(min=0)]
        kind = self.kind[self.rows, node, k][:, None]
        if refused is not None:
            left = guess.masked_fill(refused, 0)
            total = left.sum(-1, keepdim=True)
            left = left / torch.where(total > 0, total, torch.ones_like(total))
            guess = (
                left if kinds == {Kind.WITHOUT} else torch.where(kind == Kind.WITHOUT, left, guess)
            )
        if Kind.FIXED in kinds:
            one_hot = self.blank.scatter(1, token[:, None], 1.0)
            guess = torch.where(kind == Kind.FIXED, one_hot, guess)
        return kid, token, guess

    def refuse(self, state: tuple[Tensor, Tensor | None], k: int) -> tuple[Tensor, Tensor | None]:
        """Remove the k-th child's token from the law that its later siblings were drawn from."""
        node, refused = state
        if Kind.WITHOUT not in self.draft.kinds or self.draft.tree.max_draws == 1:
            return state
        kid = self.draws[self.rows, node, k]
        token = self.draft.tokens_BN.gather(1, kid.clamp(min=0)[:, None])
        drawn = ((kid >= 0) & (self.kind[self.rows, node, k] == Kind.WITHOUT))[:, None]
        if refused is None:
            refused = torch.zeros_like(self.blank, dtype=torch.bool)
        return node, refused.scatter(1, token, refused.gather(1, token) | drawn)
