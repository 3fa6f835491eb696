"""Tokens drawn from laws by Gumbel noise: one, several without replacement, or independent ones.

Greedy rows take the most probable tokens instead, in descending order.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import noise
from outrider.noise import exponentials
from outrider.ops.reference.probs import hot, scaled, select
from outrider.tree import numbers
from outrider.types import Laws

# One level of a stochastic beam search (Kool et al. 2019).


class Survivors(NamedTuple):
    """The paths that stay in a stochastic beam, best first."""

    parent_Bw: Tensor  #: law row that the path goes on from
    token_Bw: Tensor
    phi_Bw: Tensor  #: log-probability of the path, -inf where there is none
    psi_Bw: Tensor  #: its perturbed log-probability, -inf where there is none


def survivors(laws: Laws, keys_BR: Tensor, phi_BR: Tensor, psi_BR: Tensor, width: int) -> Survivors:
    """The next level of a stochastic beam (Kool et al. 2019): path r goes on from law row r.

    With phi' = phi + log p(.|path), phi~ = phi' + Gumbel and Z the largest phi~ of a path, the
    `width` largest truncated scores (`truncated`) of a row stay. Greedy rows keep the paths of an
    ordinary beam search.
    """
    logits, vocab = laws.logits_BRV, laws.logits_BRV.shape[-1]
    logs = (logits if laws.greedy == "all" else scaled(laws)).float().log_softmax(-1)
    # a path whose every token is forbidden has no law: nothing follows it
    logs = torch.where(logits.amax(-1, keepdim=True) > -torch.inf, logs, -torch.inf)
    plain = phi_BR[..., None] + logs
    few = min(width, vocab)  # psi' grows with phi~ below one path, so each path's best are enough
    if laws.greedy == "all":
        score, token = plain.topk(few, -1)
    else:
        noisy, token = (plain - exponentials(keys_BR, vocab).log_()).topk(few, -1)
        score = truncated(psi_BR, noisy)
        if laws.greedy == "some":
            best, place = plain.topk(few, -1)
            score, token = torch.where(hot(laws), best, score), torch.where(hot(laws), place, token)
    flat = score.flatten(1)
    if flat.shape[1] < width:
        flat = torch.nn.functional.pad(flat, (0, width - flat.shape[1]), value=-torch.inf)
    psi, place = flat.topk(width, -1)
    there, place = psi > -torch.inf, place.clamp(max=score[0].numel() - 1)
    parent, token = place // few, token.flatten(1).gather(1, place)
    phi = plain.flatten(1).gather(1, parent * vocab + token)
    return Survivors(
        torch.where(there, parent, 0),
        torch.where(there, token, 0),
        torch.where(there, phi, -torch.inf),
        psi,
    )


def truncated(parent_Bn: Tensor, perturbed_BnV: Tensor) -> Tensor:
    """psi' [B, n, V]: scores as if drawn under the condition that their maximum is the parent's.

        psi' = -log( exp(-psi) - exp(-Z) + exp(-phi~) )
             = psi - max(0, v) - log1p(exp(-|v|)),   v = psi - phi~ + log(1 - exp(phi~ - Z))

    in the second form, finite where the first is not. Of each row any part that holds the largest
    may be given.

    >>> truncated(torch.tensor([[0.0]]), torch.tensor([[[1.0, -900.0]]])).tolist()
    [[[0.0, -900.0]]]
    """
    top = perturbed_BnV.amax(-1, keepdim=True)
    gap = perturbed_BnV - top.clamp(min=-torch.finfo(top.dtype).max)
    log_rest = torch.where(gap > -math.log(2), (-torch.expm1(gap)).log(), torch.log1p(-gap.exp()))
    v = parent_Bn[..., None] - perturbed_BnV + log_rest
    score = parent_Bn[..., None] - v.clamp(min=0) - torch.log1p((-v.abs()).exp())
    score = torch.where(gap == 0, parent_Bn[..., None], score)
    alive = (perturbed_BnV > -torch.inf) & (parent_Bn[..., None] > -torch.inf)
    return torch.where(alive, score, -torch.inf)


def streams(seed_B: Tensor, position_B: Tensor, purpose: noise.Purpose, count: int) -> Tensor:
    """`count` keys of each row, [B, count]."""
    return noise.split(noise.stream(seed_B, position_B, purpose), count)


def perturbed(laws: Laws, race_BRV: Tensor) -> Tensor:
    """Gumbel-perturbed scores [B, R, V]: log-weights minus the log of Exp(1) noise.

    Their argmax is a draw, their k largest are k draws without replacement, in order (Vieira 2014;
    Kool et al. 2019). Greedy rows keep their logits: the largest are the most probable.
    """
    if laws.greedy == "all":
        return laws.logits_BRV
    weights = scaled(laws)
    scores = weights - race_BRV.log().to(weights.dtype)
    if laws.greedy == "none":
        return scores
    return torch.where(hot(laws), laws.logits_BRV.to(scores.dtype), scores)


def merit(laws: Laws, keys_BR: Tensor) -> Tensor:
    """`perturbed` with the noise of one stream for each law, or [B, 1] for all of a row."""
    if laws.greedy == "all":
        return laws.logits_BRV
    return perturbed(laws, noise.exponentials(keys_BR, laws.logits_BRV.shape[-1]))


def sample(laws: Laws, keys_BR: Tensor) -> tuple[Tensor, Laws]:
    """One token of each law [B, R]; the laws with their log-sum-exp, for the verification.

    `keys_BR` names the streams of `outrider.noise` that the draws come from. A backend may draw by
    another algorithm from the same law, and keep something else of it.
    """
    tokens = merit(laws, keys_BR).argmax(-1)
    sums = scaled(laws).logsumexp(-1)
    sums = torch.where(hot(laws)[..., 0], torch.zeros_like(sums), sums)
    return tokens, laws._replace(lse_BR=sums)


def several(
    laws: Laws, keys_BR: Tensor, count: int, placed: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None, Laws]:
    """`count` tokens of each law, drawn without replacement, and which of them exist: [B, R, K].

    A backend that reads values may say None for the latter: all of them do.

    With `placed`, the `placed[r]` most probable tokens of row r are taken out before; they follow
    the drawn ones, K = count + max(placed), and the laws that come back lack them (where nothing
    is left to draw, a law is nobody's and stays whole).

    >>> laws = Laws(torch.tensor([[[0.0, 3.0, -torch.inf]]]), torch.ones(1), greedy="none")
    >>> tokens, there, without = several(laws, torch.tensor([[7]]), 1, (1,))
    >>> tokens.tolist(), there.tolist(), without.logits_BRV.tolist()
    ([[[0, 1]]], [[[True, True]]], [[[0.0, -inf, -inf]]])
    """
    scores = merit(laws, keys_BR)
    most = max(placed, default=0)
    if laws.greedy == "all" or not most:
        return *largest(scores, count + most), laws
    above = scaled(laws).topk(min(most, scores.shape[-1]), -1)
    few_R1 = _limits(tuple(placed), scores.device)
    taken = (numbers(above.indices.shape[-1], scores.device) < few_R1) & (above.values > -torch.inf)
    left = scores.gather(-1, above.indices).masked_fill(taken, -torch.inf)
    tokens, there = largest(scores.scatter(-1, above.indices, left), count)
    without = lacking(laws, above.indices, taken & there[..., :1])
    tokens = torch.cat([tokens, widened(above.indices, most)], -1)
    there = torch.cat([there, widened(taken, most)], -1)
    return *greedily(laws, tokens, there), without


def lacking(laws: Laws, tokens_BRk: Tensor, out_BRk: Tensor) -> Laws:
    """The laws without those of the tokens that are `out`."""
    logits = laws.logits_BRV
    kept = logits.gather(-1, tokens_BRk).masked_fill(out_BRk, -torch.inf)
    return laws._replace(logits_BRV=logits.scatter(-1, tokens_BRk, kept), lse_BR=None)


def greedily(laws: Laws, tokens_BRK: Tensor, there_BRK: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable tokens in greedy rows, those that were drawn in others."""
    if laws.greedy == "none":
        return tokens_BRK, there_BRK
    best, some = largest(laws.logits_BRV, tokens_BRK.shape[-1])
    if laws.greedy == "all":
        return best, some
    return torch.where(hot(laws), best, tokens_BRK), torch.where(hot(laws), some, there_BRK)


def largest(scores_BRV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The indices of the `count` largest scores, and which of them are above -inf: [B, R, count]"""
    if count == 1:  # a search for one is quicker, and the first of equals
        best = scores_BRV.max(-1, keepdim=True)
        return best.indices, best.values > -torch.inf
    top = scores_BRV.topk(min(count, scores_BRV.shape[-1]), -1)
    return widened(top.indices, count), widened(top.values > -torch.inf, count)


def cache_top_tokens(laws: Laws) -> Laws:
    """The laws, and with them what several look for in a step's target laws, if it can be kept."""
    return laws


def top_tokens(laws: Laws, count: int, gap: float) -> Callable[[int], list[list[int]]]:
    """The `count` most probable tokens of each law of a row, best first, for drafters on a host.

    Left out is what lies more than `gap` below the best logit, or below the floor. Rows are asked
    one by one, at any time.
    """
    logits = laws.logits_BRV
    top = logits.topk(min(count, logits.shape[-1]), -1)
    least = top.values[..., :1] - gap
    if laws.floor_BR is not None:
        least = torch.maximum(least, laws.floor_BR[..., None])
    tokens = torch.where(top.values >= least, top.indices, -1).tolist()
    found = [[[token for token in one if token >= 0] for one in row] for row in tokens]
    return found.__getitem__


def widened(table_BRk: Tensor, count: int) -> Tensor:
    """The table with columns of zeros up to `count`."""
    lack = count - table_BRk.shape[-1]
    return torch.nn.functional.pad(table_BRk, (0, lack)) if lack else table_BRk


@lru_cache(maxsize=64)
def _limits(placed: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(placed, device=device)[:, None]


def independent(laws: Laws, rows_Bc: Tensor, keys_Bc: Tensor) -> tuple[Tensor, Tensor, Laws]:
    """One token from law row `rows_Bc[b, c]` for every (b, c), and whether there is any: [B, c]."""
    best = merit(select(laws, rows_Bc), keys_Bc).max(-1)
    return best.indices, best.values > -torch.inf, laws
