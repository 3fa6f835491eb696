"""Chains: every node is known beforehand, so all positions are tested at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.types import Draft, Draws, Kind, Outcome, Scores, Verdict


class Chain(NamedTuple):
    """One drafted token at each of D positions, with both laws there."""

    law_BNV: Tensor  #: target at every node, D + 1 of them
    guess_BDV: Tensor  #: law of the drafted token, one-hot if it was placed
    token_BD: Tensor
    there_BD: Tensor  #: bool; False pads a short row
    placed_BD: Tensor | None  #: bool; None if none is placed
    drawn: bool  #: host constant: whether some tokens may be drawn

    @property
    def favour_BD(self) -> Tensor:
        """The target's probability of each drafted token."""
        return self.law_BNV[:, :-1].gather(2, self.token_BD[..., None])[..., 0]

    @property
    def against_BD(self) -> Tensor:
        """The draft's probability of each drafted token."""
        return self.guess_BDV.gather(2, self.token_BD[..., None])[..., 0]


def is_plain(draft: Draft) -> bool:
    """Whether every node has at most one draw."""
    return draft.tree.is_chain and draft.draws_BNK.shape[2] <= 1 and draft.tree.max_depth > 0


def read(draft: Draft, scores: Scores) -> Chain:
    """Both laws along the chain."""
    depth = draft.tree.max_depth
    law = ops.probs(scores.laws)
    batch = law.shape[0]
    tokens = draft.tokens_BN[:, 1 : depth + 1].expand(batch, -1)
    there = (draft.draws_BNK[:, :depth, 0] >= 0).expand(batch, -1)
    drawn = bool(draft.kinds & {Kind.WITHOUT, Kind.WITH}) and draft.laws is not None
    placed = None
    if drawn and Kind.FIXED in draft.kinds:
        placed = (draft.kind_BNK[:, :depth, 0] == Kind.FIXED).expand(batch, -1)
    if draft.laws is None or not drawn:
        placed = torch.ones_like(there)
        guess = torch.zeros_like(law[:, :depth]).scatter_(2, tokens[..., None], 1.0)
    else:
        laws = ops.select(draft.laws, draft.row_BNK[:, :depth, 0].clamp(min=0))
        guess = ops.probs(laws).to(law.dtype)
        if placed is not None:
            one_hot = torch.zeros_like(guess).scatter_(2, tokens[..., None], 1.0)
            guess = torch.where(placed[..., None], one_hot, guess)
    return Chain(law, guess, tokens, there, placed, drawn)


def uniforms(draft: Draft, draws: Draws) -> Tensor:
    """[B, D]: the uniform of the test at each position."""
    nodes, depth = draft.tree.nodes, draft.tree.max_depth
    return noise.accept_uniforms(draws, nodes, 1)[:, :depth, 0]


def until_refusal(chain: Chain, keep_BD: Tensor) -> Tensor:
    """[B]: how many drafted tokens come before the first refusal."""
    return (keep_BD & chain.there_BD).long().cumprod(1).sum(1)


def at(table_BNV: Tensor, count_B: Tensor) -> Tensor:
    """[B, V]: the row where each walk stands."""
    vocab = table_BNV.shape[2]
    return table_BNV.gather(1, count_B[:, None, None].expand(-1, 1, vocab))[:, 0]


def refused(chain: Chain, count_B: Tensor) -> Tensor:
    """[B, 1]: whether the walk ended at a refused token rather than at the end of the draft."""
    depth = chain.there_BD.shape[1]
    last = chain.there_BD.gather(1, count_B[:, None].clamp(max=depth - 1))
    return last & (count_B[:, None] < depth)


def guess_at(chain: Chain, count_B: Tensor) -> Tensor:
    """[B, V]: the draft's law at the refused token (undefined where nothing was refused)."""
    return at(chain.guess_BDV, count_B.clamp(max=chain.guess_BDV.shape[1] - 1))


def conclude(chain: Chain, count_B: Tensor, left_BV: Tensor, draws: Draws) -> Verdict:
    """The verdict that keeps `count` tokens and draws the next one from `left`."""
    depth = chain.there_BD.shape[1]
    ahead = torch.arange(1, depth + 1, device=count_B.device)
    path = torch.where(ahead <= count_B[:, None], ahead, -1)
    following = ops.draw(left_BV, noise.residual_race(draws, left_BV.shape[-1]))
    overlap = None
    if chain.drawn:
        overlap = torch.minimum(chain.law_BNV[:, :-1], chain.guess_BDV).sum(-1)
        reached = (ahead - 1 <= count_B[:, None]) & chain.there_BD
        overlap = torch.where(reached, overlap, torch.nan)
    return Verdict(path, count_B, following, overlap)


def outcome(chain: Chain, chance_BD: Tensor, left_BNV: Tensor) -> Outcome:
    """The law of a chain rule that stops at the first refusal."""
    chance = torch.where(chain.there_BD, chance_BD, 0.0)
    going = torch.cat([torch.ones_like(chance[:, :1]), chance], 1).cumprod(1)
    refusal = torch.cat([1 - chance, torch.ones_like(chance[:, :1])], 1)
    return Outcome(going * refusal, left_BNV)
