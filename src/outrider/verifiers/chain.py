"""Chains: every node is known beforehand, so all positions are tested at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider import noise, ops
from outrider.types import Draft, DrawKind, Draws, Outcome, Scores, Verdict


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
    """Whether every node has at most one draw. The bare root is the shortest chain."""
    return draft.tree.is_chain and draft.draws_BNK.shape[2] <= 1


def read(draft: Draft, scores: Scores) -> Chain:
    """Both laws along the chain."""
    depth = draft.tree.max_depth
    law = ops.probs(scores.laws)
    batch = law.shape[0]
    tokens = draft.tokens_BN[:, 1 : depth + 1].expand(batch, -1)
    there = (draft.draws_BNK[:, :depth, :1].flatten(1) >= 0).expand(batch, -1)
    drawn = bool(draft.kinds & {DrawKind.WITHOUT, DrawKind.WITH}) and draft.laws is not None
    placed = None
    if drawn and DrawKind.FIXED in draft.kinds:
        placed = (draft.kind_BNK[:, :depth, 0] == DrawKind.FIXED).expand(batch, -1)
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
    there = torch.nn.functional.pad(chain.there_BD, (0, 1), value=False)
    return there.gather(1, count_B[:, None])


def left_after(chain: Chain, count_B: Tensor) -> Tensor:
    """[B, V]: norm((p - q)+) at the refused token, p where the walk came to the draft's end."""
    here, depth = at(chain.law_BNV, count_B), chain.guess_BDV.shape[1]
    # undefined where nothing was refused
    guess = at(chain.guess_BDV if depth else chain.law_BNV, count_B.clamp(max=max(depth - 1, 0)))
    rest = ops.residual(here, guess)
    return torch.where(refused(chain, count_B), rest, here)


def chances(favour: Tensor, against: Tensor, most: float = 1.0) -> Tensor:
    """min(most, favour / against); with most 1 the probability that u against < favour."""
    ratio = (favour / torch.where(against > 0, against, 1.0)).clamp(max=most)
    return torch.where(against > 0, ratio, (favour > 0).to(ratio.dtype) * most)


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
    going = torch.nn.functional.pad(chance, (1, 0), value=1.0).cumprod(1)
    refusal = torch.nn.functional.pad(1 - chance, (0, 1), value=1.0)
    return Outcome(going * refusal, left_BNV)
