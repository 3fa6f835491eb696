"""Inputs of the verification benchmark: Zipf-like laws, drafts at a distance, fresh tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.tree import chain, children
from outrider.types import Draft, DrawKind, Draws, Laws, Scores


class Inputs(NamedTuple):
    """One verification in the shapes that every contestant wants."""

    ids: Tensor  #: [B, 1 + gamma]
    draft_logits: Tensor  #: [B, gamma, V]
    target_logits: Tensor  #: [B, gamma + 1, V]
    draft: Draft  #: with the draft's log-sum-exps kept
    cold: Draft  #: without
    scores: Scores
    draws: Draws


def make(
    batch: int, gamma: int, vocab: int, dtype: torch.dtype, distance: float, seed: int,
    device: str = "cpu", forced: str = "", ragged: bool = False,
) -> Inputs:  # fmt: skip
    """Target: Zipf plus noise. Draft: a mixture at total variation of about `distance`.

    `forced` = "accept" makes both laws equal, "reject" puts the first token where the target has
    no mass. With `ragged` row b drafts 1 + (b mod gamma) tokens.
    """
    rng = torch.Generator(device).manual_seed(seed)
    rank = torch.arange(1, vocab + 1, dtype=torch.float32, device=device)
    rows: list[Tensor] = []
    for i in range(batch * (gamma + 1)):
        if i < 8:
            order = torch.randperm(vocab, generator=rng, device=device)
            noise = torch.randn(vocab, generator=rng, device=device)
            rows.append((-1.1 * rank.log() + 0.3 * noise)[order])
        else:  # enough laws: the rest are the same ones, turned
            rows.append(rows[i % 8].roll(7919 * i))
    target = torch.stack(rows).view(batch, gamma + 1, vocab)
    other = target[:, :gamma, torch.randperm(vocab, generator=rng, device=device)]
    share = 0.0 if forced == "accept" else distance
    law = (1 - share) * target[:, :gamma].softmax(-1) + share * other.softmax(-1)
    guess = law.log()
    tokens = torch.multinomial(
        guess.view(-1, vocab).softmax(-1), 1, generator=rng
    ).view(batch, gamma)  # fmt: skip
    if forced == "reject":
        target[:, 0].scatter_(1, tokens[:, :1], -torch.inf)
    start = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    ids = torch.cat([start, tokens], 1)
    target, guess = target.to(dtype), guess.to(dtype)
    ones = torch.ones(batch, device=device)
    draws_BNK = children((1,) * gamma, device)
    if ragged:
        most = 1 + torch.arange(batch, device=device)[:, None, None] % gamma
        draws_BNK = torch.where(draws_BNK <= most, draws_BNK, -1)
    node = torch.arange(gamma + 1, device=device)[None, :, None]
    row = torch.where(draws_BNK >= 0, node, -1)
    cold = Draft(
        ids,
        chain(gamma, device),
        draws_BNK,
        torch.full_like(draws_BNK, int(DrawKind.WITHOUT)),
        row,
        Laws(guess, ones, greedy="none"),
        frozenset({DrawKind.WITHOUT}),
    )
    laws = Laws(guess, ones, lse_BR=guess.float().logsumexp(-1), greedy="none")
    start = torch.arange(batch, device=device) * 17 + 3
    return Inputs(
        ids,
        guess,
        target,
        cold._replace(laws=laws),
        cold,
        Scores(Laws(target, ones, greedy="none")),
        Draws(start * 7919 + seed, start),
    )
