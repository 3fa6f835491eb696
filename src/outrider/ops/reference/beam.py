"""One level of a stochastic beam search (Kool et al. 2019)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.noise import exponentials
from outrider.ops.reference.laws import hot, scaled
from outrider.types import Laws


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
