"""Top-k, top-p and min-p as one threshold a row, by sorting."""

import torch
from torch import Tensor

from outrider.row_params import SamplingRows


def floors(logits_BRV: Tensor, sampling: SamplingRows) -> Tensor:
    """Top-k, top-p and min-p as the smallest logit that stays in, float32 [B, R]; ties stay in.

    Some filter must be in use.
    """
    logits = logits_BRV.float()
    floor = torch.full(logits.shape[:2], -torch.inf, device=logits.device)
    if sampling.most_top_k or sampling.any_top_p:
        floor = _nucleus(logits, sampling)
    return least(logits, floor, sampling)


def least(logits_BRV: Tensor, floor_BR: Tensor, sampling: SamplingRows) -> Tensor:
    """The floors raised to min-p's where that is in use."""
    if not sampling.any_min_p:
        return floor_BR
    low = sampling.min_p_B.log() / unscaled(sampling)
    return torch.maximum(floor_BR, logits_BRV.amax(-1) + low[:, None])


def unscaled(sampling: SamplingRows) -> Tensor:
    """Inverse temperatures [B], 1 in greedy rows."""
    inverse = sampling.inverse_temperature_B
    return inverse if sampling.greedy == "none" else torch.where(torch.isinf(inverse), 1.0, inverse)


def partial(sampling: SamplingRows, vocab: int) -> bool:
    """Whether a few of the largest logits tell every floor, so that no row is sorted whole."""
    limited = sampling.all_top_k or not sampling.any_top_p
    return 0 < sampling.most_top_k < vocab and limited


def _nucleus(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """Floors of top-k and top-p."""
    vocab = logits.shape[-1]
    few = partial(sampling, vocab)
    values = logits.topk(min(sampling.most_top_k, vocab) if few else vocab, -1).values  # descending
    floor = torch.full(logits.shape[:2], -torch.inf, device=logits.device)
    last = (sampling.top_k_B.clamp(1, values.shape[-1]) - 1)[:, None, None]
    last = last.expand(-1, values.shape[1], 1)
    if sampling.most_top_k:
        kth = values.gather(2, last)[..., 0]
        floor = torch.where(sampling.top_k_B[:, None] > 0, kth, floor)
    if not sampling.any_top_p:
        return floor
    weights = values * unscaled(sampling)[:, None, None]
    shares = weights.masked_fill(values < floor[..., None], -torch.inf).softmax(-1)
    if few:  # ties at the top-k floor stay in, those beyond the few as well
        same = floor[..., None]
        missing = (logits == same).sum(-1) - (values == same).sum(-1)
        shares = shares / (1 + missing[..., None] * shares.gather(2, last))
    before = shares.cumsum(-1) - shares
    limit = sampling.top_p_B[:, None, None]
    inside = (before < limit) | (limit >= 1)
    inside[..., 0] = True
    nucleus = torch.where(inside, values, torch.inf).amin(-1)
    return torch.where(limit[..., 0] < 1, torch.maximum(floor, nucleus), floor)
